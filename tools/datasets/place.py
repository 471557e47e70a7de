"""Options of the commands that work on whole datasets: where the work is done, and the catalogue
that records what was made."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from data.files.job import running
from data.lake.catalogue import Catalogue
from data.lake.on_ray import on_ray
from models.files.terminal import Console, say
from tools.datasets.versions import recordings, typed, version_of


@dataclass(frozen=True)
class RayOptions:
    """Place where the work is done; default: this process. The results are the same."""

    ray: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do the work with a Ray that runs on this machine alone."""
    ray_address: str | None = None
    """Do the work on this Ray cluster ("auto": the one that this machine is in)."""

    @property
    def chosen(self) -> bool:
        """True if a cluster does the work."""
        return self.ray or bool(self.ray_address)


@dataclass(frozen=True)
class LakeOptions(RayOptions):
    """Place where the work is done, and the catalogue that records it."""

    catalogue: str | None = None
    """Folder or URL of the catalogue that records what was made (docs/lake.md); default:
    CHILIAD_CATALOGUE."""


HERE, ALONE = RayOptions(), LakeOptions()

Note = Callable[[str | Path], None]
"""Records in the catalogue a dataset or store that was made."""


@contextmanager
def on_cluster(options: RayOptions, console: Console, data_format: str = "") -> Iterator[None]:
    """Runs the jobs of a block where the options say, and prints a summary of a cluster's work.

    Raises:
      ValueError: Ray is not installed or not found at the address, or a cluster is to read a format
        of the user's own.
    """
    if not options.chosen:
        yield
        return
    if data_format:
        raise ValueError(
            f"--data-format is {data_format}, but a cluster's workers do not have your file; leave "
            "--ray and --ray-address out."
        )
    with on_ray(options.ray_address or "local") as (run, tally):
        with running(run):
            yield
        say(console, str(tally))


@contextmanager
def lake(
    options: LakeOptions,
    console: Console,
    paths: Sequence[str],
    *,
    data_format: str = "",
    recorded: bool = False,
) -> Iterator[Note]:
    """`on_cluster`, with a function that records in the catalogue, if there is one, what was made
    from the datasets at `paths` (or from the recordings there, if `recorded`).

    Raises:
      ValueError: as `on_cluster`, or the folder is no catalogue or cannot be written.
    """
    url = options.catalogue or os.environ.get("CHILIAD_CATALOGUE")
    with on_cluster(options, console, data_format):
        if not url:
            yield lambda path: None
            return
        catalogue = Catalogue(url)
        sources = recordings(paths) if recorded else [version_of(path) for path in paths]
        known = catalogue.versions() if catalogue.exists else []
        catalogue.begin()
        seen = {(version.digest, version.path) for version in known}
        new = [source for source in sources if (source.digest, source.path) not in seen]

        def note(path: str | Path) -> None:
            catalogue.add([*new, version_of(str(path), typed(), sources)])
            new.clear()
            say(console, f"Recorded {path} in the catalogue {url}.")

        yield note
