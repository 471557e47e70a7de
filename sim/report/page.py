"""Style and parts that all reports share."""

import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import numpy as np
from jaxtyping import UInt8

from models.files.page import data_url, jpeg, table
from sim.report import charts

Encode = Callable[[UInt8[np.ndarray, "t h w 3"], float], bytes]
"""(frames, frames per second) -> an MP4 that a page can show."""

STYLE = (
    charts.STYLE
    + """
h3 { font-size: 1rem; margin: 1.25rem 0 .6rem; }
small { display: block; color: var(--soft); font-size: .8rem; font-weight: 400; }
.headline { margin: 0; font-size: 1.25rem; }
.headline strong { font-size: 3.5rem; line-height: 1; color: var(--main);
  letter-spacing: -.03em; }
.headline span { display: block; margin-top: .5rem; font-size: 1rem; color: var(--soft); }
.chart { overflow-x: auto; }
.chart, .scroll { background: linear-gradient(to right, var(--card) 40%, transparent) left,
    linear-gradient(to left, var(--card) 40%, transparent) right,
    linear-gradient(to right, var(--edge), transparent) left,
    linear-gradient(to left, var(--edge), transparent) right;
  background-repeat: no-repeat; background-size: 2.5rem 100%, 2.5rem 100%, .8rem 100%, .8rem 100%;
  background-attachment: local, local, scroll, scroll; }
.chart figcaption { position: sticky; left: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 1.5rem; }
.pair figure { background: none; max-width: 36rem; }
.beside { display: grid; grid-template-columns: minmax(0, 17rem) minmax(0, 1fr); gap: 1.5rem;
  margin-top: 1.25rem; align-items: start; }
.beside + .beside, .looks + .beside { border-top: 1px solid var(--line); padding-top: 1.25rem; }
.look img { display: block; width: 100%; height: auto; border-radius: 6px; }
.trace { display: grid; grid-template-columns: 7.5rem minmax(0, 1fr); align-items: center;
  border-top: 1px solid var(--line); font-size: .85rem; overflow-wrap: anywhere; }
.looks { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem;
  margin: 1rem 0 1.25rem; }
@media (max-width: 44rem) { .beside { grid-template-columns: minmax(0, 1fr); } }
.scroll { overflow-x: auto; margin-top: 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .35rem; }
th, td { text-align: left; padding: .4rem 1rem .4rem 0; border-top: 1px solid var(--line);
  vertical-align: top; }
thead th, thead td { border-top: 0; color: var(--soft); font-weight: 500; font-size: .82rem; }
tbody th { font-weight: 500; min-width: 7.5rem; overflow-wrap: break-word; }
td, thead th { white-space: nowrap; }
tr > :last-child { padding-right: 0; }
td svg { width: 7.5rem; margin-top: .25rem; }
.meter { display: block; width: 12rem; max-width: 40vw; height: .55rem; margin-top: .5rem;
  border-radius: 3px; background: var(--line); overflow: hidden; }
.meter span { display: block; height: 100%; background: var(--main); }
.clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr));
  gap: 1rem; }
.clip figcaption { color: var(--ink); line-height: 1.35; }
.clip small { font-size: .74rem; }
.clip span { display: block; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
details { margin-top: 1.25rem; border-top: 1px solid var(--line); padding-top: .8rem; }
summary { font-size: .9rem; }
pre { overflow-x: auto; font: .8rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
"""
)

_HOLD_SECONDS = 1
"""Seconds for which a video holds its last picture before it starts over."""


def video(frames: UInt8[np.ndarray, "t h w 3"], fps: float, encode: Encode, label: str) -> str:
    """A looping video that holds its last picture; the label is text that describes its content."""
    rest = np.repeat(frames[-1:], max(1, round(_HOLD_SECONDS * fps)), 0)
    movie = data_url("video/mp4", encode(np.concatenate([frames, rest]), fps))
    height, width = frames.shape[1:3]
    text = escape(label)
    return (
        f'<video autoplay loop muted playsinline width="{width}" height="{height}" '
        f'aria-label="{text}" poster="{jpeg(frames[0])}" src="{movie}">{text}</video>'
    )


def chart(drawn: str, caption: str) -> str:
    """A chart with its caption, both HTML."""
    return f'<figure class="chart">{drawn}<figcaption>{caption}</figcaption></figure>\n'


def repetition(versions: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Versions and configuration, with which to repeat a run."""
    rows = [[escape(str(k)), escape(str(v))] for k, v in versions.items()]
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    return (
        table(["What", "Which"], rows, "Versions and hardware")
        + f"<details><summary>Configuration</summary><pre>{escape(text)}</pre></details>\n"
    )
