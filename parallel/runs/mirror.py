"""A run's checkpoints kept in a bucket too: a run whose disk is lost goes on from there.

The first host copies each checkpoint, as it gets its number, in the background. `digests.json`,
which lists all files of a checkpoint, goes last and is taken away first, so that a checkpoint
there has it if and only if it is whole. A copy that fails is told and costs the run nothing until
its end: then it is tried once more, and the run fails plainly if its last checkpoint did not
arrive.
"""

import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from models.checkpoints import digests, own
from models.checkpoints.remote import is_remote, url_of
from models.files.bucket import Bucket
from models.files.on_disk import to_disk
from models.terminal import Console
from parallel.hosts.agreement import agree
from parallel.hosts.watchdog import alive
from parallel.retention import Retention
from parallel.runs.atomic import replace_text
from parallel.runs.run_folder import CONFIG_NAME, ORIGIN_NAME, note_saved

_STEP = re.compile(r"checkpoints/(\d+)/(.+)")
_LOGS = ("metrics.jsonl", "goodput.jsonl", "closed_loop.jsonl", "trackers.json", ORIGIN_NAME)
_FETCHING = ".orbax-checkpoint-tmp-fetching"
"""Mark of what a killed run leaves half fetched, which the next writer removes."""


class Mirror:
    """Copies of the checkpoints in `directory` at `url`, those that `keep` says of them, the last
    so many or a `Retention`. Use as a context manager: leaving it gives up what is under way."""

    def __init__(self, url: str, directory: Path, keep: int | Retention, console: Console) -> None:
        self._bucket, self._directory = Bucket(_bucket_url(url)), Path(directory).absolute()
        self._keep = keep if isinstance(keep, Retention) else Retention(keep)
        self._console = console
        self._background = ThreadPoolExecutor(1, "mirror")
        self._lock, self._wanted, self._busy = threading.Lock(), list[int](), set[int]()
        self._arrived: int | None = None
        self._pending: list[Future[None]] = []

    def put(self, step: int) -> None:
        """Copies the checkpoint of `step` in the background; of several that wait, the newest."""
        with self._lock:
            self._wanted = [step]
        self._pending = [one for one in self._pending if not one.done()]
        self._pending.append(self._background.submit(self._next))

    def held(self) -> set[int]:
        """The steps that are being copied, or wait for it; they must stay on disk."""
        with self._lock:
            return {*self._wanted, *self._busy}

    def finish(self, step: int) -> None:
        """Returns when the checkpoint of `step` is in the bucket, and the logs as they are now, on
        all hosts.

        Raises:
          OSError: it cannot be brought there.
        """

        def bring(_: list[str]) -> str:
            try:
                for pending in self._pending:
                    pending.result()
                if self._arrived != step and step not in whole_steps(self._bucket):
                    self._copy(step)
                _put_logs(self._bucket, self._directory)
            except Exception as error:  # agree's decisions must not raise
                return f"{error}"
            return ""

        if failure := agree("mirrored", "", bring):
            raise OSError(
                f"Step {step} is saved in {self._directory}, but did not arrive in "
                f"{self._bucket.url}: {failure} The same command with --resume brings it there."
            )

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, *exception: object) -> None:
        self._background.shutdown(cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            if not self._wanted:
                return
            step = self._wanted.pop()
            self._busy.add(step)
        try:
            self._copy(step)
        except Exception as error:  # the run goes on, and the next checkpoint may arrive
            self._console.print(
                f"warning: step {step} did not arrive in {self._bucket.url}: {error} Training goes "
                "on; the next checkpoint is brought there as well.",
                soft_wrap=True,
            )
        finally:
            with self._lock:
                self._busy.discard(step)

    def _copy(self, step: int) -> None:
        """Brings one checkpoint there whole; then later ones, of a history that was given up, and
        older ones go."""
        path, within = self._directory / "checkpoints" / str(step), f"checkpoints/{step}"
        there = _by_step(self._bucket)
        # Whatever becomes of this: no later step may be taken for the newest.
        later = [other for other in there if other > step]
        self._bucket.remove(f"checkpoints/{other}/{digests.NAME}" for other in [step, *later])
        names = digests.names(path)
        self._bucket.remove(f"{within}/{name}" for name in there.get(step, []) if name not in names)
        _put_logs(self._bucket, self._directory)
        self._bucket.put(self._directory, (f"{within}/{n}" for n in names), lambda size: alive())
        listed = self._bucket.list()
        for name in names:
            found, size = listed.get(f"{within}/{name}"), (path / name).stat().st_size
            if found is None or found.size != size:
                raise OSError(f"{self._bucket.url}/{within}/{name} did not arrive whole.")
        self._bucket.put(self._directory, [f"{within}/{digests.NAME}"])
        self._arrived = step
        older = sorted(o for o, files in there.items() if o < step and digests.NAME in files)
        kept = self._keep.stays([*older, step])
        for other, files in there.items():
            if other == step or other in kept:
                continue
            self._bucket.remove(f"checkpoints/{other}/{n}" for n in (digests.NAME, *files))


def begin(url: str, directory: Path, resume: bool, console: Console) -> bool:
    """Brings a run to its folder from where it is mirrored, if the newest whole checkpoint there is
    newer than the folder's. Returns whether there is a run to go on with: with `resume` a new one
    begins, with a line that says so, where neither place holds any. All hosts call it.

    Raises:
      ValueError: the mirror holds a run and `resume` is false.
      OSError: the mirror cannot be reached, or what came from it is damaged.
    """

    def decide(_: list[str]) -> str:
        try:
            return _begin(Bucket(_bucket_url(url)), directory, resume, console)
        except (ValueError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    said = agree("mirror", "", decide)
    if said in ("new", "resumed"):
        return said == "resumed"
    kind, _, message = said.partition(": ")
    raise (ValueError if kind == "ValueError" else OSError)(message)


def put_logs(url: str, directory: Path) -> None:
    """Copies config and logs once more: the last evaluation in simulation ends after the run."""
    _put_logs(Bucket(_bucket_url(url)), directory)


def whole_steps(bucket: Bucket) -> list[int]:
    """Steps whose checkpoints are there wholly, ascending."""
    return sorted(step for step, names in _by_step(bucket).items() if digests.NAME in names)


def _begin(bucket: Bucket, directory: Path, resume: bool, console: Console) -> str:
    there = whole_steps(bucket)
    if there and not resume:
        raise ValueError(
            f"{bucket.url} holds a run already, saved at step {there[-1]}; go on with --resume or "
            f"name another place."
        )
    here = own.steps(directory / "checkpoints")
    if there and (not here or there[-1] > here[-1]):
        _bring(bucket, directory, there[-1])
        console.print(f"Brought step {there[-1]} from {bucket.url} to {directory}.", soft_wrap=True)
    if resume and not (there or (directory / CONFIG_NAME).exists()):
        console.print(
            f"Neither {directory} nor {bucket.url} holds a run; beginning one at step 0.",
            soft_wrap=True,
        )
        return "new"
    return "resumed" if resume else "new"


def _bring(bucket: Bucket, directory: Path, step: int) -> None:
    """The checkpoint of `step` under its number, whole, with the run's config and logs."""
    folder, within = directory / "checkpoints", f"checkpoints/{step}/"
    listed = bucket.list()
    files = {n: stored for n, stored in listed.items() if n.startswith(within)}
    fetching = folder / f"{step}{_FETCHING}"
    bucket.get(files, fetching, lambda size: alive())
    try:
        own.refuse(fetching / within, digests.damage(fetching / within))
    except ValueError:
        shutil.rmtree(fetching)
        raise
    for name in (CONFIG_NAME, *_LOGS):
        if name in listed and (content := bucket.read(name)) is not None:
            replace_text(directory / name, content.decode())
    (fetching / within).rename(folder / str(step))
    to_disk(folder)
    (fetching / "checkpoints").rmdir()
    fetching.rmdir()
    note_saved(directory, step)


def _put_logs(bucket: Bucket, directory: Path) -> None:
    names = (CONFIG_NAME, *_LOGS)
    bucket.put(directory, [name for name in names if (directory / name).is_file()])


def _by_step(bucket: Bucket) -> dict[int, list[str]]:
    """Names of the files of each checkpoint there, in its folder."""
    found: dict[int, list[str]] = {}
    for name in bucket.list():
        if matched := _STEP.fullmatch(name):
            found.setdefault(int(matched[1]), []).append(matched[2])
    return found


def _bucket_url(url: str) -> str:
    if url.startswith("hf:"):
        raise ValueError(
            f"{url}: a run is mirrored to a bucket (s3://…, gs://…) or a folder; put its result on "
            "the hub with `python -m tools.checkpoint push`."
        )
    return url_of(url).rstrip("/") if is_remote(url) else f"file://{Path(url).absolute()}"
