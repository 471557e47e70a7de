"""Copies of a run's checkpoints in a bucket, from which a run whose disk is lost can resume.

The first host copies each checkpoint in the background. `digests.json` is copied last and removed
first, so a checkpoint in the bucket has it if and only if it is whole. A failed copy is reported
and does not stop the run, but at its end the last checkpoint must arrive.
"""

import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from models.checkpoints import digests, own
from models.files.address import parse, whole
from models.files.bucket import Bucket
from models.files.on_disk import to_disk
from models.files.terminal import Console
from parallel.hosts.agreement import agree
from parallel.hosts.watchdog import alive
from parallel.runs.atomic import replace_text
from parallel.runs.retention import Retention
from parallel.runs.run_folder import CONFIG_NAME, ORIGIN_NAME, note_saved

_STEP = re.compile(r"checkpoints/(\d+)/(.+)")
_LOGS = (
    "metrics.jsonl",
    "goodput.jsonl",
    "closed_loop.jsonl",
    "population.jsonl",
    "trackers.json",
    ORIGIN_NAME,
)
_FETCHING = ".orbax-checkpoint-tmp-fetching"
"""Mark of a checkpoint that a killed run left partly fetched; the next writer removes it."""


class Mirror(AbstractContextManager["Mirror"]):
    """Keeps copies at `url` of the checkpoints in `directory` that `keep` selects: the last `keep`,
    or those of a `Retention`. Use as a context manager: leaving it cancels waiting copies and waits
    for one under way."""

    def __init__(self, url: str, directory: Path, keep: int | Retention, console: Console) -> None:
        self._bucket, self._directory = Bucket(_bucket_url(url)), whole(directory)
        self._keep = keep if isinstance(keep, Retention) else Retention(keep)
        self._console = console
        self._background = ThreadPoolExecutor(1, "mirror")
        self._lock, self._wanted, self._busy = threading.Lock(), list[int](), set[int]()
        self._arrived: int | None = None
        self._pending: list[Future[None]] = []

    def put(self, step: int) -> None:
        """Copies the checkpoint of `step` in the background; if several wait, only the newest is
        copied."""
        with self._lock:
            self._wanted = [step]
        self._pending = [one for one in self._pending if not one.done()]
        self._pending.append(self._background.submit(self._next))

    def held(self) -> set[int]:
        """The steps that are being copied or wait to be copied; they must stay on disk."""
        with self._lock:
            return {*self._wanted, *self._busy}

    def finish(self, step: int) -> None:
        """Returns, on all hosts, when the checkpoint of `step` and the current logs are in the
        bucket.

        Raises:
          OSError: they cannot be copied there.
        """

        def bring(_: list[str]) -> str:
            try:
                for pending in self._pending:
                    pending.result()
                if self._arrived != step and step not in whole_steps(self._bucket):
                    self._copy(step)
                _put_logs(self._bucket, self._directory)
            except Exception as error:  # `agree`'s `decide` must not raise
                return f"{error}"
            return ""

        if failure := agree("mirrored", "", bring):
            raise OSError(
                f"Step {step} is saved in {self._directory}, but did not arrive in "
                f"{self._bucket.url}: {failure} The same command with --resume copies it there."
            )

    def __exit__(self, *_: object) -> None:
        self._background.shutdown(cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            if not self._wanted:
                return
            step = self._wanted.pop()
            self._busy.add(step)
        try:
            self._copy(step)
        except Exception as error:  # the run continues, and the next checkpoint may arrive
            self._console.print(
                f"warning: step {step} did not arrive in {self._bucket.url}: {error} Training "
                "continues, and the next checkpoint is copied there as usual.",
                soft_wrap=True,
            )
        finally:
            with self._lock:
                self._busy.discard(step)

    def _copy(self, step: int) -> None:
        """Copies one checkpoint there completely; then removes later ones, of an abandoned history,
        and older ones that are not kept."""
        path, within = self._directory / "checkpoints" / str(step), f"checkpoints/{step}"
        there = _by_step(self._bucket)
        # Even if this copy fails, no later step may be taken for the newest.
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
                raise OSError(f"{self._bucket.url}/{within}/{name} is missing or incomplete.")
        self._bucket.put(self._directory, [f"{within}/{digests.NAME}"])
        self._arrived = step
        older = sorted(o for o, files in there.items() if o < step and digests.NAME in files)
        kept = self._keep.stays([*older, step])
        for other, files in there.items():
            if other == step or other in kept:
                continue
            self._bucket.remove(f"checkpoints/{other}/{n}" for n in (digests.NAME, *files))


def begin(url: str, directory: Path, resume: bool, console: Console) -> bool:
    """Brings a run from its mirror to its folder, if the newest whole checkpoint in the mirror is
    newer than the folder's; damaged ones are passed over, with a line on `console`. Returns whether
    there is a run to resume; with `resume`, if neither place holds a run, a new one begins and a
    line on `console` says so. All hosts must call it.

    Raises:
      ValueError: the mirror holds a run and `resume` is false, or all checkpoints are damaged.
      OSError: the mirror cannot be reached.
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
    """Copies config and logs once more, since the last evaluation in simulation ends after the
    run."""
    _put_logs(Bucket(_bucket_url(url)), directory)


def whole_steps(bucket: Bucket) -> list[int]:
    """Steps whose checkpoints are complete in the bucket, ascending."""
    return sorted(step for step, names in _by_step(bucket).items() if digests.NAME in names)


def _begin(bucket: Bucket, directory: Path, resume: bool, console: Console) -> str:
    there = whole_steps(bucket)
    if there and not resume:
        raise ValueError(
            f"{bucket.url} holds a run already, saved at step {there[-1]}; continue with --resume "
            f"or name another place."
        )
    here = own.steps(directory / "checkpoints")
    newer = [step for step in reversed(there) if not here or step > here[-1]]
    for step in newer:
        try:
            _bring(bucket, directory, step)
        except ValueError as error:
            if step == newer[-1] and not here:
                raise
            console.print(f"warning: step {step} was passed over: {error}", soft_wrap=True)
            continue
        console.print(f"Copied step {step} from {bucket.url} to {directory}.", soft_wrap=True)
        break
    if resume and not (there or (directory / CONFIG_NAME).exists()):
        console.print(
            f"Neither {directory} nor {bucket.url} holds a run; starting one at step 0.",
            soft_wrap=True,
        )
        return "new"
    return "resumed" if resume else "new"


def _bring(bucket: Bucket, directory: Path, step: int) -> None:
    """Fetches the checkpoint of `step`, with the run's config and logs; it gets its number once it
    is whole."""
    folder, within = directory / "checkpoints", f"checkpoints/{step}/"
    listed = bucket.list()
    files = {n: stored for n, stored in listed.items() if n.startswith(within)}
    fetching = folder / f"{step}{_FETCHING}"
    bucket.get(files, fetching, lambda size: alive())
    if damage := digests.damage(fetching / within):
        shutil.rmtree(fetching)
        raise ValueError(f"{bucket.url}/{within} is damaged: {damage[0]}")
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
    """For each checkpoint in the bucket, the names of its files, relative to its folder."""
    found: dict[int, list[str]] = {}
    for name in bucket.list():
        if matched := _STEP.fullmatch(name):
            found.setdefault(int(matched[1]), []).append(matched[2])
    return found


def _bucket_url(url: str) -> str:
    address = parse(url)
    if address.protocol == "hf":
        raise ValueError(
            f"{url}: a run can be mirrored only to a bucket (s3://…, gs://…) or a folder; upload "
            "its result to the hub with `python -m tools.checkpoint push`."
        )
    return address.url
