"""Writes an episode for viewing: as one page for a browser, or as a recording for rerun's viewer.

The page is self-contained: images as H.264, which every browser plays, numbers as lines that are
drawn without a script, and a script that makes them follow one slider.
"""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from data.columns import BOOKKEEPING
from data.dataset import Dataset, dimension_names
from data.frames import usual_columns
from data.statistics.stats import numeric_columns
from data.video.video import encode_mp4
from data.view.page import SCRIPT, STYLE
from models.files.page import data_url, listed, page, script_data
from models.files.whole_text import require_replaceable, write_whole

_MARGIN = 0.06
_ENCODING = {"crf": "22", "preset": "veryfast", "g": "10"}


def write_page(dataset: Dataset, episode: int, path: Path) -> None:
    """Writes the HTML page of an episode.

    Raises:
      DatasetError: one of its columns or images cannot be read.
      ValueError: there is no such episode.
    """
    columns, tasks = _columns(dataset, episode), _tasks(dataset, episode)
    length = int(dataset.lengths[episode])
    figures = "".join(
        f"<figure>{_video(mp4)}<figcaption>{escape(camera)}</figcaption></figure>"
        for camera, mp4 in _videos(dataset, episode).items()
    )
    data = {
        "fps": dataset.fps,
        "length": length,
        "columns": [_rounded(values) for values in columns.values()],
        "tasks": [{"first": first, "text": text} for first, text in tasks],
    }
    body = (
        f'<header><p class="eyebrow">{escape(dataset.name)}, episode {episode}</p>'
        f'<h1 id="task">{escape(tasks[0][1])}</h1>{_facts(dataset, episode)}</header>'
        f'<main><div class="seen"><div class="player"><div class="cameras">{figures}</div>'
        '<div class="controls"><button id="play">Play</button>'
        f'<input id="scrub" type="range" min="0" max="{length - 1}" value="0" aria-label="frame">'
        '<select id="rate" aria-label="speed"><option value="0.25">¼×</option>'
        '<option value="0.5">½×</option><option value="1" selected>1×</option>'
        '<option value="2">2×</option><option value="4">4×</option></select></div>'
        '<p id="now"></p></div>'
        '<p class="note">Space plays, arrow keys step, dragging over a plot scrubs, a double click '
        "fills the screen with a video.</p></div>"
        f'<div class="plots">{"".join(_plots(dataset, columns))}</div></main>{script_data(data)}'
    )
    title = f"{dataset.name}, episode {episode}"
    write_whole(path, page(title, [body], STYLE, script=SCRIPT))


def write_recording(dataset: Dataset, episode: int, path: Path) -> None:
    """Writes an episode as a rerun recording (.rrd): videos, columns and task on the timelines
    "frame" and "time".

    Raises:
      DatasetError: one of its columns or images cannot be read.
      ValueError: there is no such episode, rerun-sdk is not installed, or `path` is a device.
    """
    try:
        import rerun as rr
    except ImportError:
        raise ValueError(
            "A rerun recording needs the package rerun-sdk; install it with "
            "`pip install -e '.[view]'` in Chiliad's repository."
        ) from None
    require_replaceable(path)
    columns, tasks = _columns(dataset, episode), _tasks(dataset, episode)
    videos = _videos(dataset, episode)
    frames = np.arange(int(dataset.lengths[episode]))
    nanoseconds = np.round((frames + 0.5) / dataset.fps * 1e9).astype(np.int64)
    times = [
        rr.TimeColumn("frame", sequence=frames),
        rr.TimeColumn("time", duration=frames / dataset.fps),
    ]
    with rr.RecordingStream("chiliad", recording_id=f"{dataset.name}-{episode}") as stream:
        stream.save(path)
        stream.send_recording_name(f"{dataset.name}, episode {episode}")
        for camera, mp4 in videos.items():
            video = rr.AssetVideo(contents=mp4, media_type="video/mp4")
            at = rr.new_entity_path([camera])
            stream.log(at, video, static=True)
            stream.send_columns(at, times, rr.VideoFrameReference.columns(timestamp=nanoseconds))
        for name, values in columns.items():
            labels = dimension_names(dataset.features[name].get("names"), values.shape[1])
            at = rr.new_entity_path([name])
            stream.log(at, rr.SeriesLines(names=labels), static=True)
            stream.send_columns(at, times, rr.Scalars.columns(scalars=values))
        for first, text in tasks:
            stream.set_time("frame", sequence=first)
            stream.set_time("time", duration=first / dataset.fps)
            stream.log("task", rr.TextDocument(text))


def _columns(dataset: Dataset, episode: int) -> dict[str, Float64[np.ndarray, "t d"]]:
    """State and action, followed by the other numeric columns."""
    if not 0 <= episode < len(dataset.lengths):
        raise ValueError(
            f"{dataset.root}: there is no episode {episode}; give one of 0 to "
            f"{len(dataset.lengths) - 1}."
        )
    names = [n for n in numeric_columns(dataset) if n not in BOOKKEEPING]
    state, actions = usual_columns(names)
    names = list(dict.fromkeys([*state, *actions, *names]))
    rows = next(iter(dataset.stream(names, [episode])))
    return {name: rows[name].reshape(len(rows[name]), -1).astype(np.float64) for name in names}


def _tasks(dataset: Dataset, episode: int) -> list[tuple[int, str]]:
    """First frame and text of each run of frames with one task."""
    runs = dataset.runs
    of_episode = np.flatnonzero(runs.episode == episode)
    return [(int(runs.first[r]), dataset.prompts[runs.task[r]][0]) for r in of_episode]


def _videos(dataset: Dataset, episode: int) -> dict[str, bytes]:
    """Every camera of the episode as an mp4."""
    return {
        camera: encode_mp4(dataset.frames(episode, camera), dataset.fps, _ENCODING)
        for c, camera in enumerate(dataset.cameras)
        if dataset.present[episode, c]
    }


def _video(mp4: bytes) -> str:
    movie = data_url("video/mp4", mp4)
    return f'<video muted playsinline preload="auto" src="{movie}"></video>'


def _facts(dataset: Dataset, episode: int) -> str:
    robot = dataset.robot_type
    length = int(dataset.lengths[episode])
    facts = [
        f"<b>{length}</b> frames",
        f"<b>{length / dataset.fps:.1f}</b> s at {dataset.fps:g} fps",
        f"episode <b>{episode}</b> of {len(dataset.lengths)}",
        *([f"robot <b>{escape(robot)}</b>"] if robot else []),
    ]
    return listed("facts", facts)


def _plots(dataset: Dataset, columns: Mapping[str, np.ndarray]) -> Iterator[str]:
    for number, (name, values) in enumerate(columns.items()):
        labels = dimension_names(dataset.features[name].get("names"), values.shape[1])
        lines = "".join(
            _line(number, dim, label, values[:, dim]) for dim, label in enumerate(labels)
        )
        kind = ' class="action"' if name in usual_columns(columns)[1] else ""
        size = f"{len(labels)} dimension{'s' if len(labels) > 1 else ''}"
        yield (
            f'<section{kind}><div class="head"><h2>{escape(name)}</h2>'
            f'<span class="note">{size}</span></div>'
            f'<div class="lines">{lines}<div class="cursor"></div></div></section>'
        )


def _line(column: int, dim: int, label: str, values: Float64[np.ndarray, " t"]) -> str:
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    extent = f"{low:.3g} … {high:.3g}" if high > low else f"always {low:.3g}"
    return (
        f'<div class="dim"><div><span class="name" title="{escape(label)}">{escape(label)}</span>'
        f'<span class="range">{extent}</span></div>'
        f'<svg viewBox="0 0 {max(1, len(values) - 1)} 1" preserveAspectRatio="none">'
        f'<path d="{_path(values, low, high)}"/></svg>'
        f'<output data-column="{column}" data-dim="{dim}"></output></div>'
    )


def _path(values: Float64[np.ndarray, " t"], low: float, high: float) -> str:
    """A line from frame to frame, interrupted where values are not finite."""
    part = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    heights = 1 - _MARGIN - (1 - 2 * _MARGIN) * part
    steps = []
    pen = "M"
    for frame, height in enumerate(heights):
        if np.isfinite(height):
            steps.append(f"{pen}{frame} {height:.4f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(steps)


def _rounded(values: Float64[np.ndarray, "t d"]) -> list[list[float | None]]:
    """Values that the page shows at each frame, by dimension."""
    return [
        [float(f"{value:.4g}") if np.isfinite(value) else None for value in dim] for dim in values.T
    ]
