"""Train a policy on a LeRobot dataset: validate, normalise, pack, train, and measure on held-out
episodes.

    python -m tools.train --data PATH --preset tiny
    python -m tools.train --data PATH --preset tiny --out runs/mine --resume
    python -m tools.train --data PATH --preset tiny --out runs/mine --trainer.steps 200
    python -m tools.train --data PATH --preset pi05 --init checkpoints/pi05_base \\
        --tokenizer paligemma_tokenizer.model

Any field of the preset can be given as an option; `--preset NAME --help` lists them. The run's
folder holds config.json, metrics.jsonl, TensorBoard events, the frame store and checkpoints.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

from data import open_dataset
from data.former_store import ACTION, STATE, Store, cached_store
from data.loader import Loader, plan_source
from data.plan import Plan
from data.split import Episodes, split_episodes
from data.stats import normalizer
from data.validate import require_valid
from models import Embodiment, PackedBatch, Pi, Processor
from models.config import to_json
from models.load import begin_from, look
from models.pi import SHARDING_RULES
from models.tokenizer import SentencePiece, Tokenizer
from parallel.distributed import host_count, host_index, put_batch
from parallel.mesh import make_mesh, replicated
from parallel.step import TrainState
from parallel.trainer import CONFIG_NAME, Run, Trained, check_start, train
from tools.presets import RunConfig, load_preset

_EVAL_STEPS = 8
_FREE = {
    "mesh",
    "data.workers",
    *(f"trainer.{n}" for n in ("log_every", "save_every", "keep", "eval_every", "prefetch")),
}
"""What a resumed run may change: its losses stay the same."""


@dataclass(frozen=True)
class Paths:
    """Where data comes from and results go."""

    data: Path
    """LeRobot v3.0 dataset."""
    out: Path | None = None
    """Folder of the run; runs/NAME-OF-THE-DATASET if not given."""
    resume: bool = False
    """Go on from the run's last checkpoint."""
    init: Path | None = None
    """Checkpoint to begin from, of any kind that models.load_policy reads."""
    tokenizer: Path | None = None
    """SentencePiece file, for an --init that came without its tokenizer."""

    @property
    def folder(self) -> Path:
        """Where the run lives."""
        return self.out or Path("runs") / self.data.resolve().name


@dataclass(frozen=True)
class Text:
    """How prompts are read: see `Processor`."""

    words: tuple[str, ...] = ()
    sentencepiece: str = ""


@dataclass(frozen=True)
class Prepared:
    """A dataset made ready for one run: the frame store, and which episodes are held out."""

    store: Store
    processor: Processor
    training: Episodes
    held_out: Episodes


def prepare(
    data: Path, out: Path, config: RunConfig, console: Console, text: Text | None = None
) -> Prepared:
    """Validates the dataset, decodes it once into `out`/store and derives the policy's scales.

    Args:
      text: how a policy to begin from reads prompts; a word list is made of the dataset's if None.

    Raises:
      ValueError, FileNotFoundError: the dataset is not fit to train on, or not for this model.
    """
    with Progress(console=console, transient=True) as progress:
        progress.add_task("Validating", total=None)
        warnings = require_valid(data)
    for warning in warnings:
        console.print(f"warning: {warning.message}", highlight=False)
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
        training, held_out = split_episodes(store, config.data.holdout, config.trainer.seed)  # type: ignore[arg-type]
    stats = store.stats(training.tolist())
    model = config.model
    if text is None:
        texts = list(store.prompts)
        if model.state_input == "text":
            texts += [f"Task: , State: {number};\nAction: " for number in range(256)]
        text = Text(words=Tokenizer.build(texts, model.vocabulary).words)
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
        words=text.words,
        sentencepiece=text.sentencepiece,
        embodiments=(robot,),
    )
    return Prepared(store, processor, training, held_out)


def run(paths: Paths, config: RunConfig, console: Console | None = None) -> Trained:
    """Trains to the end (or to a signal) and leaves everything in the run's folder.

    Raises:
      ValueError, FileNotFoundError: something does not fit; nothing has been written then.
    """
    console = console or Console(quiet=host_index() != 0)
    out, mesh = paths.folder, make_mesh(config.mesh)
    check_start(out, paths.resume, config.rows.number, mesh, config.trainer, config.optimizer)
    if paths.resume:
        _check_same(out, json.loads((out / CONFIG_NAME).read_text()), to_json(config))
    ready = prepare(paths.data, out, config, console, _text(paths))
    model = Pi(config.model)
    source = plan_source(ready.store, ready.processor, episodes=ready.training.tolist())
    layout = config.layout([source])

    plan = Plan([source], layout, config.rows.number, seed=config.trainer.seed)
    content = {"plan": plan.digest, "data": ready.store.digest}

    def batches(start: int, position: Any) -> Iterator[PackedBatch]:
        if position is not None and position != content:
            raise ValueError(
                f"{paths.data} has changed since {out} was saved, so the run cannot go on "
                f"exactly; start a new one in another folder."
            )
        loader = Loader(
            [ready.store],
            ready.processor,
            plan,
            start_step=start,
            host_index=host_index(),
            host_count=host_count(),
            workers=config.data.workers,
        )

        def rows() -> Iterator[PackedBatch]:
            with loader:
                for batch, _ in loader:
                    yield batch

        return rows()

    console.print(
        f"{len(ready.training)} episodes to train on, {len(ready.held_out)} held out; rows of "
        f"{layout.prefix} places filled to {plan.fill(range(20)).prefix:.1%}."
    )
    return train(
        model,
        SHARDING_RULES,
        batches,
        lambda step: content,
        Run(out, to_json(config), {"processor": to_json(ready.processor)}),
        config.trainer,
        config.optimizer,
        mesh=mesh,
        resume=paths.resume,
        initial=_initial(paths, model, config),
        on_eval=_held_out_metrics(model, ready, config, mesh) if len(ready.held_out) else None,
    )


def _text(paths: Paths) -> Text | None:
    """The tokenizer of the policy to begin from, which its embedding was trained with."""
    if paths.tokenizer is not None:
        return Text(sentencepiece=SentencePiece.read(paths.tokenizer).model)
    if paths.init is None:
        return None
    processor = look(paths.init).processor
    if processor is None or not (processor.words or processor.sentencepiece):
        raise ValueError(
            f"{paths.init} came without the tokenizer that its embedding was trained with; give "
            f"--tokenizer FILE (PaliGemma's is paligemma_tokenizer.model)."
        )
    return Text(processor.words, processor.sentencepiece)


def _initial(paths: Paths, model: Pi, config: RunConfig) -> Any:
    init = paths.init
    if init is None:
        return None
    return lambda like: begin_from(init, model, like, config.trainer.seed)


def _held_out_metrics(model: Pi, ready: Prepared, config: RunConfig, mesh: Mesh) -> Any:
    """Measures the averaged parameters on held-out episodes: flow loss, error of sampled actions,
    and that of always giving the mean training action (both mean squares in normalised units)."""
    source = plan_source(ready.store, ready.processor, episodes=ready.held_out.tolist())
    plan = Plan([source], config.layout([source]), config.rows.number, seed=1)
    with Loader(
        [ready.store],
        ready.processor,
        plan,
        host_index=host_index(),
        host_count=host_count(),
    ) as loader:
        batches = [put_batch(next(loader)[0], mesh) for _ in range(_EVAL_STEPS)]
    robot = ready.processor.embodiments[0]
    mean = np.zeros(config.model.action_dim, np.float32)
    dims = len(robot.actions.offset)
    mean[:dims] = robot.actions(ready.store.stats(ready.training.tolist())[ACTION]["mean"])

    @partial(jax.jit, out_shardings=replicated(mesh))
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


def _check_same(out: Path, saved: Any, config: Any, where: str = "") -> None:
    """Refuses to resume with another config, but for what does not change what is learnt."""
    if isinstance(saved, dict) and isinstance(config, dict):
        for name in sorted(set(saved) | set(config)):
            if f"{where}{name}" not in _FREE:
                _check_same(out, saved.get(name), config.get(name), f"{where}{name}.")
    elif saved != config:
        raise ValueError(
            f"{out / CONFIG_NAME}: {where[:-1]} is {saved}, but {config} was asked for; resume "
            f"with the same preset and options, or start a new run in another folder."
        )


def _check_fits(features: dict[str, Any], data: Path, config: RunConfig) -> None:
    if config.model.compute.quantized:
        raise ValueError(
            f"model.compute.quantized is {config.model.compute.quantized!r}; kernels kept in "
            f"float8 serve a policy and cannot be trained, leave it empty."
        )
    if config.model.cross_entropies:
        raise ValueError(
            f"model.text_loss is {config.model.text_loss} and model.action_token_loss "
            f"{config.model.action_token_loss}, but this command prepares neither subtasks nor "
            f"FAST tokens; set both to 0, or train as docs/insulation.md shows."
        )
    for name, limit in ((STATE, config.model.state_dim), (ACTION, config.model.action_dim)):
        size = int(np.prod(features[name]["shape"])) if name in features else None
        if size is None or size > limit:
            raise ValueError(
                f"{data}/meta/info.json: feature '{name}' has {size} dims, but the model takes up "
                f"to {limit}; rename the feature or raise the model's dims."
            )


def parse(arguments: Sequence[str]) -> tuple[Paths, RunConfig]:
    """Options into paths and a preset with the user's changes."""
    arguments = [part for a in arguments for part in _split_preset(a)]
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


def _split_preset(argument: str) -> list[str]:
    name, equals, value = argument.partition("=")
    return [name, value] if name == "--preset" and equals else [argument]


def main() -> None:
    """Command line."""
    try:
        run(*parse(sys.argv[1:]))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
