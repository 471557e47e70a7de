"""Reading of Chiliad's own checkpoints: one directory per step with arrays (orbax) and JSON files.

`parallel.checkpoint` writes them; reading lives here because a policy is rebuilt from its
checkpoint alone. The latest one is always looked up on disk, and what is read of it is first
verified against its digests.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1 as ocp

from models.checkpoints import digests
from models.checkpoints.declared import check_declared
from models.checkpoints.remote import local
from models.checkpoints.sources import require_opened
from models.files.address import whole
from models.files.foreign_json import read_json as read_object
from models.files.terminal import logger
from models.layers.float8.fp8 import HISTORY_LEAF
from models.sharding import named_leaves, path_name, placed

Json = Any
PyTree = Any

_JSON = ("position", "config", "assets")
_ARRAYS = "state/"
_NARROW = ("bfloat16", "float16")
_CHUNK_BYTES = 2**26
"""Smallest size of a read, so that little is read in vain with other shardings than the saved
one."""
_SLICE_BYTES = 2**20
"""Copies of an array share its writing if each has at least this many bytes; smaller slices only
cost compile time."""


def steps(directory: Path) -> list[int]:
    """Steps that have a complete checkpoint in `directory`, ascending."""
    directory = Path(directory)
    entries = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(entry.name) for entry in entries if _is_checkpoint(entry))


def is_own(path: Path) -> bool:
    """True if `find` would find a checkpoint in a local path."""
    one = _is_checkpoint(path) and (path / "config").exists()
    return one or bool(steps(path)) or bool(steps(path / "checkpoints"))


def find(path: Path) -> Path:
    """The checkpoint at `path`, or the latest one if `path` is a run or its `checkpoints` folder.
    If `path` is a URL, it is downloaded first.

    Raises:
      FileNotFoundError: there is none.
    """
    path = whole(local(path))
    if _is_checkpoint(path):
        return path
    for directory in (path, path / "checkpoints"):
        saved = steps(directory)
        if saved:
            return directory / str(saved[-1])
    raise FileNotFoundError(
        f"{path} holds no complete checkpoint; give a run directory, its checkpoints folder or one "
        f"numbered folder in it."
    )


def read_json(path: Path, name: str) -> Json:
    """The "position", "config" or "assets" saved in the checkpoint that `find(path)` names.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: a file of it is missing, was not saved with it or, outside the arrays, is damaged.
    """
    path = find(path)
    refuse(path, digests.damage(path, skip=_ARRAYS))
    with reading(path / name), context():
        return ocp.load_checkpointables(path, {name: None})[name]


def restore_params(
    path: Path,
    which: str = "ema",
    like: PyTree | None = None,
    turned: Mapping[str, Callable[[jax.Array], Any]] = MappingProxyType({}),
    as_saved: bool = False,
) -> PyTree:
    """Loads only the "ema" or the "params" of a checkpoint, for acting.

    `like` (arrays or ShapeDtypeStructs, with shardings if they are to be sharded) is what the model
    expects. Arrays get its dtypes, and the scales' history of a run in float8 is not loaded if the
    model has none. Without `like`, everything is loaded as a nested dict, on the first device.
    `turned` has, by path, functions that convert an array of `like`; these arrays are loaded one by
    one, after the others. `as_saved` keeps arrays in 16 bits as saved.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: it is damaged, or of another model than `like`.
    """
    if which not in ("ema", "params"):
        raise ValueError(f"which is {which!r}; a checkpoint has 'ema' and 'params'.")
    path = find(path)
    together = like is not None and not all(map(_is_ours, jax.tree.leaves(like)))
    index, count = (jax.process_index(), jax.process_count()) if together else (0, 1)
    refuse(path, digests.damage(path, index=index, count=count))
    saved = _part(path, metadata(path), which)
    if like is not None:
        check_same(path, _kept(saved, like), like)
    declared = named_leaves(saved).items()
    check_declared(
        path / "state", {n: math.prod(x.shape) * np.dtype(x.dtype).itemsize for n, x in declared}
    )
    if like is not None and as_saved:
        like = _typed(like, saved)
    wanted = jax.tree.map(placed, saved if like is None else like)

    def load(part: PyTree) -> PyTree:
        with reading(path), context(partial=True):
            return ocp.load_checkpointables(path, {"state": {which: part}})["state"][which]

    if not turned:
        return load(wanted)
    flat = flatten_dict(wanted, sep="/")
    rest = {name: leaf for name, leaf in flat.items() if name not in turned}
    loaded = flatten_dict(load(unflatten_dict(rest, sep="/")), sep="/")
    for name, turn in turned.items():
        one = load(unflatten_dict({name: flat[name]}, sep="/"))
        loaded[name] = turn(flatten_dict(one, sep="/")[name])
    return unflatten_dict(loaded, sep="/")


def refuse(path: Path, damage: list[str]) -> None:
    """Raises ValueError if `digests.damage` found any in the checkpoint at `path`.

    It never falls back to another step: whoever acts with a checkpoint, or compares it, must know
    which one it is.
    """
    if not digests.is_sealed(path):
        raise ValueError(
            f"{path} cannot be verified: it has no {digests.NAME}, which was lost or never "
            "written (early versions wrote none); if you trust the checkpoint, write it with "
            f"`python -m tools.checkpoint seal {path}`."
        )
    if damage:
        more = f" ({len(damage)} problems in all)" if len(damage) > 1 else ""
        others = [step for step in steps(path.parent) if str(step) != path.name]
        remedy = f" or use another step: {', '.join(map(str, others))}" if others else ""
        raise ValueError(
            f"{path} is damaged and was not loaded: {damage[0]}{more} Copy it again{remedy}."
        )


def context(partial: bool = False) -> ocp.Context:
    """Orbax's settings to read and write these checkpoints."""
    registry = ocp.handlers.local_registry()
    for name in _JSON:
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=name)
    found = ocp.Context()
    found.checkpointables.registry = registry
    found.async_options.create_directories_asynchronously = False  # a failure leaves no thread
    saving = found.array.saving
    saving.use_compression = False  # saves 8 % of the size for five times the CPU time
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    saving.min_slice_bytes_for_replica_parallel = _SLICE_BYTES
    found.pytree.loading.partial_load = partial
    return found


def metadata(path: Path) -> dict[str, PyTree]:
    """Shapes and dtypes of the saved state, without its arrays.

    Raises:
      ValueError: the files that tell them are damaged.
    """
    state = path / "state"
    read_object(state / "_METADATA")
    for file in (*state.glob("_sharding"), *state.glob("array_metadatas/*")):
        read_object(file)
    require_opened(state)
    with reading(state), context():
        return dict(ocp.checkpointables_metadata(path).metadata["state"])


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of orbax, whatever their type, as a ValueError that names the path of a checkpoint
    that matches its digests. Its warnings are not shown."""
    log = logger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} matches its digests but is not of a Chiliad checkpoint "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); save it again, or "
            "use another step."
        ) from error
    finally:
        log.setLevel(level)


def check_same(path: Path, saved: PyTree, expected: PyTree) -> None:
    """Raises ValueError unless both trees have the same paths and shapes."""
    there, here = (
        {name: tuple(leaf.shape) for name, leaf in named_leaves(tree).items()}
        for tree in (saved, expected)
    )
    wrong = [
        name
        for name in sorted(there | here, key=_params_first)
        if there.get(name) != here.get(name)
    ]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{path} is a checkpoint of another model: {name} has shape "
            f"{there.get(name, 'absent')} in it but {here.get(name, 'absent')} in this model "
            f"({len(wrong)} of {len(there | here)} arrays differ); use the config it was trained "
            f"with."
        )


def _part(path: Path, saved: Mapping[str, PyTree], which: str) -> PyTree:
    if which not in saved:
        raise ValueError(f"{path} has no '{which}', only {list(saved)}; use another checkpoint.")
    return saved[which]


def _is_checkpoint(path: Path) -> bool:
    """True if a folder is a step's. A step gets its number when it is complete, so one that has
    lost files since is damaged, not absent. A run may also have a number for its name."""
    return path.name.isdigit() and path.is_dir() and not (path / "checkpoints").is_dir()


def _is_ours(leaf: Any) -> bool:
    """True if this process alone holds a leaf; processes that share one each verify a part."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is None or sharding.is_fully_addressable


def _kept(saved: PyTree, like: PyTree) -> PyTree:
    """The saved tree without a history of scales that `like` lacks."""
    wanted = flatten_dict(like)
    flat = flatten_dict(saved).items()
    return unflatten_dict({at: x for at, x in flat if at[-1] != HISTORY_LEAF or at in wanted})


def _typed(like: PyTree, saved: PyTree) -> PyTree:
    """Arrays as `like` describes them, but in 16 bits if they were saved in 16 bits."""
    leaves = named_leaves(saved).items()
    narrow = {name: x.dtype for name, x in leaves if str(x.dtype) in _NARROW}

    def typed(at: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        dtype = narrow.get(path_name(at), x.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None))

    return jax.tree_util.tree_map_with_path(typed, like)


def _params_first(name: str) -> tuple[bool, str]:
    return not name.startswith("params"), name
