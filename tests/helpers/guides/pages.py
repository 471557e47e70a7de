"""Guides, and the commands and blocks of code that stand in them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
STARTED = r"(?:[A-Z_]+=\S+ +|mpirun -n \d+ +|srun +)*"
"""Words before a command: settings, and what starts it on several machines."""
OURS = re.compile(
    STARTED + r"(?:python -m tools\.(?P<module>[\w.]+)|chiliad (?P<name>[a-z-]+))(?:\s|$)"
)
SPAN = re.compile(r"`([^`\n]+)`")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Fenced blocks of a page, each after its language."""
    return ((block[2], block[3]) for block in FENCED.finditer(page.read_text()))


def commands(page: Path) -> list[str]:
    """Our commands in blocks and indented lines of a page, without comments, and whole ones in its
    prose; a command behind `--` is one, too."""
    text = page.read_text()
    prose = FENCED.sub("", text)
    indented = [line for line in re.sub(r"\\\n", " ", prose).splitlines() if line[:4] == "    "]
    block = "".join(block for _, block in blocks(page)).replace("\\\n", " ")
    shown = [re.sub(r"\s#.*", "", line) for line in [*block.splitlines(), *indented]]
    said = [span for span in SPAN.findall(prose) if "…" not in span and " -" in span[10:]]
    lines = [line.strip().removeprefix("$ ") for line in [*shown, *said]]
    parts = [part for line in lines if OURS.match(line) for part in line.split(" -- ")]
    return [" ".join(part.split()) for part in parts if OURS.match(part)]
