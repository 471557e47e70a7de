"""Addresses of files and folders: a path of this machine, a repository of the hub
(`hf://organisation/name`) or a place that fsspec knows (`s3://bucket/folder`).

An address is parsed here and nowhere edited as text. A variable that is not set leaves an empty
name in it, which storages read as the local disk, the root or another bucket: it is refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fsspec.registry import known_implementations

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)(.*)", re.DOTALL)
_HERE = ("file", "local", "asynclocal")
_EXAMPLES = {"hf": "hf://organisation/name", "file": "file:///folder, or a path"}


@dataclass(frozen=True)
class Address:
    """A place under a `protocol`: a path of this machine ("file"), else bucket, host or
    organisation and what is below it, without a slash at the end."""

    protocol: str
    place: str

    @property
    def is_remote(self) -> bool:
        """True unless it is a path of this machine."""
        return self.protocol != "file"

    @property
    def path(self) -> Path:
        """Path on this machine; of a remote place, its names (`bucket/folder`)."""
        return Path(self.place)

    @property
    def below(self) -> str:
        """Names below the bucket, host or organisation; "" for all of it."""
        return self.place.partition("/")[2]

    @property
    def name(self) -> str:
        """The last name of the place."""
        return self.path.resolve().name if not self.is_remote else self.path.name

    @property
    def absolute(self) -> str:
        """The URL, or the whole path, for other working directories."""
        return str(self if self.is_remote else whole(self.place))

    def same_as(self, path: Path) -> bool:
        """True if it is this path of this machine."""
        return not self.is_remote and self.path.resolve() == path.resolve()

    def is_inside(self, other: "Address") -> bool:
        """True if it is the other place or below it."""
        if not (self.is_remote or other.is_remote):
            return self.path.resolve().is_relative_to(other.path.resolve())
        return self.protocol == other.protocol and self.path.is_relative_to(other.path)

    @property
    def url(self) -> str:
        """URL for fsspec."""
        return str(self) if self.is_remote else f"file://{self.absolute}"

    def __str__(self) -> str:
        return f"{self.protocol}://{self.place}" if self.is_remote else self.place


def parse(text: str | Path) -> Address:
    """The address in a path or URL, also in a URL that lost a slash when it became a Path.

    Raises:
      ValueError: it is empty, or a URL that is relative, chained, or has an empty name, `.` or `..`
        in it.
    """
    given = str(text)
    found = _URL.fullmatch(given.strip())
    if not given.strip():
        raise ValueError("A path or URL is empty; is a variable in it unset?")
    if found is None or (len(found[2]) < 2 and Path(given).exists()):
        return Address("file", given)
    protocol, slashes, place = found[1].lower(), found[2], found[3]
    # chains and references name files with templates, which are programs
    if protocol == "reference" or ("::" in given and "://" in given):
        raise ValueError(
            f"{given}: chained fsspec URLs and reference:// are not supported; give the URL of one "
            "folder."
        )
    example = _EXAMPLES.get(protocol, f"{protocol}://bucket/folder")
    if not slashes:
        if protocol not in known_implementations:
            return Address("file", given)
        raise ValueError(
            f"{given}: is no whole URL; give {example}; or the whole path of a folder of that name."
        )
    if protocol in _HERE:
        if len(slashes) == 2:
            raise ValueError(f"{given}: is a relative URL; give {example}.")
        return Address(protocol, f"/{place}")
    names = ("/" * (len(slashes) - 2) + place).removesuffix("/").split("/")
    if not all(name.strip() for name in names):
        what = "bucket" if not names[0].strip() else "name between two slashes"
        raise ValueError(f"{given}: has an empty {what}; is a variable unset? Give {example}.")
    if {".", ".."} & set(names):
        raise ValueError(f"{given}: has '.' or '..' in it, which no storage follows; write it out.")
    return Address(protocol, "/".join(names))


def whole(path: str | Path) -> Path:
    """The path from the root on, without `..`, which tensorstore refuses."""
    path = Path(path).absolute()
    return path.resolve() if ".." in path.parts else path
