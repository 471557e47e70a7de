"""Films of a run's evaluations, extracted from their reports, so that films of several runs on the
same start can be shown side by side.

Chiliad writes these reports, but a file found in their place may come from anyone. Only plain text
is kept of it, and pictures and films that are embedded in the page itself.
"""

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from models.files.whole_text import read_whole

_DATA = re.compile(r"data:(video/mp4|image/jpeg);base64,[A-Za-z0-9+/]+={0,2}")
_VOID = {"meta", "rect", "line", "circle", "path", "polyline", "polygon", "img", "br"}
_MOST_BYTES = 100_000_000


@dataclass(frozen=True)
class Film:
    """An episode acted by the policy that a report is about."""

    task: str
    prompt: str
    seed: str
    good: bool
    outcome: str
    source: str
    """Data URL of the film."""
    poster: str
    """Data URL of its first picture; may be empty."""

    @property
    def start(self) -> tuple[str, str, str]:
        """Key that films of the same start share."""
        return self.task, self.prompt, self.seed


def read_films(folder: Path) -> tuple[list[Film], list[str]]:
    """Films of all reports in a run's folder, and a sentence on each report that cannot be read."""
    films, damage = [], []
    for path in sorted({*folder.glob("report.html"), *folder.glob("*/report.html")}):
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it has over {_MOST_BYTES // 10**6} MB")
            reader = _Reader()
            reader.feed(read_whole(path).decode())
        except (OSError, ValueError) as error:
            damage.append(f"{path} cannot be read ({error}).")
            continue
        films += reader.films
    return films, damage


class _Reader(HTMLParser):
    """Films of the first group of a report's episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.films: list[Film] = []
        self._task, self._groups = "", 0
        self._open: list[str] = []
        self._film: dict[str, str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        kind = values.get("class", "")
        if tag == "div" and kind == "clips":
            self._groups += 1
        if tag == "figure" and kind == "clip" and self._groups == 1:
            self._film = dict.fromkeys(("prompt", "outcome", "more", "good", "src", "still"), "")
        if self._film is not None and tag == "video":
            self._film |= {"src": values.get("src", ""), "still": values.get("poster", "")}
        if self._film is not None and tag == "span":
            self._film["good"] = kind
        if tag not in _VOID:
            self._open.append(f"{tag}.{kind}")

    def handle_endtag(self, tag: str) -> None:
        if any(name.partition(".")[0] == tag for name in self._open):
            while self._open.pop().partition(".")[0] != tag:
                pass
        if tag == "figure" and self._film is not None:
            self._keep(self._film)
            self._film = None

    def handle_data(self, data: str) -> None:
        at = self._open[-1] if self._open else ""
        if at == "p.eyebrow" and not self._task:
            self._task = data.partition("task ")[2].strip()
        if self._film is None:
            return
        name = {"figcaption.": "prompt", "small.": "more"}.get(at)
        name = name or ("outcome" if at.startswith("span.") else None)
        if name is not None:
            self._film[name] += data

    def _keep(self, found: dict[str, str]) -> None:
        still = found["still"] if _DATA.fullmatch(found["still"]) else ""
        if not _DATA.fullmatch(found["src"]):
            return
        prompt, outcome = found["prompt"].strip().strip("“”"), found["outcome"].strip()
        seed = found["more"].rpartition("seed ")[2].strip()
        good = found["good"] == "good"
        self.films.append(Film(self._task, prompt, seed, good, outcome, found["src"], still))
