"""Preparation of data for a run: each dataset of a mixture is checked and opened, and one processor
is made for all of them, whose `fit` their pictures are given.

Slow work (the check, the frame store and statistics) is done once per content and kept in the run's
`store` folder.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data import Dataset
from data.files import cached
from data.files.folder import Folder, open_folder
from data.frames import Frames
from data.loader.loader import Loader, plan_source
from data.mixture.mixed import Mixed, for_dims, mix
from data.mixture.mixture import (
    DatasetConfig,
    Known,
    Mixture,
    RobotConfig,
    read_mixture,
    resolve,
)
from data.mixture.sample_weights import sample_weights, stored_column, streamed_column
from data.mixture.trust import Consent, remembered
from data.packing.curriculum import largest_weight
from data.packing.order import PlanSource
from data.packing.plan import Plan
from data.store.direct import open_direct
from data.store.numbers import cached_numbers
from data.store.store import Store, cached_store
from data.store.tables import numeric_columns
from data.validation.validate import require_valid
from models import Embodiment, Processor
from models.config import to_json
from models.files.terminal import Console, Progress
from models.files.user_cache import user_cache
from models.inputs.embodiment import Normalizer
from models.inputs.fast import Fast
from models.inputs.pictures import picture_fit
from models.inputs.tokenizer import Tokenizer
from models.layers.quantized import is_quantized
from models.load import check_fit, derived
from models.model import ModelConfig, build_model, function_at, groups_of, init_params
from models.sharding import path_name
from parallel.optimizer import select, with_groups
from tools.recipes.insulation import open_own, prepared_targets, subtask_texts, words_left
from tools.recipes.presets import RunConfig, load_preset
from tools.recipes.statistics import Scalings, kept_scales, show_outside

ANY_ROBOT = Embodiment("any", (), Normalizer.identity(1), Normalizer.identity(1))
"""Holds the place of the data's robots in a preparation that is not theirs yet."""


@dataclass(frozen=True)
class Prepared:
    """A mixture prepared for one run, and how it is shown to the model. `targets`: places of a
    sample for the tokens that the language model is to predict."""

    mixed: Mixed
    processor: Processor
    targets: int = 0

    def sources(self, *, held_out: bool = False) -> list[PlanSource]:
        """Sources for the plan, of each dataset's training episodes, or of its held-out episodes,
        with weights that are the same at every step."""
        mixed = self.mixed
        episodes = mixed.held_out if held_out else mixed.training
        return [
            plan_source(
                feed,
                self.processor,
                episodes=chosen.tolist(),
                weight=largest_weight(weight) if held_out else weight,
                weights=weights,
                name=name,
            )
            for feed, chosen, weight, weights, name in zip(
                mixed.feeds,
                episodes,
                mixed.weights,
                mixed.sample_weights,
                mixed.names,
                strict=True,
            )
        ]

    @property
    def assets(self) -> dict[str, Any]:
        """Contents of a checkpoint besides the state, as JSON: the processor, and every robot's
        statistics by its name."""
        statistics = {
            robot.name: {
                what: {name: values.tolist() for name, values in part.items()}
                for what, part in stats._asdict().items()
            }
            for robot, stats in zip(self.mixed.embodiments, self.mixed.stats, strict=True)
        }
        return {"processor": to_json(self.processor), "statistics": statistics}

    @property
    def episodes(self) -> tuple[int, int]:
        """Numbers of training and held-out episodes."""
        return sum(map(len, self.mixed.training)), sum(map(len, self.mixed.held_out))


def prepare(
    data: str | Path,
    out: Path,
    config: RunConfig,
    console: Console,
    begun: Processor | None = None,
    consent: Consent = remembered,
    statistics: Path | None = None,
    fast: Path | None = None,
) -> Prepared:
    """Opens the dataset or mixture and derives what the model needs of it.

    Args:
      data: a dataset, a frame store (used as is), or a mixture of them.
      out: the run's folder.
      begun: the preparation of a policy to start from, from which this one is derived; if None,
        it is the family's own, with a word list made from the datasets' prompts.
      fast: folder of a FAST tokenizer, for the loss of action tokens; see `prepared_targets`.
      consent: consent to the transforms that a mixture's file names.
      statistics: statistics that `kept_scales` reads, to scale by instead of the data's own.

    Raises:
      ValueError, FileNotFoundError: something is not fit to train on, or does not fit this model.
    """
    check_model(config)
    mixture, cache = read_mixture(data, consent), out / "store"
    datasets = [open_own(dataset, console) for dataset in mixture.datasets]
    held = [known(dataset) for dataset in datasets]
    mixture = _with_cameras(mixture, held, config)
    before = config.model.answered.start
    robots, readings = resolve(mixture, held, config.model.horizon, before)
    state, action = config.data.state_scaling, config.data.action_scaling
    scalings = {
        robot.name: Scalings(robot.state_scaling or state, robot.action_scaling or action)
        for robot in robots
    }
    kept = None if statistics is None else kept_scales(statistics, robots, scalings)
    for dataset, opened, reading in zip(mixture.datasets, datasets, readings, strict=True):
        column = stored_column(opened) if isinstance(opened, Store) else streamed_column(opened)
        sample_weights(dataset, opened.lengths, reading.episodes, column)
    for dataset, columns, reading in zip(mixture.datasets, held, readings, strict=True):
        if kept is not None and reading.transform is None:
            name, sizes = robots[reading.embodiment].name, columns.columns
            states, actions = (sum(sizes[c] for c in x) for x in (dataset.state, dataset.actions))
            for_dims(name, kept[name], states, actions)
    form = _form(config.model, begun, robots)
    frames = [
        dataset
        if isinstance(dataset, Store)
        else _decoded(own, dataset, cache, config, form, reading.cameras, console)
        for own, dataset, reading in zip(mixture.datasets, datasets, readings, strict=True)
    ]
    with Progress(console=console, transient=True) as progress:
        progress.add_task("Taking statistics", total=None)
        mixed = mix(
            mixture,
            frames,
            config.model.horizon,
            holdout=config.data.holdout,
            seed=config.trainer.seed,
            cache=cache,
            state_scaling=state,
            action_scaling=action,
            kept=kept,
            before=before,
        )
    if statistics is not None:
        show_outside(mixed, scalings, statistics, console)
    for robot in mixed.embodiments:
        _check_dims(robot, config)
    if begun is None:
        text = _word_list(mixed, config, fast)
        processor = config.model.processor(mixed.embodiments, text)
    else:
        processor = derived(begun, config.model, mixed.embodiments)
    processor, targets = prepared_targets(mixed, processor, config, console, cache, fast, begun)
    check_fit(config.model, processor, str(data))
    return Prepared(mixed, processor, targets)


def batches(
    data: str | Path, preset: str | RunConfig = "tiny", *, step: int = 0, out: Path | None = None
) -> Loader:
    """A loader of the batches that `tools.train` with this data and preset takes on one device,
    from `step` on; a context manager.

    Args:
      data: a dataset, a frame store, or a mixture of them; its transforms need consent.
      out: folder that keeps the frame store and statistics; this user's cache by default.

    Raises:
      ValueError, FileNotFoundError: as `prepare`.
    """
    config = load_preset(preset) if isinstance(preset, str) else preset
    ready = prepare(data, out or user_cache("batches"), config, Console())
    model = config.model.changed(targets=ready.targets) if ready.targets else config.model
    sources = ready.sources()
    layout = replace(config, model=model).layout(sources)
    plan = Plan(sources, layout, config.rows.number, seed=config.trainer.seed)
    return Loader(ready.mixed.feeds, ready.processor, plan, start_step=step)


def _form(model: ModelConfig, begun: Processor | None, robots: Sequence[RobotConfig]) -> Processor:
    """The run's processor with robots of which only the cameras are known yet."""
    units = Normalizer.identity(model.state_dim), Normalizer.identity(model.action_dim)
    known = [Embodiment(robot.name, robot.cameras, *units) for robot in robots]
    return model.processor(known) if begun is None else derived(begun, model, known)


def _with_cameras(mixture: Mixture, held: list[Known], config: RunConfig) -> Mixture:
    """The mixture with cameras that the family finds in the files of datasets that name none."""
    where = getattr(config.model, "dataset_cameras", None)
    if where is None:
        return mixture
    find, named = function_at(where), []
    for dataset, columns in zip(mixture.datasets, held, strict=True):
        folder = open_folder(dataset.path)

        def local(name: str, folder: Folder = folder) -> Path | None:
            return folder.local(name) if folder.exists(name) else None

        cameras = find(local, columns.columns, dataset.path)
        if cameras is not None and dataset.cameras is None:
            dataset = replace(dataset, cameras=cameras)
        named.append(dataset)
    return replace(mixture, datasets=tuple(named))


def check_model(config: RunConfig) -> None:
    """Refuses configs that this command cannot train.

    Raises:
      ValueError: the model's family does not keep its contract, kernels in few bits would be
        trained, or the adapters to train on them are missing.
    """
    model, compute = build_model(config.model), config.model.compute
    if not compute.quantized:
        return
    if compute.fp8 != "none":
        raise ValueError(
            f"model.compute.fp8 is '{compute.fp8}', which is only for kernels that are not "
            f"quantised, but those at {compute.quantized!r} are in {compute.quantized_kind}; set "
            "model.compute.fp8 to none."
        )
    named = [pattern for pattern, _ in config.optimizer.rate_factors if "lora_" in pattern]
    if named and not config.model.adapted:
        raise ValueError(
            f"optimizer.rate_factors has {named[0]!r}, but the model has no adapters to train "
            f"on kernels in {compute.quantized_kind}; add them at the end of the command, such "
            "as model.vision.lora:lora, or use a preset that has them, such as pi05-qlora."
        )
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    moving = select(with_groups(config.optimizer, groups_of(model)), params)[0]
    parts = jax.tree_util.tree_leaves_with_path(moving, is_leaf=is_quantized)
    for path, leaf in parts:
        if is_quantized(leaf) and any(jax.tree.leaves(leaf)):
            raise ValueError(
                f"model.compute.quantized stores {path_name(path)} in {compute.quantized_kind}, "
                "which cannot be trained, but optimizer.rate_factors does not freeze it; train "
                "only adapters, as in --optimizer.rate-factors 'lora_[ab]$' 1 . 0."
            )


def known(dataset: Dataset | Store) -> Known:
    """Metadata of a dataset, by which a mixture is resolved."""
    if isinstance(dataset, Store):
        return Known.of(dataset)
    columns, episodes = numeric_columns(dataset), len(dataset.lengths)
    return Known(dataset.name, dataset.fps, dataset.cameras, columns, episodes, dataset.prompts)


def _decoded(
    config: DatasetConfig,
    dataset: Dataset,
    cache: Path,
    run: RunConfig,
    form: Processor,
    cameras: tuple[str | None, ...],
    console: Console,
) -> Frames:
    """A dataset that is fit to train on, with the numbers of its store and pictures as `form` fits
    them; `cameras` are its names of the robot's."""
    _check_columns(config, dataset.features, run)
    for warning in _checked(config, dataset.digest, cache, console):
        console.print(f"warning: {warning}")
    if not form.fits:
        return cached_numbers(dataset, cache)
    fit, encoding = form.fit(0), run.data.encoding
    own = {name: form.fit(number) for number, name in enumerate(cameras) if name is not None}
    usual = picture_fit(fit.kind, fit.size)
    fits = {name: each for name, each in own.items() if each != usual}
    if encoding == "direct" or encoding == "direct-exact":
        exact = encoding == "direct-exact"
        return open_direct(dataset, fit.size, cache, fit.kind, exact, fits)
    with Progress(console=console, transient=True) as progress:
        decoding, comparing = map(progress.bar, ("Decoding frames", "Comparing columns"))
        every = 1 if form.observed.pictures or form.observed.shown else config.every
        return cached_store(
            *(dataset, fit.size, encoding, cache, decoding, comparing, fit.kind, every, fits)
        )


def _checked(config: DatasetConfig, digest: str, cache: Path, console: Console) -> list[str]:
    """Warnings about a dataset, remembered by its content and the columns that are trained on once
    it was found fit."""
    columns = (*config.state, *config.actions)
    key = hashlib.sha256(json.dumps([digest, columns]).encode()).hexdigest()
    passed = cache / f"warnings-{key[:16]}.json"
    if not passed.is_file():
        with Progress(console=console, transient=True) as progress:
            progress.add_task("Validating", total=None)
            cached.write_json(passed, [w.message for w in require_valid(config.path, columns)])
    return cached.read_json(passed)


def _check_columns(
    config: DatasetConfig, features: Mapping[str, Mapping[str, Any]], run: RunConfig
) -> None:
    """Refuses, before anything is decoded, untransformed columns too wide for the model."""
    limits = {"state": run.model.state_dim, "action": run.model.action_dim}
    for what, names in (("state", config.state), ("action", config.actions)):
        size = sum(int(np.prod(features[name]["shape"])) for name in names)
        if size > limits[what] and not config.transform:
            raise ValueError(
                f"{config.path}: the {what} {list(names)} has {size} dims, but the "
                f"model takes up to {limits[what]}; choose columns or raise the model's dims."
            )


def _check_dims(robot: Embodiment, config: RunConfig) -> None:
    model = config.model
    for what, size, limit in (
        ("state", len(robot.state.offset), model.state_dim),
        ("action", len(robot.actions.offset), model.action_dim),
    ):
        if size > limit:
            raise ValueError(
                f"embodiment '{robot.name}' has {size} {what} dims, but the model takes up to "
                f"{limit}; choose columns or raise the model's dims."
            )


def _word_list(mixed: Mixed, config: RunConfig, fast: Path | None) -> Tokenizer | None:
    """Words of the datasets' prompts and of what the model is to say; None without language."""
    model = config.model
    if not model.vocabulary:
        return None
    tasks = (wordings for feed in mixed.feeds for wordings in feed.frames.prompts)
    texts = list(dict.fromkeys(wording for wordings in tasks for wording in wordings))
    if "text" in model.cross_entropies:
        texts += subtask_texts(mixed)
    if model.state_input == "text":
        texts += [f"Task: , State: {number};\nAction: " for number in range(256)]
    spelt = fast if "action_tokens" in model.cross_entropies else None
    return Tokenizer.build(texts, words_left(config, None if spelt is None else Fast.load(spelt)))
