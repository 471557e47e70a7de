"""Checkpoints: one directory per step with the whole state and what is needed to rebuild it.

`checkpoints/<step>/` holds the arrays (orbax), JSON for data position, config and assets, and the
digests of all of them. A directory gets its number only once its files are digested and on disk, so
what a killed run left half-written is never taken for a checkpoint, and damage is found;
`newest_good` chooses the one to resume from.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from orbax.checkpoint import v1 as ocp

from models.checkpoints import digests
from models.checkpoints.own import check_same, context, find, metadata, reading, refuse, steps
from models.files.address import whole
from models.files.on_disk import to_disk
from models.files.terminal import Console, harmless, logger
from parallel.hosts.agreement import agree
from parallel.hosts.distributed import host_count, host_index
from parallel.runs.retention import Retention
from parallel.step import TrainState

Json = Any
State = TypeVar("State", TrainState, dict[str, Any])

_DAMAGED, _DELETED, _SAVING = ".damaged", ".deleted", ".saving"
_TIDY_SECONDS = 5.0
_ALONE = Retention(1)
_UNFINISHED = (".orbax-checkpoint-tmp", _DELETED, _SAVING)


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Saves into `directory`, in the background, and keeps the checkpoints that `keep` selects: the
    last `keep`, or those of a `Retention`.

    The remains of a killed writer are removed first, so a directory may have only one writer at a
    time. A path that cannot be removed is reported on `console` once, and every save tries again to
    remove it. Use as a context manager: leaving it waits for the save under way. The first host
    calls `on_saved(step)` in the background once a checkpoint has its number. Steps that `held`
    returns are kept.
    """

    def __init__(
        self,
        directory: Path,
        config: Json,
        assets: Json,
        keep: int | Retention = 3,
        on_saved: Callable[[int], None] = lambda step: None,
        console: Console | None = None,
        held: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._directory = whole(directory)
        self._keep = keep if isinstance(keep, Retention) else Retention(keep)
        self._constant, self._on_saved = {"config": config, "assets": assets}, on_saved
        self._held = held
        self._console, self._named = console or Console(quiet=True), set[Path]()
        logger("absl").addFilter(_is_said_here)
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        if host_index() == 0:
            _tidy(self._directory, self._say_left)

    def save(self, step: int, state: TrainState | dict[str, Any], position: Json) -> float:
        """Copies the state (or {"ema": parameters}, enough to act) to the host and returns; writing
        continues in the background. Returns the seconds for which it blocked the caller.

        Waits for the previous save first and raises its error. Checkpoints of later steps belong to
        an abandoned history and are removed once this one is complete.

        Raises:
          OSError: this save or the one before failed, on this host or another, for example on a
            full disk. Earlier checkpoints are intact, and the part that was written is removed.
        """
        begin = time.perf_counter()
        if isinstance(state, TrainState):
            state = replace(state, ema=state.averaged)
        self.wait()
        saving = self._directory / f".{step}{_SAVING}"
        try:
            with context():
                response = ocp.save_checkpointables_async(
                    saving, {"state": state, "position": position, **self._constant}
                )
        except (OSError, ValueError) as error:
            raise self._failed(step, _reason(error)) from error
        self._pending = self._background.submit(self._commit, step, response)
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Returns when the saved checkpoint is on disk under its number.

        Raises:
          OSError: as `save`.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def check(self) -> None:
        """Raises any error that has occurred in the background so far; does not wait.

        Raises:
          OSError: as `save`.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()

    def _commit(self, step: int, response: Any) -> None:
        """Digests this host's share of the files that orbax wrote, and gives the directory its
        number once all hosts have digested theirs.

        A host that fails reports it at once, without waiting for the hosts that wait for it.
        """
        saving = self._directory / f".{step}{_SAVING}"
        try:
            response.result()
            sizes = {name: (saving / name).stat().st_size for name in digests.names(saving)}
            mine = digests.share(sizes, host_index(), host_count())
            seen = {"files": list(sizes), "digests": digests.digest_files(saving, mine)}
        except Exception as error:  # orbax passes on tensorstore's errors, ValueError too
            raise self._failed(step, _reason(error)) from error

        def decide(all_brought: list[str]) -> str:
            hosts = [json.loads(one) for one in all_brought]
            found = {name: of for host in hosts for name, of in host["digests"].items()}
            listed = {name for host in hosts for name in host["files"]}
            try:
                # a network folder may show hosts different listings for a while
                unseen = (listed | set(digests.names(saving))) - set(found)
                digests.write_digests(saving, found | digests.digest_files(saving, unseen))
                _publish(step, saving, self._keep, self._say_left, self._held())
            except OSError as error:
                return _reason(error)
            try:
                self._on_saved(step)
            except OSError as error:  # the checkpoint is whole
                said = f"warning: step {step} is saved, but {error}"
                print(harmless(said), file=sys.stderr, flush=True)
            return ""

        failure = agree("saved", json.dumps(seen), decide)
        if failure:
            raise self._failed(step, failure)

    def _failed(self, step: int, reason: str) -> OSError:
        if host_index() == 0:
            end = time.monotonic() + _TIDY_SECONDS  # other threads may not have given up yet
            with suppress(OSError):  # of the folder itself; the error below reports it
                while (remains := list(self._directory.glob(f".{step}{_SAVING}*"))) and (
                    time.monotonic() < end
                ):
                    for directory in remains:
                        shutil.rmtree(directory, ignore_errors=True)
                    time.sleep(0.1)
        return OSError(
            f"Step {step} could not be saved in {self._directory}: {reason}. "
            f"{_standing(self._directory)}"
        )

    def _say_left(self, path: Path, error: OSError) -> None:
        if path not in self._named:
            self._named.add(path)
            self._console.print(
                f"{path} could not be removed ({error.strerror or error}); the next save tries "
                f"again.",
                soft_wrap=True,
            )


def copy(path: Path, directory: Path, keep: Retention = _ALONE) -> None:
    """Copies the checkpoint at `path`, file by file; of those in `directory`, it leaves those that
    `keep` selects, by default only the copy. A checkpoint that has its number there is whole at any
    time.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    path, directory = whole(path), whole(directory)
    saving = directory / f".{path.name}{_SAVING}"
    _tidy(directory)
    shutil.copytree(path, saving, ignore=shutil.ignore_patterns(".nfs*"))
    refuse(path, digests.damage(saving))
    digests.digest_files(saving, digests.names(saving))  # so that they are on disk
    _publish(int(path.name), saving, keep)


def newest_good(directory: Path, console: Console | None = None) -> int | None:
    """The last step whose files all match their digests; None if nothing was ever saved.

    Damaged checkpoints after it are set aside as `<step>.damaged`, each with a line on `console`.
    All hosts must call this function; they get the same step, and each reads its share of the
    files.

    Raises:
      ValueError: no checkpoint has digests; early versions wrote none.
      FileNotFoundError: there were checkpoints, but none is good.
    """
    directory, console = whole(directory), console or Console(quiet=True)

    def look(_: object) -> str:
        """Steps saved, whether any can be verified, and what was set aside."""
        saved = steps(directory)
        verifiable = any(digests.is_sealed(directory / str(step)) for step in saved)
        aside = sorted(path.name for path in directory.glob(f"*{_DAMAGED}*"))
        return json.dumps([saved, verifiable, aside])

    while True:
        saved, verifiable, damaged = json.loads(agree("newest", "", look))
        if not saved:
            if damaged:
                raise FileNotFoundError(
                    f"{directory} has no intact checkpoint left, only {', '.join(damaged)}; "
                    f"replace one with an intact copy, or remove them to start over."
                )
            return None
        path = directory / str(saved[-1])
        if not verifiable:
            refuse(path, [])
        wrong = _damage(path)
        if not wrong:
            return saved[-1]
        aside = agree("aside", "", partial(_set_aside, path))
        more = f" ({len(wrong)} problems in all)" if len(wrong) > 1 else ""
        console.print(
            f"Checkpoint {path.name} is damaged and was set aside as {aside}: {wrong[0]}{more}",
            soft_wrap=True,
        )


def latest(directory: Path) -> int | None:
    """The last step with a complete checkpoint in `directory`, None if there is none. Does not
    check for damage; `newest_good` does."""
    return max(steps(directory), default=None)


def restore(path: Path, abstract: State, verified: bool = False) -> State:
    """Loads the state of the checkpoint that `find(path)` names, straight into the shardings of
    `abstract` (from `abstract_state`): no host or device holds more than its share. The mesh and
    the number of hosts may differ from those that saved it. All running hosts must call this
    function, and each verifies a share of the files. With `verified`, this check is skipped: a
    checkpoint that `newest_good` has just named need not be read twice.

    Raises:
      FileNotFoundError: no checkpoint there.
      ValueError: it is damaged, or of another model.
    """
    path = find(path)
    if not verified:
        refuse(path, _damage(path))
    saved: Any = abstract
    if isinstance(abstract, TrainState):
        saved = replace(abstract, ema=abstract.averaged)
    check_same(path, metadata(path), saved)
    with reading(path), context(partial=saved is not abstract):
        return ocp.load_checkpointables(path, {"state": abstract})["state"]


Left = Callable[[Path, OSError], None]
"""Called with a path that could not be removed, and the error."""


def _publish(
    step: int,
    saving: Path,
    keep: Retention,
    left: Left = lambda path, error: None,
    held: Collection[int] = (),
) -> None:
    """Gives a complete directory its number. Of the checkpoints up to it, those that `keep` selects
    and those `held` stay. After the rename, only a later step that cannot be removed is an error,
    as the run would resume from it."""
    directory = saving.parent
    final = directory / str(step)
    if os.path.lexists(final):
        _mark(final, _DELETED)
    saving.rename(final)
    to_disk(directory)
    saved = steps(directory)
    before = [number for number in saved if number <= step]
    stay = keep.stays(before) | {number for number in before if number in held}
    for old in (directory / str(number) for number in saved if number not in stay):
        try:
            _mark(old, _DELETED)
        except OSError as error:
            if int(old.name) > step:
                raise
            left(old, error)
    _remove(directory.glob(f"*{_DELETED}*"), left)


def _damage(path: Path) -> list[str]:
    """`digests.damage` of the whole checkpoint, found by all hosts together."""

    def merge(brought: list[str]) -> str:
        return json.dumps(list(dict.fromkeys(one for each in brought for one in json.loads(each))))

    mine = digests.damage(path, index=host_index(), count=host_count())
    return json.loads(agree("damage", json.dumps(mine), merge))


def _set_aside(path: Path, _: object) -> str:
    return _mark(path, _DAMAGED).name


def _mark(path: Path, mark: str) -> Path:
    """Renames a checkpoint so that it no longer counts as one; returns its new path."""
    marked, number = path.with_name(path.name + mark), 1
    while os.path.lexists(marked):
        number += 1
        marked = path.with_name(f"{path.name}{mark}-{number}")
    return path.rename(marked)


def _tidy(directory: Path, left: Left = lambda path, error: None) -> None:
    """Removes the unfinished files of a killed writer."""
    for mark in _UNFINISHED:
        _remove(directory.glob(f"*{mark}*"), left)


def _remove(paths: Iterable[Path], left: Left) -> None:
    """Removes all paths that can be removed; of a link, only the link. NFS keeps files that
    somebody still reads, and their folder; everything else in the folder is removed."""
    for path in list(paths):
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                shutil.rmtree(path)
        except FileNotFoundError:
            continue  # already gone; NFS may report it late
        except OSError as error:
            left(path, error)


def _standing(directory: Path) -> str:
    """Sentence on what is left to resume from, and what to do first."""
    try:
        if not directory.is_dir():
            return f"{directory} is not a folder: mount it or remove what is there, then resume."
        whole, free = steps(directory), shutil.disk_usage(directory).free / 1e9
    except OSError as error:
        return f"{directory} cannot be read ({error.strerror}): repair the disk, then resume."
    kept = f"Checkpoints of steps {whole} are complete" if whole else "No earlier one exists"
    return f"{kept}; make room ({free:.1f} GB are free there) or repair the disk, then resume."


def _is_said_here(record: logging.LogRecord) -> bool:
    """Drops the tracebacks of errors that orbax logs and also raises, to `save` or `wait`."""
    return not (record.levelno >= logging.ERROR and "orbax" in record.pathname)


def _reason(error: BaseException) -> str:
    """The first line of an error's message; tensorstore's other lines name places in its source."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")
