"""A training run from its preset: validate, normalise, pack, train, and measure on held-out
episodes.

Call `run` from a notebook or a script; `python -m tools.train` is its command line.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from data.dataset import use_format
from data.files.partial import require_apart
from data.loader.loader import Loader
from data.mixture.mixture import is_mixture
from data.packing.plan import Plan
from data.packing.shares import share_facts, told_shares
from models import Layout, PackedBatch, Policy, Processor
from models.checkpoints import own
from models.checkpoints.own import is_own
from models.checkpoints.remote import local
from models.config import from_json, to_json
from models.files.address import parse
from models.files.terminal import Console, counted, say
from models.flow import flow
from models.formats import check_kind
from models.inputs.tokenizer import SentencePiece
from models.layers.pipeline import check_pipeline
from models.load import begin_from, begin_new, inspect_params, trained_preparation
from models.model import Augmented, Model, bind_processor, groups_of, require, rules_of
from parallel.evaluations import HELD_OUT_LOSS, check_metric
from parallel.hooks import Hook
from parallel.hosts import exits
from parallel.hosts.distributed import host_index, put_batch, row_share
from parallel.hosts.job import first_host_first, restarts
from parallel.hosts.watchdog import note
from parallel.mesh import make_mesh, replicated, row_shards
from parallel.monitor.metrics import read_metrics
from parallel.optimizer import with_groups
from parallel.runs.mirror import put_logs
from parallel.runs.run_folder import CONFIG_NAME, Run, RunFolder, holds_run, read_config
from parallel.shell import Resume, opened
from parallel.step import TrainState
from parallel.trackers.trackers import check_trackers
from parallel.trainer import TrainResult, check_start, train
from tools.command_line.consent import consent
from tools.recipes.insulation import short_digest, subtask_texts
from tools.recipes.prepare import ANY_ROBOT, Prepared, prepare
from tools.recipes.presets import RunConfig, check_more_steps, check_same, warmed_as_begun

Measure = Callable[[int, TrainState, Callable[[], bool]], dict[str, float]]

_TOLD_STEPS = 20
_EVAL_STEPS = 8
_FREE = {
    "mesh",
    "closed_loop",
    "model.compute.pipeline",
    *(f"data.{n}" for n in ("workers", "threads", "skip_unreadable")),
    *(f"trainer.{n}" for n in ("log_every", "save_every", "keep", "eval_every", "prefetch")),
    *(f"trainer.{n}" for n in ("keep_every", "keep_best", "patience", "profile")),
    "trainer.train_steps",
}
"""Settings that a resumed run may change, as its losses stay the same; its steps only if the
schedule does not end with them."""
_JUDGING = {"trainer.on_bad_step", "trainer.spike_factor"}
"""Settings that it may also change if bad steps stop the run: then none of the steps made was
bad."""
_SCALINGS = ("state_scaling", "action_scaling")
"""Fields of `data` that configs of earlier runs lack."""


@dataclass(frozen=True)
class Paths:
    """Paths of data and results."""

    data: str
    """Dataset or frame store (a folder or URL), or a mixture of several datasets (.json, .toml)."""
    out: Path | None = None
    """Folder of the run; default: runs/NAME-OF-THE-DATASET."""
    resume: Resume = False
    """Resume from the run's last checkpoint; with auto, start if there is no run, which is the
    default in a job that tools.launch or SLURM has restarted."""
    mirror: str | None = None
    """Folder (s3://…, gs://…) to copy the run's checkpoints to. With --resume, a run whose folder
    is lost resumes from this copy, and a run that is in neither place starts as a new one."""
    init: Path | None = None
    """Checkpoint (path or URL) to start from; any kind that models.load_policy reads."""
    tokenizer: Path | None = None
    """SentencePiece file, for an --init checkpoint that comes without its tokenizer; for GR00T, the
    folder of Eagle's processor, or its tokenizer.json."""
    embodiment: tuple[str, ...] = ()
    """For GR00T: for each robot in the data, its tag, such as new_embodiment, or its row in the
    model's tables."""
    statistics: Path | None = None
    """Checkpoint, or norm_stats.json, policy_preprocessor.json or stats.json, from which to take
    the scaling of states and actions; default: the data's own."""
    fast: Path | None = None
    """Folder of a FAST tokenizer, for the loss of action tokens and for π0-FAST; default: that of
    the --init policy, or one trained on the data."""
    trust: bool = False
    """Run the transforms (Python programs) that a mixture's file names."""
    data_format: str = ""
    """path/to/file.py:NAME of your own Format for reading datasets; see docs/own_dataset.md."""
    track: tuple[str, ...] = ()
    """Trackers that also get the metrics: wandb, mlflow or trackio, each optionally with :PROJECT,
    or your own, as path/to/file.py:NAME; see docs/trackers.md."""
    preset: Annotated[str, tyro.conf.Suppress] = ""
    """Name of the preset that the config was made of, for people."""
    warmup_given: Annotated[bool, tyro.conf.Suppress] = field(default=True, compare=False)
    """The user chose the warm-up; without it, a resumed run keeps its own."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        name = Path(parse(self.data).name)
        return self.out or Path("runs") / (name.stem if is_mixture(name) else name)


def run(paths: Paths, config: RunConfig, console: Console | None = None) -> TrainResult:
    """Trains to the end (or to a signal) and leaves everything in the run's folder.

    Raises:
      ValueError, FileNotFoundError: something does not fit; nothing has been written then.
    """
    note("preparing")
    from_json(RunConfig, json.loads(json.dumps(to_json(config))))  # refuses what is no number
    console = console or Console(quiet=host_index() != 0)
    out, mesh = paths.folder, make_mesh(config.mesh)
    resume: Resume = paths.resume or ("auto" if restarts() else False)
    check_start(config.rows.number, mesh, config.trainer, config.optimizer)
    check_trackers(paths.track)
    if not holds_run(out):
        require_apart(out, [paths.data])
    with opened(out, resume, console, paths.mirror) as folder:
        return _run(paths, config, console, mesh, folder)


def _run(
    paths: Paths, config: RunConfig, console: Console, mesh: Mesh, folder: RunFolder
) -> TrainResult:
    out, (index, count) = paths.folder, row_share(mesh)
    if paths.init is not None:
        paths = replace(
            paths, out=out, init=local(paths.init, check=check_kind)
        )  # one version of it throughout
    if (stages := mesh.shape["stage"]) > 1:
        pipeline, rows = config.model.compute.pipeline, config.rows.number
        at_once = rows // config.trainer.accumulation
        for depth in require(config.model, "pipelined", "training on stages"):
            check_pipeline(pipeline, stages, depth, at_once, row_shards(mesh))
        console.print(
            f"{stages} stages process {pipeline.on(stages).microbatches} micro-batches, "
            f"{pipeline.repeats} times around; bubble {pipeline.bubble(stages):.0%}."
        )
    begun = first_host_first(lambda: read_config(out, console)) if folder.resume else None
    config = _for_robots(paths, config, begun)
    unknown: list[str] = []
    if begun is not None:
        saved = from_json(RunConfig, begun)
        unknown = [name for name in _SCALINGS if name not in begun.get("data", {})]
        config = _scaled_as_begun(config, saved, unknown, console)
        if not paths.warmup_given:
            optimizer = warmed_as_begun(config.optimizer, saved.optimizer, console)
            config = replace(config, optimizer=optimizer)
        if config.model.cross_entropies and not config.model.targets:
            config = replace(config, model=config.model.changed(targets=saved.model.targets))
        free = _FREE | (_JUDGING if saved.trainer.on_bad_step == "stop" else set())
        check_same(out / CONFIG_NAME, to_json(saved), to_json(config), free)
        before, steps = saved.trainer.train_steps, config.trainer.train_steps
        check_more_steps(out / CONFIG_NAME, before, steps, config.optimizer)
    find = getattr(config.model, "pretrained", None)
    new = begun is None and paths.init is None
    pretrained = find() if find is not None and new else None
    if paths.data_format:
        use_format(paths.data_format)
    agreed = consent(paths.trust, jax.process_count() == 1, console)
    ready = first_host_first(
        lambda: prepare(
            paths.data,
            out,
            config,
            console,
            _begun(paths, config, begun is not None),
            agreed,
            paths.statistics,
            paths.fast,
        )
    )
    if ready.targets:
        config = replace(config, model=config.model.changed(targets=ready.targets))
    model, sources = bind_processor(config.model.build(), ready.processor), ready.sources()
    layout = config.layout(sources)
    seed, ranks = config.trainer.seed, row_shards(mesh)
    plan = Plan(sources, layout, config.rows.number, seed=seed, ranks=ranks)
    content = {"plan": plan.digest, "data": ready.mixed.digest}
    if paths.statistics is not None:
        robots = ready.mixed.embodiments
        content["scales"] = short_digest([(one.name, one.state, one.actions) for one in robots])
    if ready.targets:
        tokens = ready.processor.targets
        spelt = (None, 0) if tokens is None else (tokens.fast, tokens.top)
        content["targets"] = short_digest((*spelt, subtask_texts(ready.mixed)))

    def batches(start: int, position: Any) -> Iterator[tuple[PackedBatch, dict[str, float]]]:
        if position is not None and position.get("scales") != content.get("scales"):
            now = paths.statistics or "the data's own"
            raise ValueError(
                f"{out} was trained on the scales of other statistics than {now}; give the "
                "--statistics that it began with, or start a new run in another folder."
            )
        if position is not None and position.get("targets") != content.get("targets"):
            raise ValueError(
                f"{out} was trained with other action tokens or subtasks than those of this "
                "data and --fast; give the --fast that it began with, or start a new run in "
                "another folder."
            )
        if position is not None and position != content:
            raise ValueError(
                f"{paths.data} (or the version of this code or of scipy) has changed since "
                f"{out} was saved, so the run cannot be continued exactly; start a new one in "
                "another folder."
            )
        loader = Loader(
            ready.mixed.feeds,
            ready.processor,
            plan,
            start_step=start,
            host_index=index,
            host_count=count,
            workers=config.data.workers,
            threads=config.data.threads,
            skip_unreadable=config.data.skip_unreadable,
        )

        def rows() -> Iterator[tuple[PackedBatch, dict[str, float]]]:
            with loader:
                for batch, info in loader:
                    apart = {"attention_excess": plan.excess(info.step)} if ranks > 1 else {}
                    apart |= share_facts(plan, info.step, config.trainer.log_every)
                    yield batch, info.facts(count) | apart

        return rows()

    trained, held_out = ready.episodes
    slowest = np.mean([plan.excess(step) for step in range(_TOLD_STEPS)])
    console.print(
        f"{counted(trained, 'episode')} to train on, {held_out} held out; rows of "
        f"{layout.prefix} places "
        f"filled to {plan.fill(range(_TOLD_STEPS)).prefix:.1%}"
        + f"; the slowest of {ranks} ranks has {slowest:.1%} more attention than their mean"
        * (ranks > 1)
        + "."
    )
    if len(sources) > 1:
        say(console, told_shares(plan, _TOLD_STEPS, config.trainer.train_steps))
    cameras = tuple(robot.cameras for robot in ready.processor.embodiments)
    if config.trainer.keep_best or config.trainer.patience:
        metric = config.trainer.keep_best or HELD_OUT_LOSS
        check_metric(metric, _measured(model) if held_out else ())
    measures = [_held_out_metrics(model, ready, config, mesh)] if held_out else []
    initial = None if pretrained is None else partial(begin_new, pretrained, model, seed=seed)
    if paths.init is not None:
        initial = partial(begin_from, paths.init, model, seed=seed)
    with exits.in_memory(*_memory(config, layout)), ExitStack() as stack:
        if config.closed_loop.suite:
            from tools.recipes.closed_loop import ClosedLoop  # and with it simulators

            policy = Policy(model, None, ready.processor)
            acting = stack.enter_context(ClosedLoop(config.closed_loop, policy, out, console))
            measures.append(acting.begin)
        result = train(
            Augmented(model, config.augment, cameras),
            rules_of(model),
            batches,
            lambda step: content,
            Run(
                folder,
                _without(to_json(config), unknown),
                ready.assets,
                {"preset": paths.preset, "data": paths.data},
            ),
            config.trainer,
            with_groups(config.optimizer, groups_of(model)),
            mesh=mesh,
            initial=initial,
            hooks=[Hook(config.trainer.eval_every, measure) for measure in measures],
            track=paths.track,
        )
        if config.closed_loop.suite and not result.finished:
            acting.abandon()
    if config.closed_loop.suite and paths.mirror is not None and host_index() == 0:
        put_logs(paths.mirror, out)
    return result


def summary(paths: Paths, result: TrainResult) -> str:
    """A sentence on a finished run: where it is, its last held-out loss, and its best checkpoint
    by that loss, of those that it keeps."""
    folder, rows = paths.folder, read_metrics(paths.folder)
    losses = {row["step"] + 1: row[HELD_OUT_LOSS] for row in rows if HELD_OUT_LOSS in row}
    said = f"{folder} is finished after {result.step} steps"
    if losses:
        said += f"; its held-out loss is {losses[max(losses)]:.4g}"
    kept = [step for step in own.steps(folder / "checkpoints") if step in losses]
    if kept:
        best = min(kept, key=lambda step: (not np.isfinite(losses[step]), losses[step]))
        said += f", and its best checkpoint {folder / 'checkpoints' / str(best)}"
        said += f" ({losses[best]:.4g})" * (losses[best] != losses[max(losses)])
    return f"{said}."


def _memory(config: RunConfig, layout: Layout) -> tuple[str, list[str]]:
    """The size of a step, and options that make it smaller, in the order in which to try them."""
    size = (
        f"a step takes {config.rows.number} rows, each of {layout.prefix} places, "
        f"{layout.samples} samples and {layout.images} pictures"
    )
    kept = [".".join(path) for path in _recomputing(config.model, ("model",))]
    return size, [
        f"fewer rows (--rows.number, now {config.rows.number})",
        f"smaller rows (--rows.samples, now {config.rows.samples})",
        *(f"recomputation (--{path} full)" for path in kept[:1]),
        f"more micro-batches (--trainer.accumulation, now {config.trainer.accumulation})",
        "QLoRA (docs/qlora.md)",
        "parameters shared out over more devices (--mesh.fsdp)",
    ]


def _recomputing(config: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the fields `remat` of a config that do not recompute all yet."""
    for name, value in vars(config).items() if is_dataclass(config) else ():
        if name == "remat" and value != "full":
            yield (*path, name)
        yield from _recomputing(value, (*path, name))


def _scaled_as_begun(
    config: RunConfig, saved: RunConfig, unknown: Sequence[str], console: Console
) -> RunConfig:
    """The config with the scaling of a run that began before kinds of scaling were options."""
    kept = {name: getattr(saved.data, name) for name in unknown}
    for name, kind in kept.items():
        if getattr(config.data, name) != kind:
            say(
                console,
                f"This run began before data.{name} was an option; it continues with '{kind}', "
                f"not '{getattr(config.data, name)}'.",
            )
    return replace(config, data=replace(config.data, **kept))


def _without(config: dict[str, Any], unknown: Sequence[str]) -> dict[str, Any]:
    """The config to save, still without kinds of scaling, so that the run can resume again."""
    data = {name: value for name, value in config["data"].items() if name not in unknown}
    return config | {"data": data}


def _begun(paths: Paths, config: RunConfig, resumed: bool) -> Processor | None:
    """The preparation of the policy to start from, as the run has had it if it is resumed; that of
    another model's language, if only its tokenizer is given; None without either."""
    tokenizer = None if paths.tokenizer is None else local(paths.tokenizer)
    if paths.init is not None:
        made = trained_preparation(paths.init, config.model, tokenizer, paths.fast)
        kept = inspect_params(paths.folder).processor if resumed and is_own(paths.folder) else None
        return made if kept is None else kept.with_robots(kept.embodiments, targets=made.targets)
    if tokenizer is None:
        return None
    return config.model.processor([ANY_ROBOT], SentencePiece.read(tokenizer))


def _for_robots(paths: Paths, config: RunConfig, begun: Any) -> RunConfig:
    """The config with the rows that the model keeps for the data's robots: as given, as when the
    run began, or as in the checkpoint to start from."""
    model = config.model
    if paths.embodiment:
        choose = require(model, "for_robots", "training with --embodiment")
        return replace(config, model=choose(paths.embodiment))
    take = getattr(model, "with_rows_of", None)
    if take is None:
        return config
    if begun is not None:
        return replace(config, model=take(from_json(RunConfig, begun).model))
    if paths.init is None:
        return config
    found = inspect_params(paths.init)
    return replace(config, model=take(found.config, found.format and str(paths.init)))


def _held_out_metrics(model: Model, ready: Prepared, config: RunConfig, mesh: Mesh) -> Measure:
    """Measures the averaged parameters on held-out episodes with unchanged pictures: the loss and
    each of its terms (cross-entropies in nats per token), the error of sampled actions, given the
    true subtask if there is one, and the error of always giving the robot's mean action (both
    errors are mean squares in normalised units)."""
    sources = ready.sources(held_out=True)
    plan = Plan(sources, config.layout(sources), config.rows.number, seed=1)
    index, count = row_share(mesh)
    with Loader(
        ready.mixed.feeds,
        ready.processor,
        plan,
        host_index=index,
        host_count=count,
        skip_unreadable=config.data.skip_unreadable,
    ) as loader:
        batches = [put_batch(next(loader)[0], mesh) for _ in range(_EVAL_STEPS)]
    robots = ready.mixed.embodiments
    means = np.zeros((len(robots), config.model.action_dim), np.float32)
    for mean, robot, stats in zip(means, robots, ready.mixed.stats, strict=True):
        mean[: len(robot.actions.offset)] = robot.actions(stats.actions["mean"])

    terms = getattr(model, "term_names", ())

    @partial(jax.jit, out_shardings=replicated(mesh))
    def measure(params: Any, batch: PackedBatch) -> jax.Array:
        key = jax.random.key(0)
        parts: list[jax.Array] = []
        if terms:
            losses = require(model, "losses", "the terms of its loss")
            loss, (count, found) = losses(params, batch, key)
            parts = [found[name] for name in terms]
        else:
            loss, count = model.loss(params, batch, key)
        noise = flow.draw(key, batch.sample_id, 1, batch.actions.shape[2:])[1][:, :, 0]
        sampled = model.sample_actions(params, batch, noise)
        usual = jnp.asarray(means)[batch.embodiment][:, :, None]
        errors = [((x - batch.actions) ** 2 * batch.action_mask).sum() for x in (sampled, usual)]
        scale = count / batch.action_mask.sum()  # the loss may count fewer entries
        return jnp.stack([loss, *(error * scale for error in errors), *parts, count])

    def hook(step: int, state: TrainState, stopping: Callable[[], bool]) -> dict[str, float]:
        measured = []
        for batch in batches:
            if stopping():
                return {}
            measured.append(measure(state.averaged, batch))
        total = np.sum(measured, axis=0)
        return dict(zip(_measured(model), map(float, total[:-1] / total[-1]), strict=True))

    return hook


def _measured(model: Model) -> tuple[str, ...]:
    """Names of what `_held_out_metrics` measures, in its order."""
    terms = (f"val_{name}" for name in getattr(model, "term_names", ()))
    return (HELD_OUT_LOSS, "val_action_mse", "val_mean_action_mse", *terms)
