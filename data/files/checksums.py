"""Checksums that tell a damaged dataset from a sound one.

Videos and most parquet files carry no checksums, so a flipped bit may read as a different image or
number, and nothing in the format can detect it. `meta/checksums.json` lists the size and SHA-256 of
every file; readers that do not know it ignore it.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data.errors import DatasetError, Problem, caught, from_error, naming_damage, short
from data.files.folder import Folder
from data.files.job import Done, adding_up, in_threads, run_job
from data.files.names import file_within
from data.files.shards import at_hand

CHECKSUMS = "meta/checksums.json"

Sums = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of files, by their names in a folder."""
Progress = Callable[[int, int], None]
"""Called with the bytes read and the total."""

_UNIT_BYTES = 64 << 20
_THREADS = min(8, os.cpu_count() or 1)


class Damage(NamedTuple):
    """A file that is not as it was written, and what is wrong with it."""

    name: str
    what: str


def write_checksums(root: Path) -> None:
    """Writes `meta/checksums.json` of the local dataset at `root` from what its files hold now."""
    folder = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
    files = [name for name, path in folder.items() if _is_covered(name) and path.is_file()]
    sums = sums_of(root, files)
    (root / CHECKSUMS).write_text(json.dumps({"sha256": sums}, indent=1) + "\n")


def damaged_files(folder: Folder, progress: Progress | None = None) -> Iterator[DatasetError]:
    """Files that are missing, changed or new since the checksums were written; none if there are no
    checksums. Reads every file of the dataset."""
    if not folder.exists(CHECKSUMS):
        return
    sums = _read(folder)
    there = {n for top in _FOLDERS for n in folder.list(f"{top}/**/*") if _is_covered(n)}
    new = [Damage(name, "is newer than the checksums") for name in there - set(sums)]
    for name, what in sorted([*new, *compare(folder, sums, progress)]):
        yield DatasetError(
            folder.path(name),
            "checksum",
            f"the file {what}; copy it again or, if it was changed on purpose, delete {CHECKSUMS}.",
        )


def check_sums(
    folder: Folder, problems: Iterable[Problem], report: Callable[[str, int, int], None]
) -> Iterator[Problem]:
    """The same problems, followed by the files that differ from their checksums and that no error
    has named."""
    named = set()
    for problem in caught(problems):
        yield problem
        if problem.severity == "error":
            named.add(problem.file)
    report("Checksums", 0, 1)
    yield from caught(from_error(e) for e in damaged_files(folder) if str(e.file) not in named)


def sums_of(root: Path, names: Iterable[str]) -> Sums:
    """Size and SHA-256 of local files."""
    return {name: ((root / name).stat().st_size, sha256(root / name)) for name in names}


def as_sums(found: object) -> Sums:
    """Sizes and SHA-256 of a folder's files, from the content of a JSON file.

    Raises:
      ValueError: the content is something else; names the entry.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{short(found)} is not a list of files")
    for name, said in found.items():
        file_within(name)
        pair = isinstance(said, list) and len(said) == 2
        if not pair or type(said[0]) is not int or said[0] < 0 or not is_sha256(said[1]):
            raise ValueError(f"{short(said)} is not the size and SHA-256 of {short(name)}")
    return {name: (size, digest) for name, (size, digest) in found.items()}


def is_sha256(digest: object) -> bool:
    """True for a SHA-256 in hexadecimal."""
    return isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None


def compare(
    folder: Folder, sums: Sums, progress: Progress | None = None, large: str = ""
) -> Iterator[Damage]:
    """Files that are missing, or whose size or content differs from `sums`. Reads all others; files
    in the folder `large` do not stay in a bucket's cache if the cache has a limit."""
    told = adding_up(progress, sum(size for size, _ in sums.values()))
    here = in_threads(_THREADS, shared=True)
    for found in run_job(_Comparing(folder, large), _groups(sums), told, here):
        yield from found


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(paths: Iterable[Path]) -> str:
    """SHA-256, hexadecimal, over the content of files and the names and content in folders."""
    digest = hashlib.sha256()
    for path in paths:
        inside = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in inside:
            digest.update(f"{file.relative_to(path).as_posix()}:{sha256(file)}\n".encode())
    return digest.hexdigest()


_FOLDERS = ("meta", "data", "videos", "images")


def _is_covered(name: str) -> bool:
    return name.partition("/")[0] in _FOLDERS and name != CHECKSUMS


@dataclass(frozen=True)
class _Comparing:
    """The comparison as a job; a unit is the sums of some files."""

    folder: Folder
    large: str

    def __call__(self, sums: Sums, done: Done) -> list[Damage]:
        found = []
        for name, (size, digest) in sums.items():
            found.append(_damage(self.folder, name, size, digest, self.large))
            done(size)
        return [damage for damage in found if damage is not None]


def _groups(sums: Sums) -> list[Sums]:
    """Sums of the files in order, in groups of about `_UNIT_BYTES`."""
    groups: list[dict[str, tuple[int, str]]] = []
    room = 0
    for name in sorted(sums):
        if room <= 0:
            groups.append({})
            room = _UNIT_BYTES
        groups[-1][name] = sums[name]
        room -= max(sums[name][0], _UNIT_BYTES >> 6)
    return list(groups)


def _damage(folder: Folder, name: str, size: int, digest: str, large: str) -> Damage | None:
    if not folder.exists(name):
        return Damage(name, "is missing")
    try:
        actual = folder.size(name)
        if actual != size:
            return Damage(name, f"has {actual} bytes, but was written with {size}")
        passing = bool(large) and name.startswith(f"{large}/")
        with at_hand(folder, name) if passing else nullcontext(folder.local(name)) as path:
            if sha256(path) != digest:
                return Damage(name, "does not hold the bytes it was written with")
    except OSError as error:
        return Damage(name, f"cannot be read ({error.strerror or error})")
    return None


def _read(folder: Folder) -> Sums:
    sentence = "does not list the files with their sizes and sums; delete it and write it again."
    damage = (ValueError, KeyError, TypeError, RecursionError)
    with naming_damage(folder.path(CHECKSUMS), "sha256", sentence, caught=damage):
        return as_sums(json.loads(folder.local(CHECKSUMS).read_text())["sha256"])
