"""One writer per folder: a run holds `.lock` in it from before its data is read until its end.

The lock uses flock, which the kernel frees when the process dies, on NFS too, and which, unlike a
POSIX lock, its own process may read. The file names the holder; on a filesystem without locks, this
alone decides. (filelock 4.2 does not name who holds a flock, leaves its file behind, and trusts
mounts whose locks are this machine's.)
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from models.config import from_json
from models.files.terminal import Console
from parallel.hosts import exits
from parallel.hosts.agreement import agree

LOCK_NAME = ".lock"

_MOUNTS = Path("/proc/self/mountinfo")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class InUse(ValueError):
    """Another run has the folder, or it is not writable."""

    exit_code = exits.REFUSED


@contextmanager
def locked(folder: Path, console: Console | None = None) -> Iterator[None]:
    """Keeps other runs out of the folder, which is created if needed and removed again if it stays
    empty. The first process holds the lock for its job, but all processes must call this function.
    A process may lock again a folder that it has already locked.

    Raises:
      InUse: another run is at work there, and nothing was changed; all processes raise the same
        error.
    """
    folder = Path(folder).resolve()
    refusal = agree("lock", "", partial(_take, folder, console or Console(quiet=True)))
    if refusal:
        raise InUse(refusal)
    try:
        yield
    finally:
        _release(folder)


def at_work(folder: Path) -> str:
    """Machine on which a run is at work in the folder: "here" or the name of another machine; "" if
    no run is. It takes no lock, so a run that starts meanwhile is not kept out. For another
    machine, it relies on the lock file."""
    with suppress(OSError), ExitStack() as undo:
        handle = os.open(Path(folder) / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW)
        undo.callback(os.close, handle)
        holder = _read(handle)
        if holder is not None and not holder.is_here:
            return holder.host
        if holder is not None and holder.is_alive:
            return "here"
    return ""


@dataclass(frozen=True)
class _Holder:
    """Writer of a lock file. `since` is for people; `began` is the start of the process by the
    kernel's clock, so that another process with the same pid is not mistaken for it."""

    host: str
    pid: int
    since: str
    began: int | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """True if the holder, which must be on this machine, is still running."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.began in (None, _began(self.pid))


@dataclass
class _Held:
    handle: int
    depth: int
    made: list[Path]


_held: dict[Path, _Held] = {}


def _take(folder: Path, console: Console, _: object) -> str:
    """Empty if this process now has the folder, else the reason why not."""
    if folder in _held:
        _held[folder].depth += 1
        return ""
    try:
        return _lock(folder, console)
    except OSError as error:
        said = exits.sentence(error, folder)
        return said or f"{folder}: {error.strerror}; choose another folder."


def _lock(folder: Path, console: Console) -> str:
    path, made = folder / LOCK_NAME, [at for at in (folder, *folder.parents) if not at.exists()]
    left: _Holder | None = None
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            try:
                handle, created = _open(path)
            except FileNotFoundError:  # its holder removed it, or the folder that it had created
                continue
            undo.callback(os.close, handle)
            free, holder = _try_flock(handle), _read(handle)
            if not _is_free(path, free, holder, created):
                return _in_use(path, holder)
            left = holder or left
            if not _is_at(handle, path):
                continue
            if free is None and not created:  # a stale file; only its creator may hold it
                path.unlink(missing_ok=True)
                continue
            undo.pop_all()
            _held[folder] = _Held(handle, 1, made)
            undo.callback(_release, folder)
            _describe(handle)
            undo.pop_all()
        if left is not None and not (left.is_here and left.is_alive):  # else a copied folder
            console.print(
                f"{folder} was left by {left}, which did not end properly; taking over.",
                soft_wrap=True,
            )
        return ""


def _describe(handle: int) -> None:
    pid = os.getpid()
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    mine = _Holder(socket.gethostname(), pid, since, _began(pid))
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(asdict(mine)).encode() + b"\n", 0)
    os.fsync(handle)


def _release(folder: Path) -> None:
    held = _held.get(folder)
    if held is None:  # another process of the job holds it, or this is a fork
        return
    held.depth -= 1
    if held.depth:
        return
    del _held[folder]
    with suppress(OSError):
        if _is_at(held.handle, folder / LOCK_NAME):
            (folder / LOCK_NAME).unlink()
    os.close(held.handle)
    for directory in held.made:
        with suppress(OSError):  # it is not empty
            directory.rmdir()


def _is_free(path: Path, free: bool | None, holder: _Holder | None, created: bool) -> bool:
    """True if the folder may be taken; `free` is as the kernel says, None if there are no locks."""
    if free:
        return holder is None or holder.is_here or not _is_local_only(path)
    gone = holder is not None and holder.is_here and not holder.is_alive
    return free is None and (created or gone)


def _in_use(path: Path, holder: _Holder | None) -> str:
    who = "another run that has just begun" if holder is None else str(holder)
    known = holder is not None and holder.is_here
    remedy = "" if known else f"; if it is surely gone, remove {path}"
    return (
        f"{path.parent} is in use by {who}: two runs in one folder would destroy each other's "
        f"checkpoints. Wait for it, stop it, or choose another folder{remedy}."
    )


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags), False


def _try_flock(handle: int) -> bool | None:
    """True if the lock was free and is now held; None if the filesystem has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _read(handle: int) -> _Holder | None:
    """Holder named in an open lock file; None if the file is still empty or incomplete."""
    try:
        holder = from_json(_Holder, json.loads(os.pread(handle, 4096, 0)))
    except (ValueError, RecursionError):
        return None
    sane = f"{holder}".isprintable() and 0 < holder.pid < 2**31
    return holder if sane else None


def _is_at(handle: int, path: Path) -> bool:
    """True if the open file is still the one at `path`: its holder removes it at its end."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _began(pid: int) -> int | None:
    """Start of a process, in the kernel's ticks; None if it is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _is_local_only(path: Path) -> bool:
    """True if the filesystem is shared, but other machines do not see its locks."""
    try:
        mounts = _MOUNTS.read_text()
    except OSError:
        return False
    at, kind, options = Path("/"), "", set[str]()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= len(at.parts):
            at, (kind, _, found) = point, after.split()[:3]
            options = set(found.split(","))
    return kind == "fuse.sshfs" or bool(
        options & {"local_lock=all", "local_lock=flock", "nolock", "localflock"}
    )


def _forget() -> None:
    for held in _held.values():
        os.close(held.handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
