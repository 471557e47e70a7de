"""Guides, and the commands and blocks of code that stand in them."""

import re
from collections.abc import Iterator
from pathlib import Path

from models.model import _FAMILIES

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = [page for page in PAGES if page.parent.name == "results"]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
STARTED = r"(?:[A-Z_]+=\S+ +|mpirun -n \d+ +|srun +)*"
"""Words before a command: settings, and what starts it on several machines."""
OURS = re.compile(
    STARTED + r"(?:python -m tools\.(?P<module>[\w.]+)|chiliad (?P<name>[a-z-]+))(?:\s|$)"
)
SPAN = re.compile(r"`([^`\n]+)`")


def own_files() -> dict[str, str]:
    """Files that the guides have users write, by name, and `sight.py`, which one has them copy."""
    files = {"sight.py": (ROOT / "tests" / "own_model.py").read_text()}
    for page in PAGES:
        for language, text in blocks(page):
            if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
                files[name[1]] = text
    return files


def forget_families(folder: Path) -> None:
    """Takes the families of models back that files in the folder have defined."""
    for name, (_, file) in list(_FAMILIES.items()):
        if Path(file).is_relative_to(folder):
            del _FAMILIES[name]


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
