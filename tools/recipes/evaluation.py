"""Evaluation of a checkpoint's policy in a suite, beside its controls, with a report.

Call `run` from a notebook or a script; `python -m tools.evaluate` is its command line.
"""

import json
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.video.video import encode_mp4
from models import Policy
from models.checkpoints import digests, own
from models.checkpoints.remote import local
from models.config import to_json
from models.files.own_file import run_file
from models.files.terminal import Console, say
from models.flow.realtime_chunking import Chunking
from models.formats import check_kind
from parallel.hosts import exits
from parallel.monitor.metrics import read_metrics
from parallel.runs.atomic import replace_text
from parallel.runs.json_lines import set_damage_aside
from parallel.runs.run_lock import locked
from sim.clips import ENCODING
from sim.journal import Journal, in_order
from sim.report.report import Report, write_report
from sim.results import Evaluation, Perturbed, compared
from sim.suite import Suite
from sim.suites import load_suite
from tools.command_line.versions import versions
from tools.recipes.conditions import (
    Beside,
    Condition,
    Perturbation,
    conditions,
    evaluate_all,
    perturbations,
)
from tools.recipes.policy import (
    LIGHTER,
    LoadConfig,
    PolicyOptions,
    camera_map,
    given_options,
    own_checkpoint,
)
from tools.serving.remote import RemotePolicy
from tools.serving.token import read_token

JOURNAL = "episodes.jsonl"
"""Name of the file, in the folder of results, that keeps finished episodes."""


@dataclass(frozen=True)
class EvaluateConfig(LoadConfig):
    """Policy, suite and size of an evaluation."""

    checkpoint: Path | None = None
    """Run directory, one of its checkpoints, or any other that models.load_policy reads."""
    out: Path = field(kw_only=True)
    """Folder for episodes.jsonl, evaluation.json and report.html."""
    suite: str = "tabletop-lift"
    """tabletop, tabletop-lift, metaworld, libero_spatial, …, or path/to/file.py:NAME."""
    tasks: tuple[str, ...] = ()
    """Selection of the suite's tasks; default: all."""
    episodes: int | None = None
    """Starts per task; default: as many as the suite's authors use."""
    slots: int | None = None
    """Episodes that run at the same time; default: a number that suits the suite."""
    replan_steps: int = 4
    """Steps executed of each chunk before the policy observes again."""
    delay: int = 0
    """Control steps from an observation until its chunk is available; until then the robot executes
    the previous chunk. It waits for the first chunk of an episode."""
    chunking: Chunking = "none"
    """Continuation of the previous chunk (docs/chunking.md): none switches to the new chunk, guided
    draws the new chunk towards what was planned, trained gives the committed actions to a policy
    that was trained to continue them."""
    controls: tuple[Beside, ...] = ()
    """Controls on the same starts: the same network untrained, the suite's scripted expert, the
    policy given another goal, the policy shown images of zeros."""
    perturb: tuple[str, ...] = ()
    """Changes under which the policy also acts from the same starts, one at a time: camera, light,
    texture, distractors, paraphrase, delay, noise, or one of the suite's own variants; all selects
    every change that the suite has (docs/evaluation.md)."""
    compare: Path | None = None
    """Another checkpoint, compared with the first on the same starts."""
    policy: str | None = None
    """Server to evaluate instead of a checkpoint: ws://HOST:PORT or wss://…, ours or openpi's."""
    token_file: Path | None = None
    """File whose only line is the token that this server requires."""


def run(config: EvaluateConfig, console: Console) -> dict[str, Evaluation]:
    """Evaluates a checkpoint and writes evaluation.json and its report.

    Raises:
      ValueError, FileNotFoundError: no such suite or checkpoint, they do not fit each other, or
        the folder holds episodes of another evaluation, or another run is at work in it.
    """
    _check(config)
    number = "the suite's number of" if config.slots is None else config.slots
    size = f"the policy acts in {number} episodes at a time"
    lighter = exits.in_memory(size, ("fewer of them (--slots)", *LIGHTER))
    with lighter, locked(config.out, console), ExitStack() as opened:
        if config.family is not None:
            run_file(config.family)
        suite = load_suite(config.suite)
        if config.checkpoint is None:
            token, cameras = read_token(config.token_file), camera_map(config.options.cameras)
            remote = RemotePolicy(str(config.policy), token, cameras)
            acting = _Acting.behind(opened.enter_context(remote), console)
        else:
            at = local(config.checkpoint, check=check_kind)
            acting = _Acting.of(at, _load(at, config))
        return _evaluated(config, acting, suite, console)


def _evaluated(
    config: EvaluateConfig, acting: "_Acting", suite: Suite, console: Console
) -> dict[str, Evaluation]:
    options, dtype, cameras = config.options, config.dtype, config.options.cameras
    loaded = given_options(options, dtype)
    if of_server := config.policy is not None:  # then so are --cameras, and no other option
        loaded = given_options(PolicyOptions(cameras=cameras))
    usual = conditions(acting.policy, config.controls, acting.identity)
    wanted = [replace(condition, loaded=loaded) for condition in usual]
    if config.compare is not None:
        options = replace(options, cameras=() if of_server else cameras)
        at = local(config.compare, check=check_kind)
        other = _load(at, replace(config, options=options))
        of_other = given_options(options, dtype)
        wanted.append(Condition("compared", other, checkpoint=_identity(at), loaded=of_other))
    if config.delay or config.chunking != "none":
        wanted = [replace(condition, delay=config.delay) for condition in wanted]
    episodes = suite.episodes if config.episodes is None else config.episodes
    changes, left_out = perturbations(
        suite, wanted[0], config.perturb, config.tasks, config.replan_steps, episodes
    )
    for name, why in left_out.items():
        console.print(f"  {name} is left out: {why}")
    set_damage_aside(config.out / JOURNAL, in_order(), console)
    act = partial(
        evaluate_all,
        console=console,
        tasks=config.tasks or suite.tasks,
        episodes=episodes,
        slots=config.slots,
        replan_steps=config.replan_steps,
        journal=Journal(config.out / JOURNAL),
    )
    results = act(suite, wanted + [p.condition for p in changes if p.suite is suite])
    for change in changes:
        if change.suite is not suite:
            results |= act(change.suite, [change.condition])
    perturbed = {p.condition.name: _beside(p, results) for p in changes}
    pairs = compared(results["trained"], results["compared"]) if config.compare else None
    summary = {
        "suite": config.suite,
        "delay": config.delay,
        "chunking": config.chunking,
        "evaluations": {name: result.to_json() for name, result in results.items()},
        "comparison": pairs.to_json() if pairs else None,
        "robustness": {name: change.to_json() for name, change in perturbed.items()},
        "left_out": left_out,
    }
    replace_text(config.out / "evaluation.json", json.dumps(summary, indent=2) + "\n")
    unchanged = {name: found for name, found in results.items() if name not in perturbed}
    report = replace(
        report_of(config.suite, unchanged, acting.folder, acting.config),
        comparisons={"compared": pairs} if pairs else {},
        perturbed=perturbed,
        left_out=left_out,
    )
    if config.delay or config.chunking != "none":
        late = f"chunks {config.delay} steps after their observation, chunking '{config.chunking}'"
        report = replace(report, title=f"{report.title}, {late}")
    write_report(config.out / "report.html", report)
    if pairs:
        console.print(f"{acting.name} minus {config.compare}: {pairs}")
    console.print(f"Report: {config.out / 'report.html'}")
    return results


def report_of(
    suite: str,
    results: Mapping[str, Evaluation],
    directory: Path | None,
    config: Mapping[str, Any],
    seconds: Mapping[str, float] | None = None,
) -> Report:
    """A report on evaluations, with the training metrics of the run in `directory` unless the run
    was moved without them."""
    metrics = read_metrics(directory) if directory else []
    fills = [row["fill"] for row in metrics if "fill" in row]
    return Report(
        title=f"{suite}: closed-loop success on held-out starts",
        task=suite,
        evaluations=results,
        metrics=metrics,
        fill={"prefix places": float(np.mean(fills))} if fills else {},
        seconds=seconds or {},
        config=config,
        versions=versions(),
        encode=partial(encode_mp4, options=ENCODING),
    )


def _beside(change: Perturbation, results: Mapping[str, Evaluation]) -> Perturbed:
    found = results[change.condition.name]
    return Perturbed(change.about, found, compared(found, results["trained"]))


@dataclass(frozen=True)
class _Acting:
    """A policy with what a report says about it; `identity` distinguishes it from any other."""

    policy: Policy | RemotePolicy
    name: str
    identity: str
    folder: Path | None
    config: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Path, policy: Policy) -> "_Acting":
        name, identity = str(checkpoint), _identity(checkpoint)
        if (found := own_checkpoint(checkpoint)) is None:
            return cls(policy, name, identity, None, {"model": to_json(policy.model.config)})
        return cls(policy, name, identity, found.parent.parent, own.read_json(found, "config"))

    @classmethod
    def behind(cls, policy: RemotePolicy, console: Console) -> "_Acting":
        says = json.dumps(policy.metadata, sort_keys=True, default=str)
        say(console, f"The server at {policy.url} describes itself as {says}")
        identity = f"{policy.url}, {zlib.crc32(says.encode()):08x}"
        return cls(policy, policy.url, identity, None, {"server": json.loads(says)})


def _load(checkpoint: Path, config: EvaluateConfig) -> Policy:
    return replace(config.load(checkpoint), chunking=config.chunking)


def _check(config: EvaluateConfig) -> None:
    """Refuses all but one policy to evaluate, and options of loading for one behind a server."""
    if (config.checkpoint is None) == (config.policy is None):
        raise ValueError(
            "Give either --checkpoint, or --policy with a server's URL (ws://HOST:PORT)."
        )
    if config.policy is None:
        if config.token_file is not None:
            raise ValueError("--token-file is for a server's --policy; a checkpoint needs none.")
        return
    if config.chunking != "none":
        raise ValueError(
            f"--chunking is '{config.chunking}', but a server remembers one chunk per "
            "connection, and episodes share connections here; leave it at 'none' with "
            "--policy, or evaluate the --checkpoint itself."
        )
    if config.compare is not None:
        return
    sampler = {"euler_steps": config.euler_steps, "solver": config.solver}
    here = {**config.options.flat(), **sampler, "dtype": config.dtype}
    given = [name for name, value in here.items() if value and name != "cameras"]
    if given:
        raise ValueError(
            f"{given[0]} is {here[given[0]]}, but the policy is loaded by its server; give it "
            f"--{given[0].replace('_', '-')} there."
        )


def _identity(checkpoint: Path) -> str:
    """Text that is the same for the same parameters, wherever a checkpoint of ours lies."""
    found = own_checkpoint(checkpoint)
    if found is None:
        return str(checkpoint.resolve())
    return f"step {found.name}, {zlib.crc32((found / digests.NAME).read_bytes()):08x}"
