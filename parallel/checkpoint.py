"""Checkpoints: one directory per step with the whole state and what is needed to rebuild it.

`checkpoints/<step>/` holds the arrays (orbax) and JSON files for data position, config and assets.
A directory gets its name only once it is complete, so what a killed run left half-written is never
taken for a checkpoint. The latest one is always looked up on disk.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from parallel.distributed import host_index
from parallel.sharding import path_name
from parallel.step import TrainState

Json = Any
PyTree = Any

_JSON = ("position", "config", "assets")
_DELETED = ".deleted"
_UNFINISHED = (".orbax-checkpoint-tmp", _DELETED)


class CheckpointWriter:
    """Saves into `directory`, in the background, and keeps the last `keep` checkpoints.

    Remains of a killed writer are removed first, so one directory has one writer at a time. Use as
    a context manager: leaving it waits for the save under way.
    """

    def __init__(self, directory: Path, config: Json, assets: Json, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, but at least one checkpoint must be kept.")
        self._directory, self._keep = Path(directory).absolute(), keep
        self._constant = {"config": config, "assets": assets}
        self._pending: Any = None
        if host_index() == 0 and self._directory.is_dir():
            for mark in _UNFINISHED:
                for remains in self._directory.glob(f"*{mark}*"):
                    shutil.rmtree(remains)

    def save(self, step: int, state: TrainState, position: Json) -> None:
        """Copies the state to the host and returns; writing goes on in the background.

        Waits for the save before it and raises what went wrong there.
        """
        self.wait()
        with _context():
            self._pending = ocp.save_checkpointables_async(
                self._directory / str(step),
                {"state": state, "position": position, **self._constant},
            )

    def wait(self) -> None:
        """Returns when what was saved is on disk; then drops checkpoints beyond the last `keep`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        if host_index() == 0:
            for step in steps(self._directory)[: -self._keep]:
                doomed = self._directory / f"{step}{_DELETED}"
                (self._directory / str(step)).rename(doomed)
                shutil.rmtree(doomed)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait()


def steps(directory: Path) -> list[int]:
    """Steps that have a complete checkpoint in `directory`, ascending."""
    directory = Path(directory)
    entries = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(entry.name) for entry in entries if _is_checkpoint(entry))


def latest(directory: Path) -> int | None:
    """The last step with a complete checkpoint in `directory`, None if there is none."""
    return max(steps(directory), default=None)


def find(path: Path) -> Path:
    """The checkpoint at `path`, or the latest one if `path` is a run or its `checkpoints` folder.

    Raises:
      FileNotFoundError: there is none.
    """
    path = Path(path).absolute()
    if _is_checkpoint(path):
        return path
    for directory in (path, path / "checkpoints"):
        step = latest(directory)
        if step is not None:
            return directory / str(step)
    raise FileNotFoundError(
        f"{path} holds no complete checkpoint; give a run directory, its checkpoints folder or one "
        f"numbered folder in it."
    )


def restore(path: Path, abstract: TrainState) -> TrainState:
    """Loads the state of the checkpoint that `find(path)` names, straight into the shardings of
    `abstract` (from `abstract_state`): no host or device holds more than its share.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: it is of another model.
    """
    path = find(path)
    _check_same(path, _shapes(_metadata(path)), _shapes(abstract))
    with _context():
        return ocp.load_checkpointables(path, {"state": abstract})["state"]


def restore_params(path: Path, which: str = "ema", like: PyTree | None = None) -> PyTree:
    """Loads only the "ema" or the "params" of a checkpoint, for acting.

    `like` (arrays or ShapeDtypeStructs, with shardings if they are to be sharded) is what the model
    expects; without it, whatever is there comes as a nested dict, on the first device.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: it is of another model than `like`.
    """
    if which not in ("ema", "params"):
        raise ValueError(f"which is {which!r}; a checkpoint has 'ema' and 'params'.")
    path = find(path)
    saved = _metadata(path)[which]
    if like is not None:
        _check_same(path, _shapes(saved), _shapes(like))
    wanted = jax.tree.map(_placed, saved if like is None else like)
    with _context(partial=True):
        return ocp.load_checkpointables(path, {"state": {which: wanted}})["state"][which]


def read_json(path: Path, name: str) -> Json:
    """The "position", "config" or "assets" saved in the checkpoint that `find(path)` names."""
    with _context():
        return ocp.load_checkpointables(find(path), {name: None})[name]


def _is_checkpoint(path: Path) -> bool:
    return path.name.isdigit() and path.is_dir() and ocp.is_orbax_checkpoint(path)


def _context(partial: bool = False) -> ocp.Context:
    registry = ocp.handlers.local_registry()
    for name in _JSON:
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=name)
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = partial
    return context


def _metadata(path: Path) -> dict[str, PyTree]:
    with _context():
        return ocp.checkpointables_metadata(path).metadata["state"]


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves}


def _check_same(
    path: Path, saved: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    wrong = [
        name
        for name in sorted(saved | expected, key=_params_first)
        if saved.get(name) != expected.get(name)
    ]
    if wrong:
        there, here = (shapes.get(wrong[0], "absent") for shapes in (saved, expected))
        raise ValueError(
            f"{path} is a checkpoint of another model: {wrong[0]} has shape {there} in it but "
            f"{here} in this model ({len(wrong)} of {len(saved | expected)} arrays differ); use "
            f"the config it was trained with."
        )


def _params_first(name: str) -> tuple[bool, str]:
    return not name.startswith("params"), name
