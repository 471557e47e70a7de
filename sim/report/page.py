"""The skeleton of a self-contained page: sections in one column and inline videos. Reports of all
kinds use it, and a page is written as a whole or not at all.
"""

import base64
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from sim.clips import encode_jpeg
from sim.report.style import STYLE

Encode = Callable[[UInt8[np.ndarray, "t h w 3"], float], bytes]
"""(frames, frames per second) -> an MP4 that a page can show."""

_HOLD_SECONDS = 1
"""Seconds for which a video holds its last picture before it starts over."""


def page(title: str, body: Sequence[str], head: str = "") -> str:
    """The document. The parts of the body and the addition to its head are HTML, the title is
    text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{head}</head>\n"
        f"<body>\n{''.join(body)}</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """A titled part of the page; empty if it has no content."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>\n" if content else ""


def write_page(path: str | Path, text: str) -> None:
    """Writes a page as a whole or not at all, creating its folder if needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def video(frames: UInt8[np.ndarray, "t h w 3"], fps: float, encode: Encode, label: str) -> str:
    """A looping video that holds its last picture; the label is text that describes its content."""
    rest = np.repeat(frames[-1:], max(1, round(_HOLD_SECONDS * fps)), 0)
    movie = _base64(encode(np.concatenate([frames, rest]), fps))
    height, width = frames.shape[1:3]
    text = escape(label)
    return (
        f'<video autoplay loop muted playsinline width="{width}" height="{height}" '
        f'aria-label="{text}" poster="{jpeg(frames[0])}" '
        f'src="data:video/mp4;base64,{movie}">{text}</video>'
    )


def jpeg(picture: UInt8[np.ndarray, "h w 3"]) -> str:
    """A still picture as a data URL."""
    return f"data:image/jpeg;base64,{_base64(encode_jpeg(picture))}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
