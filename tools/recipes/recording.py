"""Demonstrations of a suite's expert, or of a policy, as a LeRobot dataset.

Call `record_dataset` from a notebook or a script; `python -m tools.record` is its command line.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from data.files.partial import require_apart
from data.lerobot.recording import video_feature
from data.lerobot.writer import DatasetWriter, finished_recording
from models.config import to_json
from models.files.own_file import run_file
from models.robot_policy import RobotPolicy
from parallel.prefetch import Prefetcher
from sim.demonstrations import TRIES, Demonstrations
from sim.protocol import EVAL_SEEDS, Spec
from sim.suite import Suite
from sim.suites import load_suite
from tools.recipes.policy import LoadConfig

SEEDS_PER_RECORDING = 1_000_000
RECORDINGS = 1000


@dataclass(frozen=True)
class RecordConfig(LoadConfig):
    """Suite to record, amount and output folder."""

    out: Path
    """Folder to create for the dataset; it must not exist, or must be empty."""
    suite: str = "tabletop-lift"
    """tabletop, tabletop-lift, metaworld, gym:ID, …, or path/to/file.py:NAME."""
    tasks: tuple[str, ...] = ()
    """Tasks of the suite to record; default: all."""
    episodes: int = 50
    """Successful demonstrations of each task to keep."""
    seed: int = 0
    """Recordings with different seeds share no episode."""
    noise: float | None = None
    """Standard deviation of the noise added to the expert's executed actions, as a fraction of each
    action's range; default: the suite's own."""
    subtasks: bool = False
    """Also write what the expert is doing at each step, in words (tabletop)."""
    image_size: int = 48
    """Edge of the camera images, in pixels. A checkpoint uses its own size instead, and LIBERO the
    size of its datasets."""
    draw_every: int = 1
    """Steps from one rendered image to the next. Frames in between repeat the image, and "every" of
    a mixture leaves them out. For metaworld and libero, where rendering is the main cost."""
    antialias: bool = True
    """Render smooth edges, as in the evaluation of policies. Without it, metaworld and libero
    render in half the time."""
    slots: int | None = None
    """Episodes at a time; default: a number that suits the suite."""
    checkpoint: Path | None = None
    """Run directory or checkpoint of a policy that acts instead of the suite's expert."""
    replan_steps: int = 4
    """Steps of each of the policy's chunks that are executed before it observes again."""
    takeover: int | None = None
    """Largest number of steps before the suite's expert takes over from the policy. The number is
    drawn for each episode, and only what the expert then does is recorded. For training on
    situations in which a policy errs."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Resume an interrupted recording, up to the requested number of episodes; give the other
    options as at its start."""


def record_dataset(
    config: RecordConfig, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Records the dataset; `progress` is called with (episodes kept, episodes asked for).

    Returns:
      `tried`, `kept` and `failed` (by their simulator) episodes, `frames` and `seconds`. If the
      recording was already complete, `tried` and `failed` are unknown: None.

    Raises:
      ValueError: the folder is not empty, a number is out of range, there is no such task, no
        expert or policy can act, the one that acts keeps failing, or policies are evaluated on
        starts of the recording.
    """
    start = time.perf_counter()
    require_apart(config.out, [] if config.checkpoint is None else [config.checkpoint])
    suite = load_suite(config.suite)
    _check(config)
    if config.draw_every > 1 or not config.antialias:
        suite = _cheaper(suite, config)
    alone = config.checkpoint is not None and config.takeover is None
    if config.subtasks and (suite.phases is None or alone):
        who = f"suite '{suite.name}'" if suite.phases is None else "a policy"
        raise ValueError(
            f"--subtasks is given, but {who} does not report its subtask at each step; the "
            "tabletop's experts do."
        )
    groups, seeds = suite.groups(config.tasks), _seeds(suite, config)
    if config.family is not None:
        run_file(config.family)
    policy = None
    if config.checkpoint is not None:
        policy = config.load(config.checkpoint)
        if policy.session().remembers:
            raise ValueError(
                f"{config.checkpoint}: reads past observations or takes the mean of overlapping "
                "chunks (model.observed, model.temporal_ensemble_coeff), which recording does not "
                "keep; record with another policy."
            )
    seen = config.image_size if policy is None else policy.model.config.edge
    size = suite.edge(seen)
    asked, tried, failed = config.episodes * sum(map(len, groups)), 0, 0
    if config.resume and (done := _finished(config.out, asked)) is not None:
        return done | {"seconds": round(time.perf_counter() - start, 1)}
    writer: DatasetWriter | None = None
    features: dict[str, Any] = {}
    with ExitStack() as stack:
        count = suite.count(config.slots, config.episodes * len(groups[0]))
        for group in groups:
            before = [note for note in writer.notes if note["task"] in group] if writer else []
            if len(before) == config.episodes * len(group):
                tried, failed = tried + before[-1]["tried"], failed + before[-1]["failed"]
                continue
            with closing(suite.open(group, count, size)) as slots:
                spec = slots.spec
                robot = None if policy is None else RobotPolicy.in_suite(policy, spec)
                theirs = spec_features(spec)
                if writer is None:
                    features = theirs
                    writer = stack.enter_context(
                        DatasetWriter(
                            config.out,
                            fps=spec.fps,
                            features=features,
                            robot_type=suite.name.replace("/", "-"),
                            subtasks=config.subtasks,
                            resume=config.resume,
                            about=_about(config),
                        )
                    )
                    before = [note for note in writer.notes if note["task"] in group]
                elif theirs != features:
                    raise ValueError(
                        f"{spec.name} does not have the same features as {groups[0][0]}; record "
                        "tasks of one robot at a time."
                    )
                made = Demonstrations(
                    slots,
                    group,
                    config.episodes,
                    first_seed=seeds.start,
                    noise=suite.noise if config.noise is None else config.noise,
                    policy=None if robot is None else robot.act,
                    replan_steps=config.replan_steps,
                    takeover=config.takeover,
                    phases=suite.phases if config.subtasks else None,
                    kept_before=before,
                )
                with Prefetcher(iter(made), lambda episode: episode, depth=count) as episodes:
                    for episode in episodes:
                        writer.add_episode(*episode)
                        progress(writer.num_episodes, asked)
            tried, failed = tried + made.tried, failed + made.failed
    assert writer is not None
    return {
        "tried": tried,
        "kept": asked,
        "failed": failed,
        "frames": writer.num_frames,
        "seconds": round(time.perf_counter() - start, 1),
    }


def spec_features(spec: Spec) -> dict[str, Any]:
    """Features of a LeRobot dataset of the observations and actions of such environments, in the
    form that its writer takes."""

    def column(names: tuple[str, ...]) -> dict[str, Any]:
        return {"dtype": "float32", "shape": (len(names),), "names": list(names)}

    return {
        "observation.state": column(spec.state_names),
        "action": column(spec.action_names),
        **dict.fromkeys(spec.cameras, video_feature((*spec.picture, 3))),
    }


def _seeds(suite: Suite, config: RecordConfig) -> range:
    """Seeds of the episodes that a recording may try."""
    first = suite.recorded_from + config.seed * SEEDS_PER_RECORDING
    seeds, judged = range(first, first + TRIES * config.episodes), suite.judged(suite.episodes)
    if max(seeds.start, judged.start) < min(seeds.stop, judged.stop):
        raise ValueError(
            f"Recording {config.seed} of suite '{suite.name}' may try seeds {seeds.start} … "
            f"{seeds.stop - 1}, which overlap the seeds that policies are evaluated on, "
            f"{judged.start} … {judged.stop - 1}; choose another --seed or fewer --episodes, or "
            f"remove the suite's first_seed (default: {EVAL_SEEDS.start})."
        )
    return seeds


def _about(config: RecordConfig) -> dict[str, Any]:
    """Everything that decides which episodes are recorded, as plain data."""
    every = json.loads(json.dumps(to_json(config), default=str))
    return {name: said for name, said in every.items() if name not in ("out", "resume", "slots")}


def _finished(out: Path, asked: int) -> dict[str, Any] | None:
    """Summary of a complete recording; None if there is something left to do."""
    dataset = finished_recording(out)
    if dataset is None:
        return None
    if dataset.num_episodes != asked:
        raise ValueError(
            f"{out}: is a finished dataset of {dataset.num_episodes} episodes, but {asked} were "
            "asked for; record the others with another --seed and join both with `tools.data "
            "edit`."
        )
    return {"tried": None, "kept": asked, "failed": None, "frames": dataset.num_frames}


def _check(config: RecordConfig) -> None:
    noisy = config.noise is None or config.noise >= 0
    counts = ("episodes", "image_size", "replan_steps", "draw_every")
    if not noisy or any(getattr(config, name) < 1 for name in counts):
        told = ", ".join(f"{name} = {getattr(config, name)}" for name in counts)
        raise ValueError(
            f"{told} and noise = {config.noise}: each must be at least 1, and noise at least 0."
        )
    if config.takeover is not None and config.takeover < config.replan_steps:
        raise ValueError(
            f"takeover is {config.takeover}; expected at least {config.replan_steps} "
            "(replan_steps), the steps that the policy acts before it observes again."
        )
    of_policy = {
        **{name: getattr(config, name) for name in ("euler_steps", "solver", "dtype", "takeover")},
        **config.options.flat(),
    }
    if config.checkpoint is None and (given := [name for name, x in of_policy.items() if x]):
        raise ValueError(
            f"{given[0]} is {of_policy[given[0]]}, but without --checkpoint the suite's expert "
            "acts, which has no such option; give --checkpoint, or leave "
            f"--{given[0].replace('_', '-')} out."
        )
    if not 0 <= config.seed < RECORDINGS:
        raise ValueError(
            f"The recording's seed is {config.seed}, expected 0 … {RECORDINGS - 1}; choose another."
        )


def _cheaper(suite: Suite, config: RecordConfig) -> Suite:
    if suite.cheaper is None:
        raise ValueError(
            f"draw_every is {config.draw_every} and antialias is {config.antialias}, but suite "
            f"'{suite.name}' cannot draw more cheaply; leave these options out."
        )
    if config.checkpoint is not None and config.replan_steps % config.draw_every:
        raise ValueError(
            f"draw_every is {config.draw_every}, but the policy observes every "
            f"{config.replan_steps} steps (replan_steps) and would see outdated images; choose "
            "a divisor of replan_steps."
        )
    return suite.cheaper(config.draw_every, config.antialias)
