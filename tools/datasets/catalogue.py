"""The command `python -m tools.data catalogue`: versions of datasets, and what each was made of."""

import os
from typing import Annotated

import tyro
from rich.table import Column

from data.lake.catalogue import Catalogue, DatasetVersion, find, lineage
from models.files.address import parse
from models.files.terminal import Console, say
from tools.datasets.shown import table
from tools.datasets.versions import version_of

_DIGITS = 12


def catalogue_command(
    folder: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = None,
    of: Annotated[str, tyro.conf.arg(metavar="PATH|NAME|DIGEST")] = "",
    add: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATH")] = (),
) -> None:
    """Show the versions of datasets in a catalogue, or what one of them was made of and by which
    commands.

    Args:
        folder: Folder or URL of the catalogue; default: CHILIAD_CATALOGUE.
        of: Path, name or digest (4 digits or more) of a version; shows its lineage.
        add: Dataset or frame store to add as it is.
    """
    url = folder or os.environ.get("CHILIAD_CATALOGUE")
    if not url:
        raise ValueError("Give the folder of a catalogue, or set CHILIAD_CATALOGUE to it.")
    console, catalogue = Console(), Catalogue(url)
    catalogue.add([version_of(path) for path in add])
    versions = catalogue.versions()
    if of:
        paths = {version.path for version in versions}
        there = parse(of).absolute if parse(of).absolute in paths else of
        _show(console, lineage(versions, find(versions, there)))
    else:
        _show(console, [(0, version) for version in versions])
        say(console, f"{len(versions)} versions in {url}.")


def _show(console: Console, versions: list[tuple[int, DatasetVersion]]) -> None:
    numbers = (Column(name, justify="right") for name in ("Episodes", "Frames", "MB"))
    heads = ("Digest", "Version", "Format")
    shown = table(*(Column(head, overflow="fold") for head in heads), *numbers, "Made", "Command")
    for depth, version in versions:
        counts = ("" if n is None else str(n) for n in (version.episodes, version.frames))
        shown.add_row(
            version.digest[:_DIGITS],
            "  " * depth + version.path,
            version.format,
            *counts,
            f"{version.bytes / 1e6:.1f}",
            f"{version.made:%Y-%m-%d %H:%M}",
            version.command or "(seen)",
        )
    console.print(shown)
