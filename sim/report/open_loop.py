"""The page of an open-loop evaluation: a policy's error compared with baselines, by dimension, step
and episode, the inputs that it reacts to, and the worst episodes with their video and the parts of
the pictures that it depends on.

Like the report of an evaluation in simulation, it is one file without scripts and needs no network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64, UInt8
from PIL import Image

from models.files.page import jpeg, listed, page, section, table
from sim.open_loop import AGAIN, BLIND, HOLD, MEAN, POLICY, STILL, TOLD, OpenLoop
from sim.report import charts
from sim.report.page import STYLE, Encode, chart, repetition, video

_BASELINES = (HOLD, MEAN)
_ABOUT = {
    POLICY: "shown everything as recorded",
    HOLD: "the action before the observation, at every step",
    MEAN: "the mean of these recorded actions, at every step",
    BLIND: "all images black",
    TOLD: "given the prompt of another task of the dataset",
    STILL: "the mean state in place of the observation’s",
    AGAIN: "everything as recorded, the sampler’s noise drawn again",
}


@dataclass(frozen=True, eq=False)
class CameraLook:
    """A camera's picture of the observation at `frame`, and the scaled change of the chunk when
    each part of the picture is covered."""

    frame: int
    camera: str
    picture: UInt8[np.ndarray, "h w 3"]
    heat: Float[np.ndarray, "g g"]


@dataclass(frozen=True, eq=False)
class ShownEpisode:
    """An episode to show. `pictures` show all cameras side by side, at `fps` per second. `actions`
    are recorded; `predicted` are the chunks at frames `at`, whose step k is the action `ahead[k]`
    frames later."""

    episode: int
    prompt: str
    pictures: UInt8[np.ndarray, "n h w 3"]
    fps: float
    actions: Float[np.ndarray, "t a"]
    at: Int64[np.ndarray, " o"]
    predicted: Float[np.ndarray, "o s a"]
    valid: Bool[np.ndarray, "o s"]
    ahead: tuple[int, ...]
    looks: tuple[CameraLook, ...] = ()


@dataclass(frozen=True, eq=False)
class OpenLoopReport:
    """Plain data of the page. `choice` says in words which episodes were evaluated."""

    title: str
    data: str
    choice: str
    result: OpenLoop
    shown: Sequence[ShownEpisode]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    encode: Encode


def render_open_loop(report: OpenLoopReport) -> str:
    """The page as HTML text."""
    result = report.result
    body = [
        _header(report),
        section("What stands out", _findings(result)),
        section("Error", _errors(result)),
        section("By step of the chunk", _by_step(result)),
        section("By action dimension", _by_dim(result)),
        section("What the policy reacts to", _reactions(result)),
        section("Worst episodes", _shown(report)),
        section("All episodes", _by_episode(result)),
        section("To repeat this", repetition(report.versions, report.config)),
    ]
    return page(report.title, body, STYLE)


def overlaid(
    picture: UInt8[np.ndarray, "h w 3"], heat: Float[np.ndarray, "g g"], most: float
) -> UInt8[np.ndarray, "h w 3"]:
    """A picture that is dim where covering it changes nothing, and bright and warm where it changes
    most; `most` is the heat that is shown brightest."""
    height, width = picture.shape[:2]
    part = np.clip(heat / most, 0, 1) if most > 0 else np.zeros_like(heat)
    image = Image.fromarray((255 * part).astype(np.uint8))
    smooth = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)) / 255
    alpha = smooth[..., None]
    grey = picture.mean(-1, keepdims=True) * 0.45
    warm = np.array([255, 140, 30]) * 0.45 + picture * 0.55
    return np.clip(grey * (1 - alpha) + warm * alpha, 0, 255).astype(np.uint8)


def _header(report: OpenLoopReport) -> str:
    result = report.result
    own, hold = (result.errors[name].mean for name in (POLICY, HOLD))
    share = f"{100 * own / hold:.0f} % of the error of repeating the last action" if hold else ""
    facts = [
        f"{name} <b>{result.errors[name].mean:.3g}</b>"
        for name in (HOLD, MEAN, BLIND, TOLD)
        if name in result.errors
    ]
    return (
        f'<header>\n<p class="eyebrow">Chiliad · open loop · {escape(report.data)}</p>\n'
        f"<h1>{escape(report.title)}</h1>\n"
        f'<p class="headline"><strong>{own:.3g}</strong> mean error, in action scales'
        f"<span>{share}. {len(result.recorded.frame)} observations of "
        f"{len(result.recorded.episodes)} episodes: {escape(report.choice)}. A chunk covers "
        f"{result.horizon_seconds:.3g} s.</span></p>\n"
        f"{listed('facts', facts)}</header>\n"
    )


def _findings(result: OpenLoop) -> str:
    said = result.findings()
    if not said:
        return (
            "<p>Nothing: the policy is better than the baselines and reacts to all its inputs.</p>"
            '<p class="note">That does not prove that it acts well: errors add up in closed loop, '
            "where it sees states that no demonstration shows.</p>"
        )
    return listed("findings", [escape(sentence) for sentence in said])


def _errors(result: OpenLoop) -> str:
    bars, rows = [], []
    for name, e in result.errors.items():
        kind = {POLICY: "main", **dict.fromkeys(_BASELINES, "plain")}.get(name, "control")
        bars.append(_bar(name, kind, e.mean, e.interval))
        about = _ABOUT.get(name, "that camera’s image black")
        rows.append(
            [
                f"{escape(name)}<small>{escape(about)}</small>",
                f"{e.mean:.3g}",
                "" if e.interval is None else f"{e.interval[0]:.3g}–{e.interval[1]:.3g}",
                f"{e.by_step[0]:.3g}",
                f"{e.by_step[-1]:.3g}",
            ]
        )
    drawn = _bars(
        bars,
        "Errors",
        "Mean absolute difference from the recorded actions, as a share of the policy’s scale in "
        "each dimension; whiskers are 95 % intervals over episodes.",
    )
    heads = ["Chunks", "Error", "95 % CI", "First step", "Last step"]
    return drawn + table(heads, rows, "Error by condition")


def _by_step(result: OpenLoop) -> str:
    kinds = {POLICY: "main", HOLD: "plain", MEAN: "plain", BLIND: "control"}
    errors = {name: np.array(e.by_step, np.float64) for name, e in result.errors.items()}
    drawn = [
        charts.Course(name, kind, np.arange(float(len(errors[name]))), errors[name])
        for name, kind in kinds.items()
        if name in errors
    ]
    most = max(float(course.y.max()) for course in drawn) or 1.0
    return chart(
        charts.courses(drawn, name="Error by step", bounds=(0, most), labelled=True),
        "Error by step of the chunk, scaled; the last step is "
        f"{result.horizon_seconds:.3g} s after the first.",
    )


def _by_dim(result: OpenLoop) -> str:
    own, hold, mean = (result.errors[name] for name in (POLICY, HOLD, MEAN))
    rows = [
        [
            escape(name),
            f"{own.by_dim[d]:.3g}",
            f"{own.root[d]:.3g}",
            f"{own.bias[d]:+.2g}",
            f"{own.by_dim_scaled[d]:.3g}",
            f"{hold.by_dim_scaled[d]:.3g}",
            f"{mean.by_dim_scaled[d]:.3g}",
            _number(result.correlation[d]),
            _number(result.spread_ratio[d]),
        ]
        for d, name in enumerate(result.recorded.names)
    ]
    heads = ["Action", "Mean abs.", "Root mean sq.", "Bias", "Scaled", "Repeat", "Mean"]
    note = (
        '<p class="note">Mean absolute error, root mean square error and bias (predicted minus '
        "recorded) are in the robot’s units. Scaled is the mean absolute error as a share of the "
        "policy’s scale; next to it, the same for repeating the last action and for the mean "
        "action. Correlation and spread (standard deviation of the predicted actions, divided by "
        "that of the recorded ones) reveal wrong signs and units.</p>"
    )
    return table([*heads, "Correlation", "Spread"], rows, "Error by dimension") + note


def _reactions(result: OpenLoop) -> str:
    bars = [_bar(name, "control", value) for name, value in result.changes.items()]
    if not bars:
        return ""
    return _bars(
        bars,
        "Changes",
        "Mean change of the policy’s chunks, scaled, when one thing about each observation is "
        f"changed and the noise stays the same; its chunks spread by <b>{result.spread:.3g}</b> "
        "over these observations. If a change has no effect, the policy does not use that input.",
    )


def _shown(report: OpenLoopReport) -> str:
    parts = []
    errors = report.result.errors[POLICY].by_episode
    for shown in report.shown:
        label = f"Video of episode {shown.episode}, “{shown.prompt}”"
        seen = video(shown.pictures, shown.fps, report.encode, label)
        lines = "".join(_trace(shown, d, n) for d, n in enumerate(report.result.recorded.names))
        parts.append(
            f'<div class="beside"><figure>{seen}<figcaption><b>Episode {shown.episode}</b>, '
            f"“{escape(shown.prompt)}”<br>error {errors[shown.episode]:.3g}, "
            f"{len(shown.actions)} frames</figcaption></figure><div>{lines}</div></div>\n"
            f"{_looks(shown)}"
        )
    if parts:
        parts.append(
            '<p class="note">Grey: recorded actions over the episode; blue: each predicted chunk '
            "from the frame at which it was asked for; beside the name, the least and the greatest "
            "value drawn. Bright parts of an image change the chunk most when they "
            "are covered; all cameras of one observation share a scale.</p>"
        )
    return "".join(parts)


def _trace(shown: ShownEpisode, dim: int, name: str) -> str:
    last, ahead = len(shown.actions) - 1, np.array(shown.ahead)
    chunks = [
        ((at + ahead)[valid].tolist(), chunk[valid, dim])
        for at, chunk, valid in zip(shown.at, shown.predicted, shown.valid, strict=True)
        if at <= last and valid.any()
    ]
    recorded = shown.actions[:, dim]
    values = np.concatenate([recorded, *(chunk for _, chunk in chunks)])
    extent = f"{values.min():.3g} to {values.max():.3g}"
    drawn = charts.traces(recorded, chunks, name)
    return f'<div class="trace"><span>{escape(name)}<small>{extent}</small></span>{drawn}</div>'


def _looks(shown: ShownEpisode) -> str:
    most: dict[int, float] = {}
    for look in shown.looks:
        most[look.frame] = max(most.get(look.frame, 0.0), float(look.heat.max()))
    cards = "".join(
        f'<figure class="look"><img alt="{escape(f"Parts of {look.camera} that matter")}" '
        f'src="{jpeg(overlaid(look.picture, look.heat, most[look.frame]))}">'
        f"<figcaption>{escape(look.camera)}, frame {look.frame}<br>largest change "
        f"{look.heat.max():.2g}</figcaption></figure>"
        for look in shown.looks
    )
    return f'<div class="looks">{cards}</div>\n' if cards else ""


def _by_episode(result: OpenLoop) -> str:
    own, hold = (result.errors[name].by_episode for name in (POLICY, HOLD))
    first = {e: np.flatnonzero(result.recorded.episode == e) for e in result.worst}
    rows = [
        [
            f"{e}",
            f"“{escape(result.prompts[first[e][0]])}”",
            f"{len(first[e])}",
            f"{own[e]:.3g}",
            f"{hold[e]:.3g}",
        ]
        for e in result.worst
    ]
    heads = ["Episode", "Prompt", "Observations", "Error", "Repeat last action"]
    drawn = table(heads, rows, "Error by episode, worst first")
    return f"<details><summary>{len(rows)} episodes</summary>{drawn}</details>"


def _bar(
    name: str, kind: str, value: float, interval: tuple[float, float] | None = None
) -> charts.Bar:
    between = "" if interval is None else f"{interval[0]:.3g}–{interval[1]:.3g}"
    return charts.Bar(name, kind, value, f"{value:.3g}", interval, between)


def _bars(bars: Sequence[charts.Bar], name: str, caption: str) -> str:
    most = max(bar.value if bar.interval is None else bar.interval[1] for bar in bars)
    return chart(charts.bars(bars, name=name, most=most), caption)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
