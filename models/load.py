"""A policy from any supported checkpoint: ours, openpi's Orbax directories, or safetensors of
LeRobot's π0 and π0.5 and of GR00T-N1.5.

The kind is found from the files and the sizes from the arrays' shapes. Arguments give what neither
the files nor the shapes show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from models.checkpoints import own
from models.checkpoints.load import read
from models.checkpoints.remote import CONFIG, local, refuse_adapter
from models.checkpoints.rename import Table
from models.checkpoints.sources import CheckpointSource
from models.config import from_json, model_config
from models.files.foreign_json import read_json
from models.files.terminal import logger
from models.flow.flow import Solver
from models.formats import CheckpointInfo, check_kind, find_format
from models.inputs.bpe import ByteBpe
from models.inputs.camera_names import with_names
from models.inputs.embodiment import MODEL_UNITS, Embodiment
from models.inputs.fast import Fast
from models.inputs.pictures import PictureFit
from models.inputs.processor import Processor
from models.inputs.tokenizer import SentencePiece
from models.layers import stack
from models.layers.float8.fp8 import HISTORY_LEAF
from models.layers.quantized import (
    Kernel,
    Kind,
    Nf4,
    is_quantized,
    quantize_kernel,
    shape_of,
)
from models.model import (
    STACKED,
    Model,
    ModelConfig,
    adapters,
    build_model,
    quantize_params,
    rules_of,
)
from models.policy import Policy
from models.sharding import shardings

PyTree = Any

_log = logger(__name__)


def load_policy(
    path: Path | str,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    euler_steps: int | None = None,
    solver: Solver | None = None,
    cameras: Mapping[str, str] | None = None,
    tokenizer: Path | str | None = None,
    fast: Path | str | None = None,
    robot: str | None = None,
    apart: bool = False,
    **options: Any,
) -> Policy:
    """The policy in a checkpoint, ready to act.

    Args:
      path: a run or checkpoint of ours (averaged parameters), a directory of openpi's (with
        `params`, or `params` itself), or a file or directory of safetensors; or the URL of one
        (hf://org/name@revision, s3://…, gs://…), which is downloaded.
      dtype: of the parameters in memory, such as "bfloat16"; as saved (ours) or float32 if None.
        Activations use it too if it is given.
      mesh: shards the parameters over it; if None, they go to the first device.
      euler_steps: steps of the sampler, written into the model's config; the config's own if None.
      solver: solver of the sampler, likewise: "euler" or "ab2" (docs/results/solver.md).
      cameras: the robot's names of cameras, each mapped to the model's; the model's other cameras
        keep their names and may be absent.
      tokenizer: a SentencePiece file, which openpi's checkpoints lack, or for GR00T a
        tokenizer.json or the folder of one, or its URL; needed for prompts as text.
      fast: folder of the FAST tokenizer, for a π0-FAST that came without it.
      robot: which of several robots acts. For a checkpoint of ours: its name in the mixture that
        the checkpoint was trained on (the first robot if None). For another code's: one of those
        whose statistics it has.
      options: what the files of another code do not say, by the names of that format's options
        (`PiOptions` for openpi's and LeRobot's π, `GrootOptions` for GR00T); or fields of the
        model's config by which it acts, such as GR00T's `padding`.
      apart: keeps the weights of each layer apart (`models.layers.stack`). The policy acts faster,
        but its parameters cannot be saved or trained.

    Raises:
      FileNotFoundError: there is no checkpoint at `path`.
      ValueError: the checkpoint is of another kind or of an unknown family, is incomplete, or holds
        NaN (every difference is listed); `euler_steps` is less than one; the family has no sampler
        or no such solver, or computes in one dtype only; an option is unknown; neither the files,
        the folder's name nor the options say how the policy acts (every open question is listed);
        or `apart` is given with a mesh.
    """
    if apart and mesh is not None:
        raise ValueError("Layers are kept apart on one device only; leave out `apart` or `mesh`.")
    if euler_steps is not None and euler_steps < 1:
        raise ValueError(f"euler_steps is {euler_steps}; the sampler needs at least one step.")
    path = local(path, check=check_kind)
    found = inspect_checkpoint(path, cameras=cameras, robot=robot, **options)
    config, processor = found.config, found.processor
    if tokenizer is not None and processor is not None:
        processor = with_tokenizer(processor, local(tokenizer))
        check_fit(config, processor, str(tokenizer))
    if fast is not None:
        processor = _with_fast(path, processor, local(fast))
        check_fit(config, processor, str(fast))
    computed = dtype or (config.compute.dtype if found.source is None else "float32")
    if computed != config.compute.dtype:
        config = config.computing(dtype=computed)
    if euler_steps is not None:
        if not config.euler_steps:
            raise ValueError(
                f"euler_steps is {euler_steps}, but {config.family} has no flow sampler; leave it "
                "out."
            )
        config = config.changed(euler_steps=euler_steps)
    if solver not in (None, config.solver):
        config = config.changed(solver=solver)
    model = build_model(config)
    params = load_params(path, like_model(model, dtype, mesh), found, as_saved=dtype is None)
    if apart and (stacked := getattr(model, STACKED, None)) is not None:
        params = stack.apart(params, stacked, free=True)
    acting = _chosen(path, found, robot)
    if processor is not None and processor.embodiments[acting].name == MODEL_UNITS:
        _log.warning(
            "%s has no statistics of a robot, as a base to train from: it reads the state and "
            "gives actions in the model's units, which are not a robot's.",
            path,
        )
    return Policy(model, params, processor, embodiment=acting)


def load_params(
    path: Path, like: PyTree, found: CheckpointInfo | None = None, as_saved: bool = False
) -> PyTree:
    """Loads only the parameters, with the shardings and dtypes of `like` (a tree of
    ShapeDtypeStructs); with `as_saved`, those that a checkpoint of ours holds in 16 bits stay so.
    Kernels that are quantised in `like` but not in the checkpoint are quantised one by one, as they
    are read.

    Raises:
      FileNotFoundError, ValueError: as `load_policy`.
    """
    path = local(path, check=check_kind)
    found = inspect_params(path) if found is None else found
    turned: dict[str, Any] = {}
    if not found.config.compute.quantized:
        flat = flatten_dict(like, sep="/")
        turned = {p: partial(_quantised, p, leaf) for p, leaf in flat.items() if is_quantized(leaf)}
        whole = {p: _unquantised(leaf) if p in turned else leaf for p, leaf in flat.items()}
        like = unflatten_dict(whole, sep="/")
    if found.source is None or found.table is None:
        return own.restore_params(path, "ema", like, turned, as_saved)
    return read(found.source, found.table, like, turned)


def begin_from(path: Path, model: Model, like: PyTree, seed: int) -> PyTree:
    """The parameters of `like` to train from: those of a checkpoint and, if the model has adapters
    but the checkpoint has none, new adapters, which have no effect at first.

    Files of other codes do not record the alpha of their adapters; it is taken from the model.

    Raises:
      FileNotFoundError, ValueError: as `load_policy`; the checkpoint is of another model, or its
        adapters have another rank or alpha.
    """
    path = local(path, check=check_kind)
    found = inspect_params(path)
    _check_bits(path, found.config, model.config)
    if found.source is None:
        _check_adapters(path, found.config, model.config)
    wanted = flatten_dict(like, sep="/")
    held = {path for path in wanted if not path.endswith(HISTORY_LEAF)}
    if not found.config.adapted:
        held = {path for path in held if "/lora_" not in path}
    loaded = load_params(path, unflatten_dict({p: wanted[p] for p in held}, sep="/"), found)
    return _with_fresh(model, loaded, wanted, seed)


def begin_new(
    found: tuple[CheckpointSource, Table], model: Model, like: PyTree, seed: int
) -> PyTree:
    """The parameters of `like` for a run from nothing: those that the config's `pretrained` found,
    the others drawn.

    Raises:
      ValueError: the file does not hold these parameters.
    """
    (source, table), wanted = found, flatten_dict(like, sep="/")
    held = {path: leaf for path, leaf in wanted.items() if path in table.by_path}
    return _with_fresh(model, read(source, table, unflatten_dict(held, sep="/")), wanted, seed)


def _with_fresh(model: Model, loaded: PyTree, wanted: Mapping[str, Any], seed: int) -> PyTree:
    """The loaded parameters, with new ones for those that are wanted besides."""
    flat = flatten_dict(loaded, sep="/")
    fresh = sorted(set(wanted) - set(flat))
    if not fresh:
        return loaded

    def draw() -> dict[str, jax.Array]:
        params = flatten_dict(model.init(jax.random.key(seed)), sep="/")
        return {path: params[path] for path in fresh}

    drawn = jax.jit(draw, out_shardings={path: wanted[path].sharding for path in fresh})()
    return unflatten_dict(flat | drawn, sep="/")


def like_model(model: Model, dtype: str | None = None, mesh: Mesh | None = None) -> PyTree:
    """A model's parameters as ShapeDtypeStructs, of `dtype` and sharded over `mesh` if given."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype or x.dtype)), shapes
    )
    wanted = jax.eval_shape(partial(quantize_params, model.config), wanted)
    if mesh is None:
        return wanted
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        wanted,
        shardings(wanted, rules_of(model), mesh),
    )


def inspect_checkpoint(
    path: Path,
    *,
    cameras: Mapping[str, str] | None = None,
    robot: str | None = None,
    **options: Any,
) -> CheckpointInfo:
    """A checkpoint's config and processor, without reading its arrays.

    Args:
      cameras, robot, options: as `load_policy`.

    Raises:
      FileNotFoundError, ValueError: as `load_policy`.
    """
    path = local(path, check=check_kind)
    found = inspect_params(path)
    asks = () if found.format is None else found.format.asks
    given = {n: x for n, x in {**options, "robot": robot}.items() if x is not None}
    for name in given.keys() & found.config.renamed.keys():
        raise ValueError(f"{name} is now {found.config.renamed[name]}; give it by this name.")
    asked = {n: x for n, x in given.items() if n in asks}
    settings = {n: x for n, x in given.items() if n not in asks and n in found.config.acting}
    known = asked | settings
    _check_untold(path, found, {n: x for n, x in given.items() if n not in known})
    if found.format is not None:
        told = found.format.options(**asked)
        config, processor = found.format.acts(path, found, told)
        found = replace(found, config=config, processor=processor)
        if processor is not None and processor.has_tokenizer:
            check_fit(config, processor, str(path))
    if settings:
        found = replace(found, config=found.config.changed(**settings))
    if cameras is None or found.processor is None:
        return found
    robots = [with_names(robot, cameras) for robot in found.processor.embodiments]
    return replace(found, processor=found.processor.with_robots(robots))


def inspect_params(path: Path) -> CheckpointInfo:
    """A checkpoint's format, and as much of its config as its parameters determine; a processor if
    the checkpoint is ours.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: it is damaged, or of no known format.
    """
    path = local(path, check=check_kind)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint's directory or file.")
    if own.is_own(path):
        return _from_own(own.find(path))
    folder = path if path.is_dir() else path.parent
    refuse_adapter(
        str(folder), [x.name for x in folder.iterdir()] if path.is_dir() else [path.name]
    )
    known = find_format(path)
    if (known is None or known.general) and (file := folder / CONFIG).is_file():
        check_kind(read_json(file), str(file))
    return _from_own(own.find(path)) if known is None else known.inspect(path)


def _check_bits(path: Path, found: ModelConfig, wanted: ModelConfig) -> None:
    """Raises ValueError if kernels are quantised, but in another way than was asked for."""
    held, asked = ((c.compute.quantized, c.compute.quantized_kind) for c in (found, wanted))
    if held[0] and held != asked:
        now = f"--model.compute.quantized {asked[0]!r} in {asked[1]}" if asked[0] else "f32"
        raise ValueError(
            f"{path} has kernels at {held[0]!r} in {held[1]}, but {now} was asked for; begin from "
            "the checkpoint that it was quantised from, or ask for the same."
        )


def _check_adapters(path: Path, found: ModelConfig, wanted: ModelConfig) -> None:
    """Raises ValueError if adapters have another rank or alpha than those asked for."""
    asked = dict(adapters(wanted))
    for field, held in adapters(found):
        if asked.get(field, held) != held:
            raise ValueError(
                f"{path} has adapters of rank {held.rank} and alpha {held.alpha} ({field}), but "
                f"rank {asked[field].rank} and alpha {asked[field].alpha} were asked for, which "
                "would change what they compute; ask for the same."
            )


def _unquantised(leaf: Kernel) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(leaf), jnp.float32, sharding=leaf.q.sharding)


def _quantised(path: str, leaf: Kernel, kernel: jax.Array) -> Any:
    kind: Kind = "nf4" if isinstance(leaf, Nf4) else _KINDS[str(leaf.q.dtype)]
    placed = None if leaf.q.sharding is None else jax.tree.map(lambda x: x.sharding, leaf)
    return jax.jit(lambda k: quantize_kernel(path, k, kind), out_shardings=placed)(kernel)


_KINDS: dict[str, Kind] = {"float8_e4m3fn": "float8", "int8": "int8"}


def _check_untold(path: Path, found: CheckpointInfo, left: Mapping[str, Any]) -> None:
    """Raises ValueError if options are left that say what a checkpoint's own files say."""
    config = found.config
    same = {"horizon": config.horizon} if found.format is None else {}
    if wrong := [n for n, x in left.items() if same.get(n) != x and n != "robot"]:
        raise ValueError(
            f"The files of {path} already say how its policy acts (its chunks have "
            f"{config.horizon} steps); leave out {', '.join(wrong)}."
        )


def _chosen(path: Path, found: CheckpointInfo, robot: str | None) -> int:
    """Index of a robot among those that a checkpoint of ours knows."""
    if robot is None or found.source is not None:
        return 0
    names = [e.name for e in found.processor.embodiments] if found.processor else []
    if robot not in names:
        raise ValueError(f"{path} has no robot '{robot}'; choose one of {names}.")
    return names.index(robot)


def _from_own(path: Path) -> CheckpointInfo:
    told = own.read_json(path, "config"), own.read_json(path, "assets")
    if not all(isinstance(values, dict) for values in told) or not isinstance(
        told[0].get("model"), dict
    ):
        raise ValueError(
            f"{path} has a config without a model, so it is not a checkpoint of a policy."
        )
    model, saved = told[0]["model"], told[1].get("processor")
    config = model_config(model, f"{path}: model")
    processor = None if saved is None else from_json(Processor, saved, f"{path}: processor")
    if processor is not None:
        check_fit(config, processor, str(path))
    return CheckpointInfo(config, processor)


def trained_preparation(
    path: Path, config: ModelConfig, tokenizer: Path | None = None, fast: Path | None = None
) -> Processor:
    """The preparation with which the policy in a checkpoint was trained, to train from it.

    Args:
      config: of the model to train.
      tokenizer: for a policy that came without its own.
      fast: likewise; only whether it is given matters here.

    Raises:
      FileNotFoundError, ValueError: as `load_policy`; or the policy came without its preparation or
        a tokenizer.
    """
    found = inspect_params(path)
    made = found.processor
    if found.format is not None:
        made = found.format.prepares(path, found, config)
    if made is None:
        raise ValueError(
            f"{path} came without the preparation (scales, tokenizer) that it was trained with; "
            "start from one that has it."
        )
    if tokenizer is not None:
        made = with_tokenizer(made, tokenizer)
    if made.prompts is not None and not made.has_tokenizer:
        raise ValueError(
            f"{path} came without the tokenizer that its embedding was trained with; give "
            f"--tokenizer {made.prompts.remedy}."
        )
    if made.targets is not None and made.targets.fast is None and fast is None:
        raise ValueError(
            f"{path} came without the FAST tokenizer that it writes its chunks in; give --fast "
            "FOLDER (openpi's and LeRobot's is physical-intelligence/fast)."
        )
    return made


def derived(begun: Processor, config: ModelConfig, robots: Sequence[Embodiment]) -> Processor:
    """The preparation of a policy to start from, for other robots and a model's sizes. Its prompt
    is the family's own only if the model reads the state elsewhere than that policy; a subtask, or
    action tokens that the model does not learn, are left out. Pictures get the model's size."""
    prompts, fits = begun.prompts, begun.pictures
    if isinstance(fits, PictureFit) and len(config.pictures) == 1:
        fits = replace(fits, size=config.image_size)
    if prompts is not None and begun.state_input != config.state_input:
        own = config.processor(robots, prompts.tokenizer).prompts
        prompts = own and replace(own, limit=prompts.limit)
    return begun.with_robots(
        robots,
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        horizon=config.horizon,
        state_input=config.state_input,
        prompts=prompts,
        pictures=fits,
        observed=config.observed,
        targets=begun.targets if "action_tokens" in config.cross_entropies else None,
        subtask_limit=0,
    )


def with_tokenizer(processor: Processor, path: Path) -> Processor:
    """The processor with the tokenizer in a file or folder.

    Raises:
      FileNotFoundError: the file or folder does not exist.
      ValueError: the tokenizer is of another kind than the policy's.
    """
    before = None if processor.prompts is None else processor.prompts.tokenizer
    bpe = isinstance(before, ByteBpe) or Path(path).is_dir() or Path(path).suffix == ".json"
    return processor.with_tokenizer((ByteBpe if bpe else SentencePiece).read(path))


def _with_fast(path: Path, processor: Processor | None, folder: Path) -> Processor:
    """The processor with the FAST tokenizer in a folder, for a policy that came without one."""
    if processor is None or processor.targets is None:
        raise ValueError(f"{path} does not write its chunks in FAST tokens; leave out fast.")
    given = Fast.load(folder)
    if processor.targets.fast not in (None, given):
        raise ValueError(
            f"{folder} is not the FAST tokenizer that {path} was trained with; leave out fast, as "
            "the checkpoint has its own."
        )
    return replace(processor, targets=replace(processor.targets, fast=given))


def check_fit(config: ModelConfig, processor: Processor, where: str) -> None:
    """Raises ValueError, naming `where` and the field, unless the processor prepares what the model
    reads: what its family asks for, no token outside its vocabulary, and no more embodiments than
    it tells apart."""
    try:
        config.check_processor(processor)
        text = processor.tokenizer.size if processor.has_tokenizer else 0
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    robots, targets = len(processor.embodiments), processor.targets
    if config.embodiments is not None and robots > config.embodiments:
        raise ValueError(
            f"{where}: there are {robots} embodiments, but the model distinguishes only "
            f"{config.embodiments} (model.embodiments)."
        )
    size = max(text, 0 if targets is None or targets.fast is None else targets.top + 1)
    if size > config.vocabulary:
        raise ValueError(
            f"{where}: the tokenizer has ids up to {size - 1}, but model.vocabulary is "
            f"{config.vocabulary}; give the tokenizer that the model was trained with."
        )
