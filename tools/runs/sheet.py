"""Films of a run's evaluations side by side in one animated image (WebP), which Markdown pages show
where they would not play a film.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from models.files.bounds import check_size
from tools.runs.films import Film

ACROSS = 6
"""Films in a row."""

_FRAME = 3
_GOOD, _BAD = (46, 160, 67), (218, 54, 51)
_STILL_SECONDS = 1.0
_WIDEST = 2**14 - 1
"""WebP's limit."""


def write_sheet(path: Path, films: Sequence[Film], edge: int, quality: int) -> None:
    """Draws films in rows, with a green frame if the episode succeeded and a red one if not. Each
    film stays on its last picture until the longest has ended.

    Args:
      path: file to write; its folder is created if needed.
      films: at least one; films that are not square are squeezed.
      edge: edge of a film, in pixels.
      quality: WebP quality, 0 to 100.

    Raises:
      ValueError: edge or quality is out of bounds, or a film cannot be decoded.
    """
    check_size("--edge", edge, _WIDEST // ACROSS, least=2 * _FRAME + 1)
    check_size("--quality", quality, 100, least=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    decoded = [decode(film.source) for film in films]
    rate = max(own for _, own in decoded)
    seconds = max(len(frames) / own for frames, own in decoded) + _STILL_SECONDS
    tiles = [
        (_framed(frames, film.good, edge), own / rate)
        for (frames, own), film in zip(decoded, films, strict=True)
    ]
    pictures = [
        Image.fromarray(_tiled([t[min(int(i * pace), len(t) - 1)] for t, pace in tiles]))
        for i in range(round(seconds * rate))
    ]
    pictures[0].save(
        path,
        format="WEBP",
        save_all=True,
        append_images=pictures[1:],
        duration=round(1000 / rate),
        loop=0,
        quality=quality,
        method=6,
    )


def decode(source: str) -> tuple[list[UInt8[np.ndarray, "h w 3"]], float]:
    """Pictures of a film in a data URL, and their number per second.

    Raises:
      ValueError: it cannot be decoded.
    """
    content = io.BytesIO(base64.b64decode(source.partition(",")[2]))
    try:
        with av.open(content, "r") as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            if not frames:
                raise ValueError("A film of the report cannot be decoded (it has no frames).")
            return frames, float(container.streams.video[0].average_rate or 10)
    except av.FFmpegError as error:
        raise ValueError(f"A film of the report cannot be decoded ({error}).") from error


def _framed(
    frames: Sequence[UInt8[np.ndarray, "h w 3"]], good: bool, edge: int
) -> list[UInt8[np.ndarray, "e e 3"]]:
    inside = edge - 2 * _FRAME
    small = [Image.fromarray(f).resize((inside, inside), Image.Resampling.LANCZOS) for f in frames]
    canvas = np.full((edge, edge, 3), _GOOD if good else _BAD, np.uint8)
    framed = []
    for picture in small:
        canvas[_FRAME:-_FRAME, _FRAME:-_FRAME] = np.asarray(picture)
        framed.append(canvas.copy())
    return framed


def _tiled(pictures: Sequence[UInt8[np.ndarray, "e e 3"]]) -> UInt8[np.ndarray, "h w 3"]:
    """Pictures in rows; places that are left over in the last one are white."""
    columns = min(ACROSS, len(pictures))
    white = np.full_like(pictures[0], 255)
    filled = [*pictures, *[white] * (-len(pictures) % columns)]
    rows = [np.concatenate(filled[i : i + columns], 1) for i in range(0, len(filled), columns)]
    return np.concatenate(rows, 0)
