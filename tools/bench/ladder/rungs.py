"""The rungs of the ladder: from the way the recipe's authors began to ours, one change at a time.

A rung says how the same samples are loaded and laid into rows; no rung changes what is learnt from
them. Every step draws the same samples on every rung, because a window of the plan is one step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt8

from data import open_dataset
from data.frames import ACTION, STATE, Feed, Frames, fit_of
from data.loader.loader import Loader, plan_source
from data.packing.plan import Plan, PlanSource
from data.statistics.scaling import normalizer
from data.store.direct import Direct, open_direct
from data.store.store import cached_store
from data.video.video import VideoReader
from models import Embodiment, Layout, PackedBatch, Processor
from models.attention.attention import Implementation
from models.inputs.tokenizer import Tokenizer
from models.model import ModelConfig

Pictures = Literal["opened", "sought", "stored"]

_SLOTS = 3
_AHEAD_BATCHES = 2
_BUCKET = 32
_PER_ROW = 4


@dataclass(frozen=True)
class Rung:
    """Settings of a rung. `pictures`: for each of them, the file is opened and sought ("opened"),
    or they are reached by a seek table ("sought") or read from a raw frame store ("stored").
    `ahead`: two threads make the next two batches while one is trained on; otherwise a batch is
    made when the loop asks for it. `pruned`: a row has no place for a camera that the robot lacks.
    `prompts`: text has places up to the processor's limit, or up to the batch's longest prompt,
    rounded up to 32. `packed`: rows of four samples instead of one."""

    name: str
    pictures: Pictures = "opened"
    ahead: bool = False
    pruned: bool = False
    prompts: Literal["limit", "longest"] = "limit"
    attention: Implementation = "dense"
    packed: bool = False


_BEGAN = Rung("decoded per sample, all padded")
_AHEAD = replace(_BEGAN, name="batches read ahead", ahead=True)
_SOUGHT = replace(_AHEAD, name="seek tables", pictures="sought")
_STORED = replace(_SOUGHT, name="frame store", pictures="stored")
_PRUNED = replace(_STORED, name="absent camera pruned", pruned=True)
_LONGEST = replace(_PRUNED, name="batch's longest prompt", prompts="longest")
_BLOCKED = replace(_LONGEST, name="attention by blocks", attention="auto")
_PACKED = replace(_BLOCKED, name="packed rows", packed=True)

RUNGS = (_BEGAN, _AHEAD, _SOUGHT, _STORED, _PRUNED, _LONGEST, _BLOCKED, _PACKED)
"""Each rung is the previous one with one change, which its name states."""


@dataclass(frozen=True)
class OpenedEachTime(Direct):
    """`Direct` without seek tables: as a plain reader does, it opens the mp4 for each picture,
    seeks, and decodes from the keyframe on."""

    def _read_videos(
        self,
        camera: str,
        episode: Int64[np.ndarray, " n"],
        step: Int64[np.ndarray, " n"],
        out: Sequence[UInt8[np.ndarray, "h w 3"]],
    ) -> None:
        for i, k, square in zip(episode.tolist(), step.tolist(), out, strict=True):
            with self._lock:
                path, start = self.dataset.video(i, camera)
            with VideoReader(path) as reader:
                picture = reader.read(start + k / self.fps, 1, self.fps)[0]
            np.copyto(square, fit_of(self, camera)(picture))


def opened(root: Path, image_size: int, cache: Path) -> dict[Pictures, Frames]:
    """The dataset at `root` as frames of each kind that the rungs read."""
    sought = open_direct(open_dataset(root), image_size, cache / "straight", exact=True)
    return {
        "opened": OpenedEachTime(sought.dataset, image_size, sought.folder, sought.seek),
        "sought": sought,
        "stored": cached_store(open_dataset(root), image_size, "raw", cache / "stores"),
    }


@dataclass(frozen=True)
class LaidRung:
    """A rung with everything that its batches are made of."""

    rung: Rung
    feed: Feed
    processor: Processor
    plan: Plan

    @contextmanager
    def batches(self, start: int = 0) -> Iterator[Iterator[PackedBatch]]:
        """Batches from step `start` on; reading ends with the block."""
        loader = Loader(
            [self.feed],
            self.processor,
            self.plan,
            start_step=start,
            threads=_AHEAD_BATCHES if self.rung.ahead else 0,
            ahead=_AHEAD_BATCHES if self.rung.ahead else 0,
        )
        with loader:
            if self.rung.prompts == "longest" and not self.rung.packed:
                yield (trimmed(batch, self.plan.layout) for batch, _ in loader)
            else:
                yield (batch for batch, _ in loader)


def laid(rung: Rung, config: ModelConfig, frames: dict[Pictures, Frames], samples: int) -> LaidRung:
    """The rung for a model, `samples` of the dataset a step."""
    of = frames[rung.pictures]
    feed = Feed(of, 0, (*of.cameras, *[None] * (_SLOTS - len(of.cameras))), _ahead(config))
    processor = _processor(of, config)
    source = plan_source(feed, processor)
    if rung.packed:
        return LaidRung(rung, feed, processor, _packed(source, config, samples))
    images = int(source.images.max()) if rung.pruned else _SLOTS
    layout = _layout(config, images, processor.text_limit)
    return LaidRung(rung, feed, processor, Plan([source], layout, samples, window=samples))


def trimmed(batch: PackedBatch, layout: Layout) -> PackedBatch:
    """The batch without the text and prefix places that none of its rows uses, except those up to
    the next multiple of 32, so that few lengths are compiled. For models that have no place for a
    state after the text."""
    used = batch.prefix_segment > 0
    last = int(np.max(batch.prefix_source, where=used, initial=0))
    words = last + 1 - layout.images * layout.tokens_per_image
    text, prefix = (_rounded_up(n) for n in (max(words, 0), int(used.sum(axis=1).max())))
    return replace(
        batch,
        text=batch.text[:, :text],
        prefix_source=batch.prefix_source[:, :prefix],
        prefix_segment=batch.prefix_segment[:, :prefix],
        prefix_position=batch.prefix_position[:, :prefix],
    )


def _rounded_up(places: int) -> int:
    return places + -places % _BUCKET


def _packed(source: PlanSource, config: ModelConfig, samples: int) -> Plan:
    """The plan with the shortest rows, in steps of 32 places, that hold four samples each."""
    rows, images = -(-samples // _PER_ROW), int(source.images.max()) * _PER_ROW
    text = int(source.text.max())
    while True:
        layout = _layout(config, images, text, _PER_ROW)
        plan = Plan([source], layout, rows, window=samples)
        if plan.rows_per_window == rows:
            return plan
        text += _BUCKET


def _layout(config: ModelConfig, images: int, text: int, samples: int = 1) -> Layout:
    sizes = config.layout(prefix=0, samples=samples, images=images)
    prefix = sizes.prefix_length(images, text)
    return config.layout(prefix=prefix, samples=samples, images=images, text=text)


def _ahead(config: ModelConfig) -> tuple[int, ...]:
    return tuple(range(config.horizon))


def _processor(frames: Frames, config: ModelConfig) -> Processor:
    texts = [wording for task in frames.prompts for wording in task]
    cameras = (*frames.cameras, *(f"absent{n}" for n in range(len(frames.cameras), _SLOTS)))
    scales = normalizer(frames.stats[STATE], STATE), normalizer(frames.stats[ACTION], ACTION)
    robot = Embodiment(frames.name, cameras, *scales)
    return config.processor([robot], Tokenizer.build(texts, config.vocabulary))
