"""Pictures of a batch's samples from one dataset: which frames of which cameras, past ones too, and
where they stand among the sample's pictures.

A frame that a sample reads twice, as the first of an episode stands for those before it, is read
once and fills one slot.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from data.frames import Feed
from models import Layout, Processor


class Pictures(NamedTuple):
    """Pictures of one camera: of which sample, the how-many-th of the sample's, the group of slots
    that it goes into, its row among the dataset's frames (-1: a black one), and what
    `PackedBatch.image_age` and `image_past` say of it, in numbers of the sample's pictures."""

    camera: int
    sample: Int64[np.ndarray, " k"]
    place: Int64[np.ndarray, " k"]
    group: Int64[np.ndarray, " k"]
    row: Int64[np.ndarray, " k"]
    age: Int64[np.ndarray, " k"]
    past: Int64[np.ndarray, "k t"]

    def put(
        self,
        arrays: dict[str, Any],
        row: Int64[np.ndarray, " n"],
        slots: Int64[np.ndarray, "n m"],
        layout: Layout,
    ) -> list[Shaped[np.ndarray, "_h _w 3"]]:
        """Writes everything but the pixels into a batch's arrays; returns the places of those.

        Args:
          row, slots: the row of each sample, and the image slots of its pictures.
        """
        at, slot = row[self.sample], slots[self.sample, self.place]
        arrays["image_camera"][at, slot] = self.camera
        if layout.image_history:
            past = np.take_along_axis(slots[self.sample], self.past.clip(0), axis=1)
            arrays["image_past"][at, slot] = np.where(self.past < 0, -1, past)
            arrays["image_age"][at, slot] = self.age
        every = [arrays["images"], *arrays["more_images"]]
        first = np.cumsum([0, *layout.slots])[self.group]
        places = zip(self.group.tolist(), at.tolist(), (slot - first).tolist(), strict=True)
        return [every[group][i, j] for group, i, j in places]


def pictures_of(
    feed: Feed,
    processor: Processor,
    layout: Layout,
    shown: Bool[np.ndarray, "n c"],
    present: Bool[np.ndarray, "n c"],
    rows: Int64[np.ndarray, " n"],
    frame: Int64[np.ndarray, " n"],
) -> list[Pictures]:
    """Pictures of n samples, by camera.

    Args:
      shown: cameras with a picture, black ones included; `present`: those that the data have.
      rows, frame: each sample's row among all frames, and its number in its episode.
    """
    place, count = shown.cumsum(axis=1) - 1, shown.sum(axis=1)
    cameras = processor.embodiments[feed.embodiment].cameras
    found = []
    for camera, name in enumerate(cameras):
        sample = np.flatnonzero(shown[:, camera])
        if not len(sample):
            continue
        here, seen, now = place[sample, camera], present[sample, camera], frame[sample]
        shape, ago = processor.fit(camera).shape, processor.observed.camera(name)
        past = np.full((len(sample), layout.image_history), -1)
        if processor.observed.shown:
            at, _ = processor.observed.frames(ago, now, feed.step)
            each = np.concatenate([at[:, ::-1], now[:, None]], axis=1)
            places = here[:, None] + count[sample, None] * np.arange(each.shape[1])
            row = np.where(seen[:, None], rows[sample, None] - now[:, None] + each, -1)
            zeros = np.zeros(each.size, np.int64)
            group, whose = zeros + layout.group_of(shape), np.repeat(sample, each.shape[1])
            none = np.repeat(past, each.shape[1], axis=0)
            found.append(Pictures(camera, whose, places.ravel(), group, row.ravel(), zeros, none))
            continue
        if not ago:
            zeros, row = np.zeros_like(here), np.where(seen, rows[sample], -1)
            group = zeros + layout.group_of(shape)
            found.append(Pictures(camera, sample, here, group, row, zeros, past))
            continue
        parts = [(np.arange(len(sample)), here, now)]
        at, read = processor.observed.frames(ago, now, feed.step)
        last, of = now, here
        for number in range(len(ago)):
            new = np.flatnonzero(seen & read[:, number] & (at[:, number] != last))
            of, last = of.copy(), last.copy()
            of[new], last[new] = count[sample[new]], at[new, number]
            count[sample[new]] += 1
            past[:, number] = np.where(seen & read[:, number], of, -1)
            parts.append((new, of[new], at[new, number]))
        which, places, frames = (np.concatenate(x) for x in zip(*parts, strict=True))
        age = np.repeat(np.arange(len(parts)), [len(new) for new, _, _ in parts])
        later = np.pad(past, ((0, 0), (0, len(parts))), constant_values=-1)
        older = age[:, None] + np.arange(layout.image_history)
        group = np.where(age > 0, layout.group_of(shape, past=True), layout.group_of(shape))
        found.append(
            Pictures(
                camera,
                sample[which],
                places,
                group,
                np.where(seen[which], rows[sample[which]] - now[which] + frames, -1),
                age,
                np.take_along_axis(later[which], older, axis=1),
            )
        )
    return found


def groups_of(
    pictures: Sequence[Pictures], count: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, "n m"]]:
    """Pictures of each of `count` samples, and the group of slots of each, in order."""
    sample, place, group = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(x, name) for x in pictures)])
        for name in ("sample", "place", "group")
    )
    number = np.bincount(sample, minlength=count)
    groups = np.zeros((count, number.max(initial=0)), np.int64)
    groups[sample, place] = group
    return number, groups
