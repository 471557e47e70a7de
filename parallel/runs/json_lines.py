"""Logs with one JSON object per line. A last line that a kill left incomplete is dropped; any other
unreadable line is damage, which is reported by its line number and set aside when a run resumes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.files.terminal import Console
from models.files.whole_text import read_whole
from parallel.runs.atomic import replace_text

Fits = Callable[[Any], object]
"""Check that a line belongs to the log; if not, it returns a false value or raises KeyError,
TypeError, ValueError or AttributeError."""


def read_lines(path: Path, fits: Fits) -> list[dict[str, Any]]:
    """All complete lines of a log in order; none if there is no file.

    Raises:
      ValueError: a line is damaged.
    """
    lines, damaged, _ = _scan(path, fits)
    if damaged:
        raise ValueError(
            f"{path}, line {damaged[0]}: not a line of this log; remove the line, or resume the "
            f"run, which sets the file aside and keeps the good lines."
        )
    return lines


def sound_lines(path: Path, fits: Fits) -> tuple[list[dict[str, Any]], list[int]]:
    """All sound, complete lines of a log, and the numbers of damaged lines; for readers that change
    nothing."""
    lines, damaged, _ = _scan(path, fits)
    return lines, damaged


def set_damage_aside(
    path: Path, fits: Fits, console: Console, *, last_matters: bool = False
) -> None:
    """Repairs a log before a run resumes with it: keeps its good lines and, if there are damaged
    ones, a copy of the original file, with a line on `console`.

    Raises:
      ValueError: the last line is damaged and `last_matters`, because the run continues from it.
    """
    lines, damaged, torn = _scan(path, fits)
    count = len(lines) + len(damaged) + torn
    if last_matters and count and (torn or count in damaged):
        raise ValueError(
            f"{path}, line {count}: damaged, but the run needs the last line to continue; put an "
            f"intact copy of the file in its place, or start in another folder."
        )
    if damaged:
        copy = set_aside(path)
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        console.print(
            f"{path}, line {damaged[0]}{more}: damaged; the file was set aside as {copy.name}, and "
            f"its {len(lines)} good lines are kept.",
            soft_wrap=True,
        )
    if damaged or torn:
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def set_aside(path: Path) -> Path:
    """Copies a damaged file to an unused name: `NAME.damaged`, `NAME.damaged-2`, …, and returns
    that path."""
    copy, number = path.with_name(f"{path.name}.damaged"), 1
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.damaged-{number}")
    shutil.copyfile(path, copy)
    return copy


def _whole(digits: str) -> int:
    """A whole number that is also one as a float; raises OverflowError for any other."""
    float(value := int(digits))
    return value


def _scan(path: Path, fits: Fits) -> tuple[list[dict[str, Any]], list[int], bool]:
    """Good lines, the numbers of damaged ones, and whether the last line was incomplete."""
    good, damaged = [], []
    *whole, torn = read_whole(path).split(b"\n") if path.exists() else [b""]
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text, parse_int=_whole)
            fit = isinstance(line, dict) and fits(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            fit = False
        if fit:
            good.append(line)
        else:
            damaged.append(number)
    return good, damaged, bool(torn)
