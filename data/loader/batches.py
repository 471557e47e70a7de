"""The batch of a step: a host's rows of the plan, read by columns and laid out.

Everything except images is gathered for all samples of a feed at once; images are decoded directly
into the batch. A batch depends only on the plan and its step, so any process may make it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped

from data.dataset import subtasks_of
from data.frames import Feed, Frames
from data.loader.memory import BufferPool
from data.loader.reading import RetryingReader
from data.packing.plan import Plan
from data.packing.windows import PlannedRows
from models import PackedBatch, Processor
from models.inputs.packed_batch import lay_out, put_targets
from models.inputs.processor import Columns


class BatchInfo(NamedTuple):
    """A batch's step, and the cost of making this host's part of it.

    `samples` counts each source's samples by name, `fill` is the part of the prefix places that is
    used, and `skipped` counts samples that could not be read. `cpu_seconds` is the CPU time of the
    thread that made the batch, `decode_seconds` the part of it spent on reading images, and
    `wait_seconds` the time that reads took without using the CPU.
    """

    step: int
    samples: dict[str, int]
    fill: float
    skipped: int
    cpu_seconds: float
    decode_seconds: float
    wait_seconds: float

    def facts(self, hosts: int = 1) -> dict[str, float]:
        """Everything but the step, for a run's log, if each of `hosts` loads as many samples as
        this one."""
        return {
            "samples": sum(self.samples.values()) * hosts,
            **{f"samples/{name}": number * hosts for name, number in self.samples.items()},
            "fill": self.fill,
            "skipped": self.skipped * hosts,
            "load_cpu_seconds": self.cpu_seconds,
            "load_decode_seconds": self.decode_seconds,
            "load_decode_share": self.decode_seconds / self.cpu_seconds,
            "load_wait_seconds": self.wait_seconds,
        }


@dataclass(frozen=True)
class Batches:
    """Makes the batch of any step from rows `share[0]`..`share[1]` of the plan; may be called from
    any number of threads.

    A sample that `reader` leaves out stays in its place, with weight 0, nothing to learn from and
    zeros for the data that could not be read.
    """

    feeds: tuple[Feed, ...]
    processor: Processor
    plan: Plan
    share: tuple[int, int]
    reader: RetryingReader

    def __call__(self, step: int) -> tuple[PackedBatch, BatchInfo]:
        begin = time.thread_time()
        columns, pictures = _Watch(), _Watch()
        drawn, lay = self.plan.draws(step, *self.share), self.plan.layout
        parts = []
        for source in np.unique(drawn.source).tolist():
            with columns.running():
                parts.append(self._part(drawn, source))
        images = np.zeros(len(drawn.id), np.int64)
        text: list[Any] = [None] * len(drawn.id)
        most = max(part.columns.shown.sum(axis=1).max(initial=0) for part in parts)
        image_at = np.zeros((len(drawn.id), most), np.int64)
        for part in parts:
            images[part.draws] = part.columns.shown.sum(axis=1)
            read = zip(part.columns.text, part.columns.image_at, strict=True)
            for draw, (ids, places) in zip(part.draws.tolist(), read, strict=True):
                text[draw] = ids
                image_at[draw, : len(places)] = places
        arrays, at = lay_out(
            *(np.diff(drawn.offsets), images, text, lay),
            image_at=image_at,
            pictures=self._memory.lend(),
        )
        arrays["sample_id"][at.row, at.slot] = drawn.id.astype(np.int32)
        for part in parts:
            row, slot, made = at.row[part.draws], at.slot[part.draws], part.columns
            with pictures.running():
                self._read_images(part, arrays, row * lay.images + at.image[part.draws])
            arrays["state"][row, slot] = made.state
            arrays["actions"][row, slot] = made.actions
            arrays["action_mask"][row, slot] = made.action_mask & ~part.lost[:, None, None]
            arrays["embodiment"][row, slot] = part.feed.embodiment
            arrays["weight"][row, slot] = ~part.lost
            if lay.targets:
                targets = zip(row, slot, made.subtask, made.action_tokens, strict=True)
                for i, j, subtask, tokens in targets:
                    put_targets(arrays, (i, j), subtask, tokens)
        counts = np.bincount(drawn.source, minlength=len(self.feeds)).tolist()
        names = [source.name for source in self.plan.sources]
        info = BatchInfo(
            step,
            samples=dict(zip(names, counts, strict=True)),
            fill=float(np.mean(arrays["prefix_segment"] > 0)),
            skipped=int(sum(part.lost.sum() for part in parts)),
            cpu_seconds=time.thread_time() - begin,
            decode_seconds=pictures.cpu,
            wait_seconds=columns.wait + pictures.wait,
        )
        return PackedBatch(**arrays), info

    def _part(self, drawn: PlannedRows, source: int) -> "_Part":
        """All data of a source's draws except their images."""
        feed, draws = self.feeds[source], np.flatnonzero(drawn.source == source)
        frames, episode, frame = feed.frames, drawn.episode[draws], drawn.frame[draws]
        start, length = frames.starts[episode, None], frames.lengths[episode, None]
        steps = frame[:, None] + np.array(feed.ahead)
        rows = start[:, 0] + frame
        states, lost = self._columns(feed, feed.state, rows)
        chunks, cut = self._columns(feed, feed.actions, start + np.minimum(steps, length - 1))
        if feed.transform is not None:
            states, chunks = feed.transform(states, chunks)
        shown = shown_cameras(feed, episode)
        prompts = frames.prompts
        told = zip(drawn.task[draws].tolist(), drawn.wording[draws].tolist(), strict=True)
        lost |= cut
        columns = self.processor.columns(
            [prompts[task][wording] for task, wording in told],
            states,
            shown,
            embodiment=feed.embodiment,
            actions=chunks,
            valid=(steps < length) & ~lost[:, None],
            subtasks=self._subtasks(source, feed, rows),
        )
        columns.state[lost] = 0
        return _Part(feed, draws, rows, shown, columns, lost)

    def _columns(
        self, feed: Feed, names: tuple[str, ...], rows: Int64[np.ndarray, " n *h"]
    ) -> tuple[Float32[np.ndarray, "n *h d"], Bool[np.ndarray, " n"]]:
        """Columns end to end, and a mask of the n samples that the reader left out (zeros)."""
        ends = np.cumsum([feed.frames.stats[name]["mean"].size for name in names])
        values = np.zeros((*rows.shape, ends[-1]), np.float32)
        parts = dict(zip(names, np.split(values, ends[:-1], axis=-1), strict=True))
        return values, self.reader(partial(_read_columns, feed.frames, rows, parts), len(rows))

    def _subtasks(
        self, source: int, feed: Feed, rows: Int64[np.ndarray, " n"]
    ) -> list[str | None] | None:
        """Each sample's subtask, if the model learns to predict them."""
        told = subtasks_of(feed.frames) if self.processor.subtask_limit else None
        if told is None:
            return None
        ends = self._subtask_ends.get(source)
        if ends is None:
            ends = self._subtask_ends[source] = np.cumsum(told.runs.length)
        which = told.runs.task[np.searchsorted(ends, rows, "right")].tolist()
        return [told.texts[number] if number >= 0 else None for number in which]

    def _read_images(
        self, part: "_Part", arrays: dict[str, Any], first: Int64[np.ndarray, " n"]
    ) -> None:
        """Reads a part's images into slots of the batch; a sample's images start at slot
        `first`."""
        frames, size = part.feed.frames, self.plan.layout.image_size
        slots, shows = arrays["images"].reshape(-1, size, size, 3), arrays["image_camera"].ravel()
        shown = part.columns.shown
        for number, camera in enumerate(part.feed.cameras):
            at = first + shown[:, :number].sum(axis=1)
            shows[at[shown[:, number]]] = number
            slots[at[shown[:, number] & ~part.present[:, number]]] = 0
            seen = np.flatnonzero(part.present[:, number])
            if camera is None or not len(seen):
                continue
            at = at[seen]
            read = partial(_read_pictures, frames, camera, part.rows[seen], slots, at)
            lost = self.reader(read, len(seen))
            slots[at[lost]] = 0
            part.lost[seen] |= lost

    @cached_property
    def _subtask_ends(self) -> dict[int, Int64[np.ndarray, " _r"]]:
        return {}

    @cached_property
    def _memory(self) -> BufferPool:
        lay, size = self.plan.layout, self.plan.layout.image_size
        shape = (self.share[1] - self.share[0], lay.images, size, size, 3)
        return BufferPool(shape, self.processor.pictures.dtype)


def shown_cameras(feed: Feed, episode: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, "n c"]:
    """Mask of the embodiment's cameras that those episodes have."""
    frames = feed.frames
    shown = np.zeros((len(episode), len(feed.cameras)), bool)
    for number, camera in enumerate(feed.cameras):
        if camera is not None:
            shown[:, number] = frames.present[episode, frames.cameras.index(camera)]
    return shown


def _read_columns(
    frames: Frames,
    rows: Int64[np.ndarray, " n *h"],
    into: dict[str, Float32[np.ndarray, "n *h _d"]],
    items: Int64[np.ndarray, " m"],
) -> None:
    for name, values in into.items():
        values[items] = frames.column(name, rows[items])


def _read_pictures(
    frames: Frames,
    camera: str,
    rows: Int64[np.ndarray, " n"],
    slots: Shaped[np.ndarray, "_i s s 3"],
    at: Int64[np.ndarray, " n"],
    items: Int64[np.ndarray, " m"],
) -> None:
    frames.images(rows[items], camera, [slots[i] for i in at[items].tolist()])


class _Part(NamedTuple):
    """The draws of a batch from one source. `present`: the cameras that the data have, where
    `columns.shown` may count black pictures too."""

    feed: Feed
    draws: Int64[np.ndarray, " n"]
    rows: Int64[np.ndarray, " n"]
    present: Bool[np.ndarray, "n c"]
    columns: Columns
    lost: Bool[np.ndarray, " n"]


class _Watch:
    """CPU time and waiting time of this thread, in seconds."""

    def __init__(self) -> None:
        self.cpu = self.wait = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        cpu = time.thread_time() - cpu
        self.cpu += cpu
        self.wait += max(0.0, time.perf_counter() - wall - cpu)
