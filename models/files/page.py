"""Self-contained pages: one document with its own style sheet, which loads nothing from elsewhere
and follows the reader's light or dark theme. Datasets, evaluations and runs are shown on these.
"""

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfbfa; --card: #ffffff; --ink: #1c1f24; --soft: #5c6570; --line: #e3e5e8;
  --main: #2f6bd8; --other: #b3651a; --plain: #a4adb9; --good: #1d7a46; --bad: #b5472a;
  --edge: #00000026; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --card: #1b1f25; --ink: #e7e9ec; --soft: #9aa4b0; --line: #2e343c;
  --main: #6b9df5; --other: #e3a64a; --plain: #66707d; --good: #5cc48a; --bad: #ee8a6a;
  --edge: #ffffff2e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .9rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 0 0 .9rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.2rem 1.3rem; margin-top: 1.25rem; }
.eyebrow { margin: 0 0 .25rem; color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .25rem 1.6rem; margin: 1rem 0 0; padding: 0;
  list-style: none; color: var(--soft); font-size: .95rem; }
.facts b, figcaption b { color: var(--ink); font-weight: 600; }
.note, figcaption { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.note { margin: .9rem 0 0; }
.findings { padding-left: 1.1rem; overflow-wrap: anywhere; } .findings li { margin: .3rem 0; }
figure { margin: 0; }
figcaption { margin-top: .4rem; }
video { display: block; width: 100%; height: auto; border-radius: 6px; background: var(--line); }
summary { cursor: pointer; font-weight: 600; }
@media print { section { break-inside: avoid; } }
"""


def page(title: str, body: Sequence[str], style: str = "", head: str = "", script: str = "") -> str:
    """The document. The title is text, all else is HTML, CSS on top of `STYLE`, and a script that
    runs when the body is there."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n{head}</head>\n"
        f"<body>\n{''.join(body)}{script and f'<script>{script}</script>'}</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """A titled part of the page; empty if it has no content."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>\n" if content else ""


def listed(kind: str, items: Sequence[str]) -> str:
    """A list of class `kind`, of HTML."""
    return f'<ul class="{kind}">{"".join(f"<li>{item}</li>" for item in items)}</ul>\n'


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", kind: str = ""
) -> str:
    """`heads` and cells are HTML, the caption is text; the first cell of a row is its head. Empty
    if it has no rows; `kind` is its class."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{head}</th>' if head else "<td></td>" for head in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    named = kind and f' class="{kind}"'
    said = caption and f"<caption>{escape(caption)}</caption>"
    return (
        f'<div class="scroll"><table{named}>{said}'
        f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def data_url(kind: str, data: bytes) -> str:
    """Bytes of a media type, such as "image/jpeg", as a URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def jpeg(picture: UInt8[np.ndarray, "h w 3"]) -> str:
    """A still picture as a data URL."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=85)
    return data_url("image/jpeg", file.getvalue())


def script_data(data: Any) -> str:
    """JSON for a page's script, as the element with id "data"; no text in it can end the
    element."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'
