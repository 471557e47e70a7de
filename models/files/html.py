"""HTML that notebooks show of an object (`_repr_html_`): small tables and pictures, without scripts
or style sheets. Their text may come from anyone.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from models.files.page import jpeg
from models.files.terminal import harmless

_LONGEST = 200
_MOST_ROWS = 20
_PICTURES = 6


def plain(value: object) -> str:
    """A value as text in which nothing is markup, cut to at most 200 characters."""
    text = " ".join(harmless(str(value)).split())
    return escape(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def card(title: object, facts: Mapping[str, object], *more: str) -> str:
    """A title, facts by name, and further pieces of HTML."""
    rows = "".join(
        f'<tr><th style="text-align:left">{plain(name)}</th>'
        f'<td style="text-align:left">{plain(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<div><strong>{plain(title)}</strong><table>{rows}</table>{''.join(more)}</div>"


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table of at most 20 rows, and the number of rows that were left out."""
    top = "".join(f"<th>{plain(head)}</th>" for head in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{plain(cell)}</td>' for cell in row)}</tr>"
        for row in rows[:_MOST_ROWS]
    )
    left = len(rows) - _MOST_ROWS
    return f"<table><tr>{top}</tr>{body}</table>" + f"<p>… and {left:,} more</p>" * (left > 0)


def listed(sentences: Sequence[object]) -> str:
    """Sentences one below the other."""
    return f"<ul>{''.join(f'<li>{plain(sentence)}</li>' for sentence in sentences)}</ul>"


def strip(frames: UInt8[np.ndarray, "t h w 3"], about: object, height: int = 96) -> str:
    """Up to six frames, evenly spaced from the first to the last, side by side."""
    if not frames.size:
        return ""
    chosen = np.linspace(0, len(frames) - 1, min(_PICTURES, len(frames))).round().astype(int)
    image = Image.fromarray(np.concatenate(list(frames[chosen]), axis=1))
    width = max(1, round(image.width * height / image.height))
    nearest = image.height < height
    how = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    picture = jpeg(np.asarray(image.resize((width, height), how)))
    return f'<div><img alt="{plain(about)}" src="{picture}"></div>'
