"""A folder of files, wherever it is: on disk, on the Hugging Face hub or at any fsspec URL.

All other code works with local paths of single files, which are fetched on first use and then stay:
hub files in huggingface_hub's cache, where its other users find them, and bucket files in this
project's cache, by version. Names come from metadata that anybody may have written; a name that
leads out of the folder is refused (data/files/names.py), wherever the folder is.
"""

import fcntl
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub
from fsspec.utils import glob_translate
from huggingface_hub import errors as hub_errors

from data.errors import DatasetError, MissingFileError, require_content, short
from data.files.names import file_within
from models.files.address import parse
from models.files.bucket import VERSION_KEYS, file_system
from models.files.hub import HubPlace
from models.files.terminal import first_line
from models.files.user_cache import user_cache
from models.files.whole_text import replacing

_DESCRIPTIONS = ("*meta/info.json", "*dataset_info.json")
"""Files that describe a dataset; they are fetched first from a repository."""


class Folder(Protocol):
    """Files by their names within the folder, such as "meta/info.json". Any other name or pattern
    raises DatasetError. Can be pickled, and used by any number of threads."""

    def __hash__(self) -> int: ...

    @property
    def url(self) -> str:
        """Location: a path, or the URL it was opened with."""
        ...

    def exists(self, name: str) -> bool:
        """True if there is a file of this name."""
        ...

    def list(self, pattern: str) -> list[str]:
        """Sorted names of the files that match, as in "data/*/*.parquet" or "videos/**/*"."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file, without fetching it."""
        ...

    def local(self, name: str) -> Path:
        """The file on this machine's disk, fetched if it is not there yet.

        Raises:
          MissingFileError: there is no such file.
          DatasetError: it cannot be fetched; another attempt may succeed.
        """
        ...

    def put(self, path: Path, name: str) -> None:
        """Copies a local file into the folder, whole or not at all where the storage can do so."""
        ...

    def path(self, name: str) -> Path | str:
        """Name of the file in error messages: its path, or its URL."""
        ...


def open_folder(url: str | Path) -> Folder:
    """The folder at a path, at `hf://[datasets/]org/name[@revision][/folder]` or at a URL that
    fsspec knows (`s3://bucket/folder`, `gs://…`, `memory://…`).

    A hub repository in the cache is opened from there, without a request; use `hf download` to
    fetch newer commits of a branch. A local folder need not exist yet.

    Raises:
      MissingFileError: no such repository or revision, or it is not cached and the hub is offline.
      DatasetError: the hub cannot be reached, or access is denied.
      ValueError: as `models.files.address.parse`, or fsspec does not know the protocol, or lacks a
        package for it.
    """
    address = parse(url)
    if address.protocol == "hf":
        return _open_hub(str(address))
    if address.is_remote:
        return _open_bucket(str(address))
    return LocalFolder(address.path)


@dataclass(frozen=True)
class LocalFolder:
    """A folder on disk."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    def exists(self, name: str) -> bool:
        return (self.root / _inside(self.url, name)).is_file()

    def list(self, pattern: str) -> list[str]:
        inside = _inside(self.url, pattern)
        found = (path for path in self.root.glob(inside) if path.is_file())
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def size(self, name: str) -> int:
        return self.local(name).stat().st_size

    def local(self, name: str) -> Path:
        path = self.root / _inside(self.url, name)
        if not path.is_file():
            raise _missing(path)
        require_content(path)
        return path

    def put(self, path: Path, name: str) -> None:
        with replacing(self.root / _inside(self.url, name)) as partial:
            shutil.copyfile(path, partial)

    def path(self, name: str) -> Path | str:
        return self.root / _inside(self.url, name)


@dataclass(frozen=True)
class HubFolder:
    """A folder of a dataset repository at one commit: `sizes` of all files, and `snapshot`, where
    the cached ones are."""

    url: str
    repository: str
    snapshot: Path
    folder: str
    sizes: Mapping[str, int]

    def exists(self, name: str) -> bool:
        return self._full(name) in self.sizes

    def list(self, pattern: str) -> list[str]:
        here = self.folder + "/" if self.folder else ""
        inside = (name.removeprefix(here) for name in self.sizes if name.startswith(here))
        matching = re.compile(glob_translate(_inside(self.url, pattern)))
        return sorted(name for name in inside if matching.fullmatch(name))

    def size(self, name: str) -> int:
        if not self.exists(name):
            raise _missing(self.path(name))
        return self.sizes[self._full(name)]

    def local(self, name: str) -> Path:
        path = self.snapshot / self._full(name)
        if path.is_file():
            return path
        if not self.exists(name):
            raise _missing(self.path(name))
        with _hub_errors(self.path(name)):
            huggingface_hub.hf_hub_download(
                self.repository,
                self._full(name),
                repo_type="dataset",
                revision=self.snapshot.name,
                cache_dir=self.snapshot.parents[2],
            )
        return path

    def put(self, path: Path, name: str) -> None:
        raise ValueError(
            f"{self.path(name)}: the hub is only read from; write to a local folder, then use "
            "`hf upload`."
        )

    def path(self, name: str) -> Path | str:
        return f"{self.url}/{_inside(self.url, name)}"

    def _full(self, name: str) -> str:
        inside = _inside(self.url, name)
        return f"{self.folder}/{inside}" if self.folder else inside


@dataclass(frozen=True)
class BucketFolder:
    """A folder of any fsspec filesystem. `root` is its path there; `cache` holds fetched files.

    A fetched file is reused as long as the size, time and tag that the storage reports stay the
    same.
    """

    url: str
    root: str
    cache: Path
    _fetched: dict[str, Path] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _files(self) -> Any:
        return file_system(self.url)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketFolder, (self.url, self.root, self.cache)

    def exists(self, name: str) -> bool:
        return name in self._fetched or self._files.isfile(self._remote(name))

    def list(self, pattern: str) -> list[str]:
        with _storage_errors(self.path(pattern)):
            found = self._files.glob(self._remote(pattern), detail=True)
        files = (name for name, about in found.items() if about["type"] == "file")
        return sorted(name[len(self.root) :].lstrip("/") for name in files)

    def size(self, name: str) -> int:
        with _storage_errors(self.path(name)):
            return self._files.info(self._remote(name))["size"]

    def local(self, name: str) -> Path:
        if name not in self._fetched:
            self._fetched[name] = self.fetch(name)
            require_content(self._fetched[name])
        return self._fetched[name]

    def put(self, path: Path, name: str) -> None:
        remote = self._remote(name)
        with _storage_errors(self.path(name)):
            self._files.makedirs(remote.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), remote)
        self._fetched.pop(name, None)

    def path(self, name: str) -> Path | str:
        return f"{self.url}/{_inside(self.url, name)}"

    def _remote(self, name: str) -> str:
        return f"{self.root}/{_inside(self.url, name)}"

    def fetch(
        self, name: str, room: Callable[[int], AbstractContextManager[None]] | None = None
    ) -> Path:
        """The file in the cache, fetched if the storage's present version is not there.

        Args:
          room: called with the size in bytes; reserves space for the file during the fetch.
        """
        remote = self._remote(name)
        with _storage_errors(self.path(name)):
            about = self._files.info(remote)
            if about["type"] != "file":
                raise FileNotFoundError
            version = [about["size"], *(str(about.get(key)) for key in VERSION_KEYS)]
            path = self.cache / _short(self.url) / _short(str(version)) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_name(path.name + ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.is_file():
                    reserved = room(about["size"] or 0) if room else nullcontext()
                    with reserved, replacing(path) as partial:
                        self._files.get_file(remote, str(partial))
                        if (size := partial.stat().st_size) != (about["size"] or size):
                            raise OSError(f"{size} bytes arrived, expected {about['size']}")
            return path


def _open_hub(url: str) -> HubFolder:
    place = HubPlace.parse(url, "dataset")
    repository = place.repository
    about: dict[str, Any] = {"repo_type": "dataset", "revision": place.revision}
    fetch = {**about, "allow_patterns": list(_DESCRIPTIONS)}
    with _hub_errors(url):
        try:
            tree = huggingface_hub.get_cached_repo_tree(repository, **about)
            snapshot = Path(
                huggingface_hub.snapshot_download(repository, **fetch, local_files_only=True)
            )
        except (hub_errors.CachedRepoTreeNotFoundError, hub_errors.LocalEntryNotFoundError):
            snapshot = Path(huggingface_hub.snapshot_download(repository, **fetch))
            about["revision"] = snapshot.name
            try:
                tree = huggingface_hub.get_cached_repo_tree(repository, **about)
            except hub_errors.CachedRepoTreeNotFoundError:
                tree = None  # offline, and an older version of the library filled the cache
    if tree is not None:
        sizes = {file.path: file.size for file in tree}
    else:
        cached = (path for path in snapshot.rglob("*") if path.is_file())
        sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in cached}
    return HubFolder(url, repository, snapshot, place.folder, sizes)


def _open_bucket(url: str) -> BucketFolder:
    with _storage_errors(url):
        _, root = file_system(url)
    return BucketFolder(url, root, user_cache("files"))


def _inside(url: str, name: str) -> str:
    try:
        return file_within(name)
    except ValueError as error:
        raise DatasetError(
            url,
            f"name {short(name)}",
            f"{error}; correct the file that names it, or do not use this dataset.",
        ) from None


def _missing(file: Path | str) -> MissingFileError:
    return MissingFileError(file, "file", "is missing; copy or record the dataset again.")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _storage_errors(file: Path | str) -> Iterator[None]:
    """Turns a storage's failures, of its clients' own kinds, into errors that name the file."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except FileNotFoundError:
        raise _missing(file) from None
    except Exception as error:
        raise DatasetError(
            file,
            "file",
            f"cannot be reached ({first_line(error)}); check the connection and your access, then "
            "try again.",
        ) from error


@contextmanager
def _hub_errors(file: Path | str) -> Iterator[None]:
    try:
        yield
    except hub_errors.GatedRepoError:
        raise DatasetError(
            file,
            "access",
            "needs its owner's approval; request it on the dataset's page, then run `hf auth "
            "login`.",
        ) from None
    except hub_errors.RepositoryNotFoundError:
        raise MissingFileError(
            file,
            "repository",
            "is not on the hub, or is private; check the name, or run `hf auth login`.",
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise MissingFileError(
            file, "revision", "is not in the repository; give a branch, tag or commit that is."
        ) from None
    except hub_errors.LocalEntryNotFoundError as error:
        raise MissingFileError(
            file, "file", "is not cached and the hub cannot be reached; connect, then try again."
        ) from error
    except hub_errors.HFValidationError as error:
        raise ValueError(f"{file}: {error}") from None
    except (OSError, hub_errors.EntryNotFoundError) as error:
        raise DatasetError(
            file, "file", f"cannot be fetched ({str(error).splitlines()[0]}); try again."
        ) from error
