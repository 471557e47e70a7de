"""Batches for training: the plan's rows, read from the frame stores and laid out, by grain.

A batch depends on nothing but the plan and its step, so any number of hosts and workers share the
same stream and it can begin anywhere. Worker processes and read-ahead are grain's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import grain
import numpy as np
from absl import flags

from data.former_store import Store
from data.frames import Runs
from data.plan import Plan, Source
from models import Layout, PackedBatch, Processor, Sample, pack

_ENDLESS = 1 << 40
_STATE_BINS = np.linspace(-1 - 1 / 128, 1 + 1 / 128, 259)


class BatchInfo(NamedTuple):
    """Which batch of which step this is: `samples` in this host's rows, from each source, and the
    part of their prefix places that is used."""

    step: int
    samples: tuple[int, ...]
    fill: float


class Loader:
    """Iterator over (`PackedBatch` of numpy arrays, `BatchInfo`): this host's rows of one step
    after the other.

    Host h of n gets rows h·R/n to (h+1)·R/n of every global batch, so the hosts' shares end to end
    are the batch of a single host. Close it, or use it as a context manager, to end its workers.

    Args:
      stores: the frame store of each of the plan's sources.
      embodiments: which of the processor's embodiments each store shows; 0, 1, … if None.
      start_step: the step that comes first.
      workers: processes that prepare batches, each a step of its own; 0: this process does.
      threads: of each such process; 0 prepares a batch only when it is asked for.
      ahead: batches prepared in advance, of each such process.

    Raises:
      ValueError: the stores do not fit the plan or the processor, or the rows do not divide among
        the hosts.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        processor: Processor,
        plan: Plan,
        *,
        embodiments: Sequence[int] | None = None,
        start_step: int = 0,
        host_index: int = 0,
        host_count: int = 1,
        workers: int = 0,
        threads: int = 1,
        ahead: int = 4,
    ) -> None:
        if plan.rows_per_step % host_count:
            raise ValueError(
                f"{plan.rows_per_step} rows a step do not divide among {host_count} hosts; "
                "choose a multiple of the host count."
            )
        share = plan.rows_per_step // host_count
        load = _Batches(
            tuple(stores),
            tuple(embodiments if embodiments is not None else range(len(stores))),
            processor,
            plan,
            (host_index * share, (host_index + 1) * share),
        )
        load.check()
        steps = grain.MapDataset.source(range(start_step, _ENDLESS)).map(load)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
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
    store: Store,
    processor: Processor,
    *,
    name: str | None = None,
    embodiment: int = 0,
    episodes: Sequence[int] | None = None,
    weight: float = 1.0,
) -> Source:
    """What the plan needs to know of a store: the lengths and costs of the chosen episodes.

    Where the model reads the state as text, its length varies from frame to frame; the longest that
    it can be is planned for.

    Args:
      episodes: those to draw from, so that others are held out; all, if None.
    """
    chosen = np.arange(len(store.lengths)) if episodes is None else np.asarray(episodes, np.int64)
    robot = processor.embodiments[embodiment]
    dims, states = len(robot.state.offset), _STATE_BINS if processor.state_input == "text" else [0]
    first = store.prompts[0]
    longest = max(states, key=lambda x: len(processor.tokens(first, np.full(dims, x))))
    tokens = [len(processor.tokens(p, np.full(dims, longest))) for p in store.prompts]
    return Source(
        name=name or store.source,
        weight=weight,
        runs=Runs(chosen, np.zeros_like(chosen), store.lengths[chosen], store.tasks[chosen]),
        images=np.full(len(chosen), len(robot.cameras)),
        text=np.array(tokens)[:, None],
    )


@dataclass(frozen=True)
class _Batches:
    """A host's share of the batch of any step; a function, so that grain may call it anywhere."""

    stores: tuple[Store, ...]
    embodiments: tuple[int, ...]
    processor: Processor
    plan: Plan
    rows: tuple[int, int]

    def __call__(self, step: int) -> tuple[PackedBatch, BatchInfo]:
        drawn = self.plan.draws(step, *self.rows)
        samples = [self._sample(*map(int, draw)) for draw in zip(*drawn[:3], drawn.id, strict=True)]
        offsets = zip(drawn.offsets, drawn.offsets[1:], strict=False)
        batch = pack([samples[low:high] for low, high in offsets], self.layout)
        counts = np.bincount(drawn.source, minlength=len(self.stores))
        fill = float(np.count_nonzero(batch.prefix_segment) / batch.prefix_segment.size)
        return batch, BatchInfo(step, tuple(map(int, counts)), fill)

    def check(self) -> None:
        """Raises ValueError where stores, plan and processor do not go together."""
        if not len(self.stores) == len(self.embodiments) == len(self.plan.sources):
            raise ValueError(
                f"The plan has {len(self.plan.sources)} sources, but there are {len(self.stores)} "
                f"stores with {len(self.embodiments)} embodiments; give one of each per source."
            )
        for store, embodiment in zip(self.stores, self.embodiments, strict=True):
            robot = self.processor.embodiments[embodiment]
            missing = [camera for camera in robot.cameras if camera not in store.cameras]
            if missing or store.image_size != self.processor.image_size:
                raise ValueError(
                    f"{store.path}: has cameras {list(store.cameras)} at {store.image_size} pixels,"
                    f" but embodiment '{robot.name}' needs {list(robot.cameras)} at "
                    f"{self.processor.image_size}; convert the right dataset at that size."
                )

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @cached_property
    def _ahead(self) -> np.ndarray:
        return np.arange(self.processor.horizon)

    def _sample(self, source: int, episode: int, frame: int, id: int) -> Sample:
        store, embodiment = self.stores[source], self.embodiments[source]
        start, length = int(store.starts[episode]), int(store.lengths[episode])
        steps = frame + self._ahead
        return self.processor.sample(
            store.images(start + frame, self.processor.embodiments[embodiment].cameras),
            store.states[start + frame],
            store.prompt(episode),
            embodiment=embodiment,
            actions=store.actions[start + np.minimum(steps, length - 1)],
            valid=steps < length,
            id=id,
        )
