"""A folder of a bucket, or of any other file system that fsspec knows: files are listed, read and
written one by one, and errors are sentences.

Nothing is cached here. A listed name that leads out of the folder is refused.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from models.files.address import parse
from models.files.bounds import check_name
from models.files.terminal import first_line

Done = Callable[[int], None]
"""Called with the number of bytes of each file that has arrived."""

_THREADS = 8
VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "created", "generation", "md5Hash")
"""Names under which storages report a value that changes with a file's content."""
_NO_ACCESS = re.compile(r"credential|forbidden|denied|unauthori[sz]ed|permission", re.IGNORECASE)


@dataclass(frozen=True)
class StoredFile:
    """A file as its storage describes it: size in bytes, and a value that changes with its
    content."""

    size: int
    version: str


@dataclass(frozen=True)
class Bucket:
    """Files under `url`, such as s3://bucket/folder or gs://bucket/folder."""

    url: str

    def list(self) -> dict[str, StoredFile]:
        """All files under the folder, by their names in it; empty if there is no such folder. For
        the URL of a single file, that file, named "".

        Raises:
          ValueError: a name leads out of the folder.
          OSError: the storage cannot be reached, or refuses.
        """
        files, root = self._files
        with _errors(self.url):
            files.invalidate_cache()
            found = files.find(root, detail=True)
        listed = {}
        for path, about in found.items():
            name = path[len(root) :].lstrip("/")
            if not name and path.endswith("/"):
                continue  # a folder that a browser made
            if name:
                check_name(f"A file of {self.url}", name, nested=True)
            version = " ".join(str(about.get(key)) for key in VERSION_KEYS)
            listed[name] = StoredFile(int(about["size"] or 0), version)
        return listed

    def read(self, name: str) -> bytes | None:
        """Content of a small file, None if there is none."""
        with self._at(name) as (files, path):
            try:
                return files.cat_file(path)
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, whole or not at all."""
        with self._at(name) as (files, path):
            files.makedirs(_parent(path), exist_ok=True)
            files.pipe_file(path, content)

    def get(
        self, names: dict[str, StoredFile], folder: Path, done: Done = lambda size: None
    ) -> None:
        """Downloads files into a local folder, several at a time. A file that is there already is
        complete and is kept; a partial download has another name.

        Raises:
          FileNotFoundError, OSError: a file cannot be downloaded, or arrives incomplete.
        """

        def one(name: str) -> int:
            to = folder / name if name else folder
            if not to.is_file():
                to.parent.mkdir(parents=True, exist_ok=True)
                part = to.with_name(f".{to.name}.part")
                with self._at(name) as (files, path):
                    files.get_file(path, str(part))
                    if (size := part.stat().st_size) != names[name].size:
                        raise OSError(f"{size} bytes arrived, expected {names[name].size}")
                part.replace(to)
            return names[name].size

        _each(one, names, done)

    def put(self, folder: Path, names: Iterable[str], done: Done = lambda size: None) -> None:
        """Copies files of a local folder here, under the same names, several at a time.

        Raises:
          OSError: one cannot be written.
        """

        files, _ = self._files

        def one(name: str) -> int:
            with self._at(name) as (_, path):
                files.makedirs(_parent(path), exist_ok=True)
                files.put_file(str(folder / name), path)
            return (folder / name).stat().st_size

        _each(one, names, done)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files in the given order; a file that does not exist is no error."""
        for name in names:
            with self._at(name) as (files, path), suppress(FileNotFoundError):
                files.rm_file(path)

    @contextmanager
    def _at(self, name: str) -> Iterator[tuple[Any, str]]:
        """The file system, and a file's path in it; errors name the file."""
        files, root = self._files
        below = f"/{name}" if name else ""
        with _errors(self.url + below):
            yield files, root + below

    @cached_property
    def _files(self) -> tuple[Any, str]:
        with _errors(self.url):
            return file_system(self.url)


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the folder's path in it.

    Raises:
      ValueError: as `models.files.address.parse`, or fsspec does not know the protocol, or lacks a
        package for it.
    """
    address = parse(url)
    try:
        files, root = fsspec.core.url_to_fs(address.url)
    except ImportError:
        hint = known_implementations[address.protocol].get("err", "install fsspec's package for it")
        raise ValueError(f"{url}: a Python package is missing: {hint}.") from None
    except ValueError as error:
        raise ValueError(
            f"{url}: {error}; give a path, hf://organisation/name or a URL that fsspec knows."
        ) from None
    return files, root.rstrip("/")


def _each(one: Callable[[str], int], names: Iterable[str], done: Done) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for size in pool.map(one, names):
                done(size)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Turns a storage's failures into OSErrors that say what to do. Storage clients raise errors of
    their own kinds, which need not be known to tell access from connection."""
    try:
        yield
    except (ImportError, ValueError, KeyboardInterrupt):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{where}: there is no such bucket or file ({first_line(error)}); check the name."
        ) from None
    except Exception as error:
        line = first_line(error)
        if isinstance(error, PermissionError) or _NO_ACCESS.search(
            f"{type(error).__name__} {line}"
        ):
            raise OSError(
                f"{where}: access was refused ({line}); log in (`aws configure` or AWS_PROFILE for "
                "s3, `gcloud auth application-default login` for gs), or ask its owner."
            ) from error
        raise OSError(
            f"{where}: cannot be reached ({line}); check the connection and try again."
        ) from error
