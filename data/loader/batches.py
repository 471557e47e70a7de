"""The batch of a step: a host's rows of the plan, read by columns and laid out.

Everything except images is gathered for all samples of a feed at once; images are decoded directly
into the batch. A batch depends only on the plan and its step, so any process may make it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped

from data.dataset import subtasks_of
from data.frames import Feed, Frames
from data.loader.memory import BufferPool
from data.loader.pictures import Pictures, groups_of, pictures_of
from data.loader.reading import RetryingReader
from data.packing.plan import Plan
from data.packing.windows import PlannedRows
from models import PackedBatch, Processor
from models.inputs.packed_batch import lay_out, put_targets
from models.inputs.processor import Columns


class BatchInfo(NamedTuple):
    """A batch's step, and the cost of making this host's part of it.

    `samples` counts each source's samples by name, `fill` is the part of the prefix places (or,
    without places, of the slots) that is used, and `skipped` counts samples that could not be read.
    `cpu_seconds` is the CPU time of the thread that made the batch, `decode_seconds` the part of it
    spent on reading images, and `wait_seconds` the time that reads took without using the CPU.
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
        text: list[Any] = [None] * len(drawn.id)
        shown = [groups_of(part.pictures, len(part.draws)) for part in parts]
        images = np.zeros(len(drawn.id), np.int64)
        most = max(groups.shape[1] for _, groups in shown)
        image_at, group = np.zeros((2, len(drawn.id), most), np.int64)
        for part, (number, groups) in zip(parts, shown, strict=True):
            images[part.draws], group[part.draws, : groups.shape[1]] = number, groups
            read = zip(part.columns.text, part.columns.image_at, strict=True)
            for draw, (ids, places) in zip(part.draws.tolist(), read, strict=True):
                text[draw] = ids
                image_at[draw, : len(places)] = places
        arrays, at = lay_out(
            *(np.diff(drawn.offsets), images, text, lay),
            image_at=image_at,
            group=group,
            pictures=[memory.lend() for memory in self._memory],
        )
        arrays["sample_id"][at.row, at.slot] = drawn.id.astype(np.int32)
        for part in parts:
            row, slot, made = at.row[part.draws], at.slot[part.draws], part.columns
            with pictures.running():
                self._read_images(part, arrays, row, at.image[part.draws])
            arrays["state"][row, slot] = made.state
            arrays["actions"][row, slot] = made.actions
            arrays["action_mask"][row, slot] = made.action_mask & ~part.lost[:, None, None]
            arrays["embodiment"][row, slot] = part.feed.embodiment
            arrays["weight"][row, slot] = ~part.lost
            if lay.state_history:
                arrays["past_state"][row, slot] = made.past_state
                arrays["past_state_mask"][row, slot] = part.past_mask & ~part.lost[:, None]
            if lay.targets:
                targets = zip(row, slot, made.subtask, made.action_tokens, strict=True)
                for i, j, subtask, tokens in targets:
                    put_targets(arrays, (i, j), subtask, tokens)
        counts = np.bincount(drawn.source, minlength=len(self.feeds)).tolist()
        names = [source.name for source in self.plan.sources]
        info = BatchInfo(
            step,
            samples=dict(zip(names, counts, strict=True)),
            fill=float(np.mean(arrays["prefix_segment" if lay.prefix else "weight"] > 0)),
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
        chunks, cut = self._columns(feed, feed.actions, start + np.clip(steps, 0, length - 1))
        shown = shown_cameras(feed, episode)
        observed, past_states = self.processor.observed, None
        at, past_mask = observed.frames(observed.state, frame, feed.step)
        if observed.state:
            past_states, gone = self._columns(feed, feed.state, start + at)
            lost |= gone
            past_mask &= ~gone[:, None]
        if feed.transform is not None:
            if past_states is not None:
                changed = [feed.transform(x, chunks)[0] for x in past_states.swapaxes(0, 1)]
                past_states = np.stack(changed, axis=1)
            states, chunks = feed.transform(states, chunks)
        prompts = frames.prompts
        told = zip(drawn.task[draws].tolist(), drawn.wording[draws].tolist(), strict=True)
        lost |= cut
        columns = self.processor.columns(
            [prompts[task][wording] for task, wording in told],
            states,
            shown,
            embodiment=feed.embodiment,
            actions=chunks,
            valid=(steps >= 0) & (steps < length) & ~lost[:, None],
            subtasks=self._subtasks(source, feed, rows),
            past_state=past_states,
        )
        columns.state[lost], columns.past_state[~past_mask] = 0, 0
        pictures = pictures_of(
            *(feed, self.processor, self.plan.layout, columns.shown, shown, rows, frame)
        )
        return _Part(feed, draws, columns, lost, past_mask, pictures)

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
        self,
        part: "_Part",
        arrays: dict[str, Any],
        row: Int64[np.ndarray, " n"],
        slots: Int64[np.ndarray, "n m"],
    ) -> None:
        """Reads a part's pictures into a batch's arrays, at each sample's `row` and `slots`."""
        frames = part.feed.frames
        for pictures in part.pictures:
            out = pictures.put(arrays, row, slots, self.plan.layout)
            for i in np.flatnonzero(pictures.row < 0).tolist():
                out[i][...] = 0
            seen = np.flatnonzero(pictures.row >= 0)
            camera = part.feed.cameras[pictures.camera]
            if camera is None or not len(seen):
                continue
            places = [out[i] for i in seen.tolist()]
            read = partial(_read_pictures, frames, camera, pictures.row[seen], places)
            lost = self.reader(read, len(seen))
            for i in np.flatnonzero(lost).tolist():
                places[i][...] = 0
            part.lost[pictures.sample[seen[lost]]] = True

    @cached_property
    def _subtask_ends(self) -> dict[int, Int64[np.ndarray, " _r"]]:
        return {}

    @cached_property
    def _memory(self) -> list[BufferPool]:
        """Memory for each group of image slots."""
        rows, dtype = self.share[1] - self.share[0], self.processor.image_dtype.type
        groups = self.plan.layout.groups
        return [BufferPool((rows, x.number, *x.shape, 3), dtype) for x in groups]


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
    out: Sequence[Shaped[np.ndarray, "_h _w 3"]],
    items: Int64[np.ndarray, " m"],
) -> None:
    frames.images(rows[items], camera, [out[i] for i in items.tolist()])


class _Part(NamedTuple):
    """The draws of a batch from one source. `past_mask`: which of the past states are read."""

    feed: Feed
    draws: Int64[np.ndarray, " n"]
    columns: Columns
    lost: Bool[np.ndarray, " n"]
    past_mask: Bool[np.ndarray, "n p"]
    pictures: list[Pictures]


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
