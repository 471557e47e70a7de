"""Rewrite the figures on the documentation's pages from the JSON in docs/results/data.

    python -m tools.bench pages

Comments on a page, which a reader does not see, say how its figures follow from a file:

    <!-- figures demo.json {success:.1%} -->99.2 %<!-- end -->

    <!-- figures demo.json for runs
    | seed | success |
    |---|---|
    | {*} | {runs.*.success:.1%} |
    -->
    (these three lines again, the last once for each of `runs`, whose key `*` stands for)
    <!-- end -->

    <!-- loads -->Load average of the machine when it began: 4.9 (packing.json).<!-- end -->

`{a.b.0:FORMAT}` is the value at a, b, 0 in Python's format. Percentages get a space, a list of two
is a range (which null leaves open), and `{success:x256}` writes a share as so many of 256. The last
comment names those of the page's files that were measured beside other work. Tests check that the
command would change nothing, so that no such figure differs from its JSON, and that each page of
docs with such a file has that comment.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from models.files.terminal import Console

ROOT = Path(__file__).resolve().parents[2]
_BEGIN = "<!-- figures "
_BLOCK = re.compile(
    _BEGIN + r"(\S+\.json)(?: for ([^\n]+)(?=\n))?(\s.*?)-->.*?<!-- end -->", re.DOTALL
)
_LOADS = re.compile(r"(<!-- loads -->).*?(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
_ROUNDING = 0.05
"""Largest distance from a whole number of starts of a share that was written with four digits."""


def main(root: Path = ROOT) -> None:
    """Rewrite every page's figures.

    Args:
      root: folder with README.md, CHANGELOG.md and docs, whose JSON is in docs/results/data.
    """
    console = Console()
    for page, text in made(root):
        changed = text != page.read_text(encoding="utf-8")
        if changed:
            page.write_text(text, encoding="utf-8")
        console.print(f"{page.relative_to(root)}: {'written anew' if changed else 'as it was'}")


def made(root: Path) -> Iterator[tuple[Path, str]]:
    """Pages that take figures from JSON, each with its text as it should be.

    Raises:
      ValueError: a page asks for something that its JSON lacks, or a comment has no end.
    """
    for page in (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if _BEGIN in text:
            try:
                yield page, renewed(text, root / "docs" / "results" / "data")
            except (ValueError, OSError) as error:
                raise ValueError(f"{page}: {error}") from error


def renewed(text: str, data: Path) -> str:
    """A page's text with the figures that the files in `data` give.

    Raises:
      ValueError: a figure is not in its file, or a comment has no end.
    """
    blocks = list(_BLOCK.finditer(text))
    if len(blocks) != text.count(_BEGIN) or any(_BEGIN in block[3] for block in blocks):
        raise ValueError(f"a comment that begins with {_BEGIN!r} has no <!-- end -->, or no -->.")
    told_loads = ", ".join(f"{load} ({name})" for name, load in busy(text, data).items())
    said = f"Load average of the machine when it began: {told_loads}." if told_loads else ""
    written = _BLOCK.sub(lambda block: _block(block, data), text)
    return _LOADS.sub(lambda block: f"{block[1]}{said}{block[2]}", written)


def busy(text: str, data: Path) -> dict[str, float]:
    """Files of a page's figures that were measured beside other work, each with the machine's load
    (processes that run or wait, averaged over a minute) before it began."""
    names = sorted({block[1] for block in _BLOCK.finditer(text)})
    loads = {name: _read(data / name).get("load_before") for name in names}
    return {name: load for name, load in loads.items() if load is not None and load > 1}


def formatted(value: Any, form: str) -> str:
    """A value in a format, as our pages write it."""
    if value is None:
        return "–"
    if isinstance(value, list):
        unit = " %" if form.endswith("%") else ""
        ends = ("∞" if end is None else formatted(end, form).removesuffix(unit) for end in value)
        return "–".join(ends) + unit
    if form.startswith("x"):
        count = value * int(form[1:])
        if abs(count - round(count)) > _ROUNDING:
            raise ValueError(
                f"{value} is not a share of {form[1:]}: that would be {count:.2f} of it."
            )
        return f"{round(count):,}"
    text = format(value, form)
    if isinstance(value, str):
        return text
    return text.replace("-", "−").removesuffix("%") + " %" * form.endswith("%")


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _block(block: re.Match[str], data: Path) -> str:
    name, each, template = block.groups()
    found = _read(data / name)
    lines = [(line, "") for line in template.strip().splitlines()]
    if each is not None:
        *lines, (last, _) = lines
        lines += [(last, key) for key in _keys(_at(found, each))]
    written = (_FIGURE.sub(partial(_figure, found, key, name), line) for line, key in lines)
    around = "\n" if template.startswith("\n") else ""
    opening = block[0][: block.end(3) - block.start()]
    return f"{opening}-->{around}" + "\n".join(written) + f"{around}<!-- end -->"


def _figure(found: Any, key: str, name: str, figure: re.Match[str]) -> str:
    path, form = figure[1].replace("*", key), figure[2] or ""
    if figure[1] == "*":
        return key
    try:
        return formatted(_at(found, path), form)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {figure[0]}: {error}") from error


def _keys(found: Any) -> list[str]:
    return [str(key) for key in (found if isinstance(found, dict) else range(len(found)))]


def _at(found: Any, path: str) -> Any:
    """The value at a path; a key may have dots, and the longest that fits is taken."""
    while path:
        names = _keys(found) if isinstance(found, dict | list) else []
        fitting = [name for name in names if f"{path}.".startswith(f"{name}.")]
        if not fitting:
            there = ", ".join(names) or f"only {found!r}"
            raise ValueError(f"there is no {path!r}; there is {there}.")
        name = max(fitting, key=len)
        found = found[int(name) if isinstance(found, list) else name]
        path = path[len(name) + 1 :]
    return found
