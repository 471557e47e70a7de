"""Checkpoints: one directory per step with the whole state and what is needed to rebuild it.

`checkpoints/<step>/` holds the arrays (orbax), JSON files for data position, config and assets, and
the digests of all of them. A directory gets its number only once its files are digested and on
disk, so what a killed run left half-written is never taken for a checkpoint, and what was damaged
since is known before it is read. `models.checkpoints.own` reads them for acting.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from orbax.checkpoint import v1 as ocp

from models.checkpoints import digests
from models.checkpoints.own import check_same, context, find, metadata, refuse, steps
from models.terminal import Console
from parallel.agreement import agree
from parallel.distributed import host_count, host_index
from parallel.step import TrainState

Json = Any
State = TypeVar("State", TrainState, dict[str, Any])

_DAMAGED, _DELETED, _SAVING = ".damaged", ".deleted", ".saving"
_TIDY_SECONDS = 5.0
_UNFINISHED = (".orbax-checkpoint-tmp", _DELETED, _SAVING)


class CheckpointWriter:
    """Saves into `directory`, in the background, and keeps the last `keep` checkpoints.

    Remains of a killed writer are removed first, so one directory has one writer at a time. Use as
    a context manager: leaving it waits for the save under way. `on_saved(step)` is called on the
    first host, in the background, when a checkpoint has got its number.
    """

    def __init__(
        self,
        directory: Path,
        config: Json,
        assets: Json,
        keep: int = 3,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, but at least one checkpoint must be kept.")
        self._directory, self._keep = Path(directory).absolute(), keep
        self._constant, self._on_saved = {"config": config, "assets": assets}, on_saved
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        if host_index() == 0:
            _tidy(self._directory)

    def save(self, step: int, state: TrainState | dict[str, Any], position: Json) -> float:
        """Copies the state (or {"ema": parameters}, enough to act) to the host and returns; writing
        goes on in the background. Returns the seconds it kept the caller.

        Waits for the save before it and raises what went wrong there. Checkpoints of later steps
        are of a history that was given up, and go when this one is complete.

        Raises:
          OSError: this save or the one before failed, on this host or another, as on a full disk;
            the checkpoints before it are whole and what was written of it is gone.
        """
        begin = time.perf_counter()
        self.wait()
        saving = self._directory / f".{step}{_SAVING}"
        try:
            with context():
                response = ocp.save_checkpointables_async(
                    saving, {"state": state, "position": position, **self._constant}
                )
        except OSError as error:
            raise self._failed(step, _reason(error)) from error
        self._pending = self._background.submit(self._commit, step, response)
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Returns when what was saved is on disk under its number.

        Raises:
          OSError: as `save`.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def check(self) -> None:
        """Raises what went wrong in the background so far; does not wait.

        Raises:
          OSError: as `save`.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()

    def _commit(self, step: int, response: Any) -> None:
        """Digests what orbax wrote, this host's share of it, and gives the directory its number
        once all hosts have done so.

        A host that fails says so at once instead of waiting for those that wait for it.
        """
        saving = self._directory / f".{step}{_SAVING}"
        try:
            response.result()
            sizes = {name: (saving / name).stat().st_size for name in digests.names(saving)}
            mine = digests.share(sizes, host_index(), host_count())
            digested = digests.digest_files(saving, mine)
        except Exception as error:  # orbax passes on what tensorstore raises, ValueError too
            raise self._failed(step, _reason(error)) from error

        def decide(all_brought: list[str]) -> str:
            found = {name: of for one in all_brought for name, of in json.loads(one).items()}
            try:
                unseen = set(digests.names(saving)) - set(found)  # by hosts with a stale listing
                digests.write_digests(saving, found | digests.digest_files(saving, unseen))
                _publish(step, saving, self._keep)
            except OSError as error:
                return _reason(error)
            try:
                self._on_saved(step)
            except OSError as error:  # the checkpoint is whole
                print(f"warning: step {step} is saved, but {error}", file=sys.stderr, flush=True)
            return ""

        failure = agree("saved", json.dumps(digested), decide)
        if failure:
            raise self._failed(step, failure)

    def _failed(self, step: int, reason: str) -> OSError:
        if host_index() == 0:
            end = time.monotonic() + _TIDY_SECONDS  # other threads may not have given up yet
            while (remains := list(self._directory.glob(f".{step}{_SAVING}*"))) and (
                time.monotonic() < end
            ):
                for directory in remains:
                    shutil.rmtree(directory, ignore_errors=True)
                time.sleep(0.1)
        whole = steps(self._directory)
        free = shutil.disk_usage(_existing(self._directory)).free / 1e9
        return OSError(
            f"Step {step} could not be saved in {self._directory}: {reason} "
            f"({free:.1f} GB are free there). "
            + (f"Checkpoints of steps {whole} are whole; " if whole else "None was saved before; ")
            + "make room or repair the disk, then resume."
        )


def copy(path: Path, directory: Path) -> None:
    """Makes a copy of the checkpoint at `path`, file for file, the only one in `directory`. What is
    there under its number is whole at any time.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    path, directory = Path(path).absolute(), Path(directory).absolute()
    saving = directory / f".{path.name}{_SAVING}"
    _tidy(directory)
    shutil.copytree(path, saving)
    refuse(path, digests.damage(saving))
    digests.digest_files(saving, digests.names(saving))  # so that they are on disk
    _publish(int(path.name), saving, keep=1)


def newest_good(directory: Path, console: Console | None = None) -> int | None:
    """The last step whose files all hold what was saved; None if nothing was ever saved.

    Damaged checkpoints after it are set aside as `<step>.damaged`, each with a line on `console`.
    All hosts call it and get the same step; each reads its share of the files.

    Raises:
      ValueError: no checkpoint has digests, as versions before them wrote none.
      FileNotFoundError: there were checkpoints, but none is good.
    """
    directory, console = Path(directory).absolute(), console or Console(quiet=True)

    def look(_: object) -> str:
        return json.dumps(_listing(directory))

    while True:
        saved, verifiable, damaged = json.loads(agree("newest", "", look))
        if not saved:
            if damaged:
                raise FileNotFoundError(
                    f"{directory} has no good checkpoint left, only {', '.join(damaged)}; put a "
                    f"sound copy of one in its place, or remove them to begin anew."
                )
            return None
        path = directory / str(saved[-1])
        if not verifiable:
            refuse(path, [])
        wrong = _damage(path)
        if not wrong:
            return saved[-1]
        aside = agree("aside", "", partial(_set_aside, path))
        more = f" ({len(wrong)} findings in all)" if len(wrong) > 1 else ""
        console.print(
            f"Checkpoint {path.name} is damaged and was set aside as {aside}: {wrong[0]}{more}",
            soft_wrap=True,
        )


def latest(directory: Path) -> int | None:
    """The last step with a complete checkpoint in `directory`, None if there is none; whether it is
    still what was saved, `newest_good` tells."""
    return max(steps(directory), default=None)


def restore(path: Path, abstract: State, verified: bool = False) -> State:
    """Loads the state of the checkpoint that `find(path)` names, straight into the shardings of
    `abstract` (from `abstract_state`): no host or device holds more than its share. Whatever mesh
    and number of hosts saved it, all of those now running call this, and each verifies a share,
    unless it is `verified`: what `newest_good` has just named need not be read twice.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: it is damaged, or of another model.
    """
    path = find(path)
    if not verified:
        refuse(path, _damage(path))
    check_same(path, metadata(path), abstract)
    with context():
        return ocp.load_checkpointables(path, {"state": abstract})["state"]


def _publish(step: int, saving: Path, keep: int) -> None:
    """Gives a complete directory its number; the last `keep` up to it stay."""
    directory = saving.parent
    final = directory / str(step)
    if final.exists():
        final.rename(directory / f"{step}{_DELETED}")
    saving.rename(final)
    digests.sync_directory(directory)
    kept = [saved for saved in steps(directory) if saved <= step][-keep:]
    for old in steps(directory):
        if old not in kept:
            (directory / str(old)).rename(directory / f"{old}{_DELETED}")
    _remove(directory.glob(f"*{_DELETED}"))


def _damage(path: Path) -> list[str]:
    """`digests.damage` of the whole checkpoint, found by all hosts together."""

    def merge(brought: list[str]) -> str:
        return json.dumps(list(dict.fromkeys(one for each in brought for one in json.loads(each))))

    mine = digests.damage(path, index=host_index(), count=host_count())
    return json.loads(agree("damage", json.dumps(mine), merge))


def _listing(directory: Path) -> tuple[list[int], bool, list[str]]:
    """Steps saved, whether any can be verified, and what was set aside."""
    saved = steps(directory)
    verifiable = any(digests.is_sealed(directory / str(step)) for step in saved)
    return saved, verifiable, sorted(path.name for path in directory.glob(f"*{_DAMAGED}*"))


def _set_aside(path: Path, _: object) -> str:
    aside = path.with_name(path.name + _DAMAGED)
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}{_DAMAGED}-{number}")
    path.rename(aside)
    return aside.name


def _tidy(directory: Path) -> None:
    """Removes what a killed writer left."""
    for mark in _UNFINISHED:
        _remove(directory.glob(f"*{mark}*"))


def _remove(directories: Iterable[Path]) -> None:
    for directory in list(directories):
        shutil.rmtree(directory)


def _existing(path: Path) -> Path:
    return next(at for at in (path, *path.parents) if at.exists())


def _reason(error: BaseException) -> str:
    """The first line of what went wrong: tensorstore's go on with where in its source."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")
