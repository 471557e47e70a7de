"""Upload of a folder and its card to the Hugging Face hub or a bucket, for the commands that push.

Existing files are replaced only on request, and a new repository is private by default.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.files import hub
from models.files.address import parse
from models.files.bucket import Bucket
from models.files.terminal import Console


@dataclass(frozen=True)
class PushOptions:
    """Terms on which something is pushed."""

    license: str | None = None
    """Licence, such as apache-2.0, cc-by-4.0 or other; the command asks for it if not given."""
    revision: str | None = None
    """Branch of the hub's repository, created if needed; default: main."""
    public: bool = False
    """Make a new repository public; an existing one stays as it is."""
    replace: bool = False
    """Replace what the repository or folder holds."""


def push(
    folder: Path,
    names: Sequence[str],
    url: str,
    card: str,
    options: PushOptions,
    *,
    kind: hub.Kind,
    tag: str | None = None,
) -> str:
    """Uploads files of a folder and a card; returns the address at which they can be seen. The last
    of `names` is uploaded last, so that it can mark the others as complete.

    Raises:
      ValueError: something else is there already, a whole bucket is to be replaced, or the URL is
        neither the hub's nor a bucket's.
      OSError: access is refused, or the upload failed.
    """
    address = parse(url)
    if address.protocol == "hf":
        return hub.push(
            folder,
            names,
            url,
            card,
            kind=kind,
            private=not options.public,
            replace=options.replace,
            revision=options.revision,
            tag=tag,
        )
    if "://" not in url:
        raise ValueError(f"{url} is not a URL; give hf://org/name, s3://… or gs://….")
    if options.revision:
        raise ValueError(f"{url}: a bucket has no revisions; leave --revision out.")
    bucket = Bucket(address.url)
    held = bucket.list()
    if held and not options.replace:
        raise ValueError(
            f"{url} holds {len(held)} files already, such as {min(held)[:80]!r}; choose another "
            "URL, or give --replace to replace them."
        )
    if held and not address.below:
        raise ValueError(
            f"{url} is a whole bucket, and --replace would remove all {len(held)} files in it; "
            f"name a folder in it, such as {address}/{folder.name}."
        )
    first = {
        name
        for name in held
        if name == names[-1]
        or name.endswith("digests.json")
        or any(new.startswith(f"{name}/") for new in names)  # a file where a folder goes
    }
    bucket.remove(sorted(first))
    bucket.put(folder, names[:-1])
    bucket.write("README.md", card.encode())
    bucket.remove(sorted(held.keys() - first - {*names, "README.md"}))
    bucket.put(folder, names[-1:])
    return url


def licence(options: PushOptions, console: Console) -> str:
    """The licence's identifier, asked for at a terminal.

    Raises:
      ValueError: none was given.
    """
    given = options.license
    if given is None and console.is_terminal and sys.stdin.isatty():
        given = console.input("Licence (apache-2.0, cc-by-4.0, …, other): ")
    if not (given or "").strip():
        raise ValueError(
            "Under which licence may others use this? Give --license, such as apache-2.0, "
            "cc-by-4.0 or other."
        )
    return str(given).strip()
