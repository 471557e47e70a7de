"""Training in a folder that it opens itself, as the command does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from models.files.terminal import Console
from parallel import trainer
from parallel.hosts.distributed import host_index
from parallel.runs import run_folder
from parallel.shell import opened


class Run(NamedTuple):
    """A run whose folder is not open yet."""

    directory: Path
    config: Any
    assets: Any


def in_folder(
    begin: Callable[[run_folder.Run], Any],
    run: Run,
    console: Console | None = None,
    resume: bool = False,
    mirror: str | None = None,
) -> Any:
    """The result of `begin`, called while the run's folder is open."""
    console = console or Console(quiet=host_index() != 0)
    with opened(run.directory, resume, console, mirror) as folder:
        return begin(run_folder.Run(folder, run.config, run.assets))


def train(model, rules, batches, position, run, config, optimizer, **options):
    where = {name: options.pop(name) for name in ("resume", "mirror") if name in options}

    def begin(run):
        return trainer.train(model, rules, batches, position, run, config, optimizer, **options)

    return in_folder(begin, run, **where)
