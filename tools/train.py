"""Train a policy on a LeRobot dataset: validate, normalise, pack, train, and measure on held-out
episodes.

    python -m tools.train --data PATH --preset tiny --out runs/mine
    python -m tools.train --data PATH --preset tiny --out runs/mine --resume
    python -m tools.train --data PATH --preset tiny --out runs/mine --trainer.steps 200

Any field of the preset can be given as an option; `--preset NAME --help` lists them. The run's
folder holds config.json, metrics.jsonl, TensorBoard events, the frame store and checkpoints.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from data import open_dataset
from data.loader import Loader, plan_source
from data.plan import Plan
from data.split import Episodes, split_episodes
from data.stats import normalizer
from data.store import ACTION, STATE, Store, cached_store
from data.validate import require_valid
from models import Embodiment, PackedBatch, Pi, Processor
from models.config import to_json
from models.pi import SHARDING_RULES
from models.tokenizer import Tokenizer
from parallel.distributed import host_count, host_index
from parallel.mesh import make_mesh
from parallel.step import TrainState
from parallel.trainer import Run, Trained, train
from tools.presets import RunConfig, load_preset

_EVAL_STEPS = 8


@dataclass(frozen=True)
class Paths:
    """Where data comes from and results go."""

    data: Path
    """LeRobot v3.0 dataset."""
    out: Path
    """Folder of the run."""
    resume: bool = False
    """Go on from the run's last checkpoint."""


@dataclass(frozen=True)
class Prepared:
    """A dataset made ready for one run: the frame store, and which episodes are held out."""

    store: Store
    processor: Processor
    training: Episodes
    held_out: Episodes


def prepare(data: Path, out: Path, config: RunConfig, console: Console) -> Prepared:
    """Validates the dataset, decodes it once into `out`/store and derives the policy's scales.

    Raises:
      ValueError, FileNotFoundError: the dataset is not fit to train on, or not for this model.
    """
    require_valid(data)
    dataset = open_dataset(data)
    _check_fits(dataset.features, data, config)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Decoding frames", total=dataset.num_frames)
        store = cached_store(
            data,
            config.model.image_size,
            config.data.encoding,
            out / "store",
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    training, held_out = np.arange(len(store.lengths)), np.arange(0)
    if config.data.holdout:
        training, held_out = split_episodes(store, config.data.holdout, config.trainer.seed)
    stats = store.stats(training.tolist())
    model = config.model
    words = Tokenizer.build(store.prompts, model.vocabulary).words
    if model.state_input == "text":
        spelt = [*store.prompts, *(f"Task: , State: {b};\nAction: " for b in range(256))]
        words = Tokenizer.build(spelt, model.vocabulary).words
    robot = Embodiment(
        name=data.name,
        cameras=store.cameras,
        state=normalizer(stats[STATE], STATE),
        actions=normalizer(stats[ACTION], ACTION),
    )
    processor = Processor(
        image_size=model.image_size,
        state_dim=model.state_dim,
        action_dim=model.action_dim,
        horizon=model.horizon,
        state_input=model.state_input,
        words=words,
        embodiments=(robot,),
    )
    return Prepared(store, processor, training, held_out)


def run(paths: Paths, config: RunConfig, console: Console | None = None) -> Trained:
    """Trains to the end (or to a signal) and leaves everything in `paths.out`."""
    console = console or Console(quiet=host_index() != 0)
    ready = prepare(paths.data, paths.out, config, console)
    model = Pi(config.model)
    source = plan_source(ready.store, ready.processor, episodes=ready.training.tolist())
    layout = config.layout([source])

    def plan(anchor: Sequence[int] = (0, 0)) -> Plan:
        return Plan([source], layout, config.rows.number, seed=config.trainer.seed, anchor=anchor)

    whole = plan()

    def batches(start: int, position: Any) -> Iterator[PackedBatch]:
        if position is not None and position["plan"] != whole.digest:
            raise ValueError(
                f"{paths.data} or the rows have changed since {paths.out} was saved, so the run "
                f"cannot go on exactly; start a new one in another folder."
            )
        loader = Loader(
            [ready.store],
            ready.processor,
            whole if position is None else plan(position["anchor"]),
            start_step=start,
            host_index=host_index(),
            host_count=host_count(),
            workers=config.data.workers,
        )
        with loader:
            for batch, _ in loader:
                yield batch

    console.print(
        f"{len(ready.training)} episodes to train on, {len(ready.held_out)} held out; rows of "
        f"{layout.prefix} places filled to {whole.fill(range(20)).prefix:.1%}."
    )
    return train(
        model,
        SHARDING_RULES,
        batches,
        lambda step: {"plan": whole.digest, "anchor": whole.position(step)},
        Run(paths.out, to_json(config), {"processor": to_json(ready.processor)}),
        config.trainer,
        config.optimizer,
        mesh=make_mesh(config.mesh),
        resume=paths.resume,
        on_eval=_held_out_metrics(model, ready, config) if len(ready.held_out) else None,
    )


def _held_out_metrics(model: Pi, ready: Prepared, config: RunConfig) -> Any:
    """Measures the averaged parameters on held-out episodes: flow loss, error of sampled actions,
    and that of always giving the mean training action (both mean squares in normalised units)."""
    source = plan_source(ready.store, ready.processor, episodes=ready.held_out.tolist())
    plan = Plan([source], config.layout([source]), config.rows.number, seed=1)
    with Loader([ready.store], ready.processor, plan) as loader:
        batches = [next(loader)[0] for _ in range(_EVAL_STEPS)]
    robot = ready.processor.embodiments[0]
    mean = np.zeros(config.model.action_dim, np.float32)
    dims = len(robot.actions.offset)
    mean[:dims] = robot.actions(ready.store.stats(ready.training.tolist())[ACTION]["mean"])

    @jax.jit
    def measure(params: Any, batch: PackedBatch) -> jax.Array:
        key = jax.random.key(0)
        loss, count = model.loss(params, batch, key)
        sampled = model.sample_actions(params, batch, key)
        errors = [((x - batch.actions) ** 2 * batch.action_mask).sum() for x in (sampled, mean)]
        return jnp.stack([loss, *errors, count])

    def on_eval(step: int, state: TrainState) -> dict[str, float]:
        total = np.sum([measure(state.ema, batch) for batch in batches], axis=0)
        names = ("val_loss", "val_action_mse", "val_mean_action_mse")
        return dict(zip(names, map(float, total[:3] / total[3]), strict=True))

    return on_eval


def _check_fits(features: dict[str, Any], data: Path, config: RunConfig) -> None:
    for name, limit in ((STATE, config.model.state_dim), (ACTION, config.model.action_dim)):
        size = int(np.prod(features[name]["shape"])) if name in features else None
        if size is None or size > limit:
            raise ValueError(
                f"{data}/meta/info.json: feature '{name}' has {size} dims, but the model takes up "
                f"to {limit}; rename the feature or raise the model's dims."
            )


def parse(arguments: Sequence[str]) -> tuple[Paths, RunConfig]:
    """Options into paths and a preset with the user's changes."""
    arguments = list(arguments)
    name = "tiny"
    if "--preset" in arguments:
        at = arguments.index("--preset")
        if at + 1 == len(arguments):
            raise ValueError("--preset needs a name, such as tiny.")
        name = arguments[at + 1]
        del arguments[at : at + 2]
    preset = load_preset(name)

    def command(
        paths: Annotated[Paths, tyro.conf.arg(name="")],
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = preset,
    ) -> tuple[Paths, RunConfig]:
        return paths, config

    return tyro.cli(
        command, args=arguments, description=__doc__, prog="python -m tools.train --preset NAME"
    )


def main() -> None:
    try:
        run(*parse(sys.argv[1:]))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
