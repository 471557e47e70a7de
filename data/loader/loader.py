"""Batches for training: steps of the plan, read ahead by grain's threads and processes.

A batch depends only on the plan and its step, so any number of hosts and workers share the same
stream, which can begin at any step.
"""

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import grain
import numpy as np
from absl import flags
from jaxtyping import Bool, Float64, Int64

from data.frames import Feed, Frames, Runs, fit_of
from data.loader.batches import Batches, BatchInfo, shown_cameras
from data.loader.reading import RetryingReader
from data.packing.curriculum import Weight
from data.packing.order import PlanSource
from data.packing.plan import Plan
from data.packing.weighted_runs import weighted_runs
from models import PackedBatch, Processor
from models.inputs.packed_batch import count_code
from models.inputs.pictures import PictureFit, sizes_told

_ENDLESS = 1 << 40


class Loader:
    """Iterator over (`PackedBatch` of numpy arrays, `BatchInfo`): this host's rows of one step
    after the other.

    Host h of n gets rows h·R/n to (h+1)·R/n of every global batch, so the hosts' shares end to end
    are the batch of a single host. A batch stays unchanged for as long as you keep it; writing to
    it may change the device's copy too. Close the loader, or use it as a context manager, to end
    its workers.

    Args:
      feeds: how each of the plan's sources is read.
      start_step: the first step.
      workers: processes that prepare batches, each a different step; if 0, this process does.
      threads: threads of each such process, each at a different step; 0 prepares a batch only when
        it is requested; None: the available cores divided among the processes, at most 8 each.
      ahead: batches that each such process prepares in advance; at least one per thread.
      tries: how often reading is tried, with waits that start at `retry_seconds` and double.
      skip_unreadable: a sample that still cannot be read is left out, with weight 0, and counted;
        otherwise it ends the iteration with its `DatasetError` or `OSError`.

    Raises:
      ValueError: the feeds do not fit the plan or the processor, or the rows do not divide among
        the hosts.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        processor: Processor,
        plan: Plan,
        *,
        start_step: int = 0,
        host_index: int = 0,
        host_count: int = 1,
        workers: int = 0,
        threads: int | None = None,
        ahead: int = 4,
        tries: int = 3,
        retry_seconds: float = 1.0,
        skip_unreadable: bool = False,
    ) -> None:
        if plan.rows_per_step % host_count:
            raise ValueError(
                f"{plan.rows_per_step} rows a step do not divide among {host_count} hosts; "
                "choose a multiple of the host count."
            )
        if len(feeds) != len(plan.sources):
            raise ValueError(
                f"The plan has {len(plan.sources)} sources, but there are {len(feeds)} feeds; give "
                "one for each source."
            )
        names = [source.name for source in plan.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two sources are called '{name}'; give each its own name.")
        for feed in feeds:
            _check(feed, processor)
        share = plan.rows_per_step // host_count
        rows = (host_index * share, (host_index + 1) * share)
        reader = RetryingReader(tries, retry_seconds, skip_unreadable)
        load = Batches(tuple(feeds), processor, plan, rows, reader)
        steps = grain.MapDataset.source(range(start_step, _ENDLESS)).map(_Making(load))
        if threads is None:
            threads = min(max(len(os.sched_getaffinity(0)) // max(workers, 1), 1), 8)
        options = grain.ReadOptions(threads, prefetch_buffer_size=max(ahead, threads))
        batches = steps.to_iter_dataset(options)
        if workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        self._iterator: grain.DatasetIterator | Iterator = iter(batches)

    def __iter__(self) -> Iterator[tuple[PackedBatch, BatchInfo]]:
        return self

    def __next__(self) -> tuple[PackedBatch, BatchInfo]:
        return next(self._iterator)

    def close(self) -> None:
        """Ends read-ahead and workers; the iterator is then exhausted."""
        if isinstance(self._iterator, grain.DatasetIterator):
            self._iterator.close()
        self._iterator = iter(())

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def plan_source(
    feed: Feed,
    processor: Processor,
    *,
    episodes: Sequence[int] | None = None,
    weight: Weight = 1.0,
    weights: Float64[np.ndarray, " n"] | None = None,
    name: str | None = None,
) -> PlanSource:
    """A feed as the plan sees it: its runs of frames and what their samples cost.

    If the model reads the state as text, the text's length varies from frame to frame; a chat's
    length varies with its images. The plan counts the longest possible text.

    Args:
      episodes: episodes to draw from, so that the others are held out; all if None.
      weights: weights of all frames, by which samples are drawn; equally often if None.

    Raises:
      ValueError: a prompt is longer than the processor's `text_limit`, all weights are 0, or there
        are no frames to draw.
    """
    frames, runs = feed.frames, feed.frames.runs
    if episodes is not None:
        chosen = np.zeros(len(frames.lengths), bool)
        chosen[np.asarray(episodes, np.int64)] = True
        runs = Runs(*(column[chosen[runs.episode]] for column in runs))
    if not len(runs.length):
        raise ValueError(
            f"{frames.name}: the mixture's 'frames', 'every' and 'episodes' leave none of its "
            "frames to draw; keep more, choose another data.holdout, or leave the dataset out."
        )
    own = None
    if weights is not None:
        runs, own = weighted_runs(runs, weights, frames.starts)
        if not len(own):
            raise ValueError(
                f"{frames.name}: all frames to draw have weight 0; correct its 'weights', or leave "
                "the dataset out."
            )
    shown = shown_cameras(feed, runs.episode)
    images = _image_codes(shown, processor, feed)
    text = np.zeros((len(frames.prompts), max(map(len, frames.prompts))), np.int64)
    for task in np.unique(runs.task).tolist():
        wordings = frames.prompts[task]
        lengths = processor.longest_text(wordings, feed.embodiment, shown.shape[1])
        text[task, : len(wordings)] = lengths
    return PlanSource(
        name=name or frames.name,
        weight=weight,
        runs=runs,
        images=images,
        text=text,
        weights=own,
    )


def _image_codes(
    shown: Bool[np.ndarray, "n c"], processor: Processor, feed: Feed
) -> Int64[np.ndarray, " n"]:
    """The most images of each group of slots (`ModelConfig.layout`) that a sample needs."""
    shown = processor.seen(shown)
    sizes, names = processor.image_sizes, processor.embodiments[feed.embodiment].cameras
    past = bool(processor.observed.pictures)
    counts = np.zeros((len(shown), max(1, len(sizes)) * (1 + past)), np.int64)
    for number, name in enumerate(names if sizes else ()):
        group = sizes.index(processor.fit(number).shape)
        counts[:, group] += shown[:, number] * processor.observed.views
        if past:
            counts[:, len(sizes) + group] += shown[:, number] * len(processor.observed.camera(name))
    return count_code(counts)


@dataclass(frozen=True)
class _Making:
    """Makes batches. A worker process that receives it ends together with the process that started
    it, so that a killed run leaves no workers behind."""

    batches: Batches

    def __call__(self, step: int) -> tuple[PackedBatch, BatchInfo]:
        return self.batches(step)

    def __setstate__(self, state: dict[str, Batches]) -> None:
        vars(self).update(state)
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _check_fit(frames: Frames, camera: str, wanted: PictureFit) -> None:
    given = fit_of(frames, camera)
    if given.shape != wanted.shape:
        raise ValueError(
            f"{frames.name}: its images have {sizes_told([given.shape])} pixels, but the model "
            f"takes {sizes_told([wanted.shape])}; convert the dataset at that size."
        )
    if given.kind != wanted.kind:
        raise ValueError(
            f"{frames.name}: its images were resized as '{given.kind}', but the policy expects "
            f"'{wanted.kind}'; convert the dataset with --resize {wanted.kind}."
        )
    if replace(given, size=wanted.size) != wanted:
        raise ValueError(
            f"{frames.name}: its images were fitted as {given}, but the policy expects {wanted}; "
            "train from the dataset itself, whose images are then fitted as the policy expects."
        )


def _check(feed: Feed, processor: Processor) -> None:
    frames, robot = feed.frames, processor.embodiments[feed.embodiment]
    unknown = [name for name in feed.cameras if name is not None and name not in frames.cameras]
    absent = [name for name in (*feed.state, *feed.actions) if name not in frames.stats]
    if unknown or len(feed.cameras) != len(robot.cameras):
        raise ValueError(
            f"{frames.name}: its cameras are {list(frames.cameras)}, but the feed asks for "
            f"{list(feed.cameras)}; name one, or None, for each camera of embodiment "
            f"'{robot.name}' ({', '.join(robot.cameras)})."
        )
    for number, camera in enumerate(feed.cameras if processor.fits else ()):
        if camera is not None:
            _check_fit(frames, camera, processor.fit(number))
    if absent:
        raise ValueError(
            f"{frames.name}: it has no column {', '.join(absent)}, only "
            f"{', '.join(frames.stats)}; name others in the feed."
        )
    if len(feed.ahead) != processor.horizon:
        raise ValueError(
            f"{frames.name}: the feed's action steps lie {list(feed.ahead)} frames ahead; give "
            f"{processor.horizon} numbers."
        )
