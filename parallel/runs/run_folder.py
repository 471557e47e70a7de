"""The folder of a run, apart from its checkpoints and logs: its config, and a note of whether
anything was ever saved, so that a run with missing checkpoints is not mistaken for a new run.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.checkpoints import own
from models.files.terminal import Console
from models.files.whole_text import read_whole
from parallel.runs.atomic import replace_text
from parallel.runs.json_lines import set_aside

Json = Any
CONFIG_NAME, SAVED_NAME, ORIGIN_NAME = "config.json", "saved.json", "origin.json"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder that no other run can enter, see `parallel.shell.opened`. `resume`: it holds a
    run, which goes on. `mirror`: URL of the folder where its checkpoints are also kept."""

    directory: Path
    resume: bool = False
    mirror: str | None = None


@dataclass(frozen=True)
class Run:
    """A run's folder, and the JSON values that its checkpoints carry besides the state. `origin`
    tells people where the run comes from: `preset`, `data` and similar, as text."""

    folder: RunFolder
    config: Json
    assets: Json
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Path of the folder."""
        return self.folder.directory


def check_folder(directory: Path, resume: bool) -> None:
    """Refuses to begin in a folder that holds a run, and to resume in one that holds no run or
    whose checkpoints are missing.

    Raises:
      ValueError, FileNotFoundError: the folder is refused.
    """
    steps, saved = own.steps(directory / "checkpoints"), directory / SAVED_NAME
    lost = not (directory / CONFIG_NAME).exists()
    if resume and lost:
        remedy = "check the path or start without --resume"
        if steps:
            copy = directory / "checkpoints" / str(steps[-1]) / "config" / "data.json"
            remedy = f"put it back ({copy} is a copy), or name another directory"
        raise FileNotFoundError(
            f"{directory} holds no run to resume: it has no {CONFIG_NAME}; {remedy}."
        )
    check_saved(directory)
    if not resume and (steps or saved.exists()):
        at = f" at step {steps[-1]}" if steps else _at(saved)
        first = f" Put its {CONFIG_NAME} back first." * lost
        raise ValueError(
            f"{directory} holds a run already, saved{at}; continue with --resume or name another "
            f"directory.{first}"
        )


def holds_run(directory: Path) -> bool:
    """True if the folder has a run's config, a note that one was saved, or a checkpoint."""
    noted = any((directory / name).exists() for name in (CONFIG_NAME, SAVED_NAME))
    return noted or bool(own.steps(directory / "checkpoints"))


def check_saved(directory: Path) -> None:
    """Refuses a run whose checkpoints existed once and are now missing.

    Raises:
      ValueError, FileNotFoundError: `checkpoints` is not a folder, is a broken link, or holds no
        checkpoint although some were saved.
    """
    folder, saved = directory / "checkpoints", directory / SAVED_NAME
    if folder.is_symlink() and not folder.exists():
        raise FileNotFoundError(
            f"{folder} is a link to {folder.readlink()}, which does not exist; mount or create it."
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; move it away and put the run's checkpoints back."
        )
    if not saved.exists() or own.steps(folder) or any(folder.glob("*.damaged*")):
        return
    raise FileNotFoundError(
        f"{folder} {'holds no checkpoint' if folder.exists() else 'is missing'}, but {saved} says "
        f"that the run was saved{_at(saved)}; mount or restore it, name another directory, or "
        f"remove {SAVED_NAME} to begin at step 0, without what was learnt."
    )


def check_steps_made(directory: Path, made: int, steps: int) -> None:
    """Raises ValueError if a run to be resumed has already made more than `steps` steps."""
    if made > steps:
        raise ValueError(
            f"{directory} has made {made} steps already, but only {steps} were asked for; give at "
            f"least {made}, or another directory."
        )


def note_saved(directory: Path, step: int) -> None:
    """Records beside the checkpoints that one of `step` exists."""
    replace_text(directory / SAVED_NAME, json.dumps({"step": step}) + "\n")


def write_config(run: Run) -> None:
    """Writes config and origin to the run's folder, each as a whole or not at all."""
    replace_text(run.directory / CONFIG_NAME, json.dumps(run.config, indent=2) + "\n")
    if run.origin:
        replace_text(run.directory / ORIGIN_NAME, json.dumps(run.origin, indent=2) + "\n")


def read_config(directory: Path, console: Console) -> Json | None:
    """The config that a run was begun with. A damaged file is set aside, with a line on `console`,
    and written again from the newest checkpoint that has the config; returns None if there is none.
    """
    path = directory / CONFIG_NAME
    with suppress(ValueError, RecursionError):
        config = json.loads(read_whole(path))
        if isinstance(config, dict):
            return config
    copy, found = set_aside(path), None
    for step in reversed(own.steps(directory / "checkpoints")):
        with suppress(ValueError, FileNotFoundError):
            found = own.read_json(directory / "checkpoints" / str(step), "config")
            break
    if found is not None:
        replace_text(path, json.dumps(found, indent=2) + "\n")
    instead = "that of this command" if found is None else f"that of checkpoint {step}"
    console.print(
        f"{path} is damaged and was set aside as {copy.name}; continuing with {instead}.",
        soft_wrap=True,
    )
    return found


def _at(saved: Path) -> str:
    """The step that the note in saved.json names, if it can still be read."""
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        return f" at step {int(json.loads(read_whole(saved))['step'])}"
    return ""
