"""Statistics of a robot over all its datasets, of the values that the model is given: after the
transforms, and of differences where actions are relative to the state.

They are exact, over every frame: absolute dims once per frame, relative ones at every step of every
chunk. Where a store does not hold the same statistics, the result is cached under a digest of
everything it depends on.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from data.files import cached
from data.frames import Feed
from data.mixture.blocks import read_blocks
from data.mixture.relabelled import RelabelledFrames
from data.statistics.stats import Stats, describe_blocks

_FORMAT = 2


class RobotStats(NamedTuple):
    """Statistics of states and actions, end to end if they are several columns."""

    state: Stats
    actions: Stats


def embodiment_stats(
    feeds: Sequence[Feed],
    episodes: Sequence[Int64[np.ndarray, " _e"]],
    relative: Sequence[int] = (),
    *,
    whole: bool = False,
    cache: Path | None = None,
) -> RobotStats:
    """Statistics of the frames of all feeds together, each frame counting once.

    Args:
      feeds: the datasets of one robot.
      episodes: the episodes of each feed to count.
      relative: for each action dim, the state dim that it is measured from, or -1; no dim is
        relative if empty.
      whole: a single dataset whose values are used as is may count all its episodes, as its store's
        statistics do.
      cache: folder that keeps computed statistics.

    Raises:
      ValueError: the feeds' states or actions are of different sizes, or `relative` does not fit.
      DatasetError: the file in `cache` is damaged.
    """
    feed = feeds[0]
    as_stored = feed.transform is None and not _summed(feed)
    if whole and len(feeds) == 1 and not relative and as_stored:
        kept = feed.frames.stats
        return RobotStats(*(_end_to_end([kept[n] for n in c]) for c in (feed.state, feed.actions)))
    if cache is None:
        return _computed(feeds, episodes, relative)
    file = cache / f"statistics-{_digest(feeds, episodes, relative)}.json"
    if not file.is_file():
        made = _computed(feeds, episodes, relative)
        plain = [{name: values.tolist() for name, values in part.items()} for part in made]
        cached.write_json(file, plain)
    parts = cached.read_json(file)
    return RobotStats(*({name: np.array(v) for name, v in part.items()} for part in parts))


def shown_values(
    feeds: Sequence[Feed],
    episodes: Sequence[Int64[np.ndarray, " _e"]],
    relative: Sequence[int] = (),
) -> Iterator[tuple[Float[np.ndarray, "_n s"], Float[np.ndarray, "_m a"]]]:
    """States and actions that the model is given, in the robot's units, a block at a time: one
    action per frame, or the actions of all chunks' steps if some are relative to the state."""
    moving = [d for d, origin in enumerate(relative) if origin >= 0]
    for state, chunk, valid, *_ in read_blocks(feeds, episodes, None if moving else 1):
        if moving:
            chunk = chunk.astype(np.float64)
            chunk[..., moving] -= state[:, None, [relative[d] for d in moving]]
        yield state, chunk[valid] if moving else chunk[:, 0]


def _computed(
    feeds: Sequence[Feed], episodes: Sequence[Int64[np.ndarray, " _e"]], relative: Sequence[int]
) -> RobotStats:
    _check_sizes(feeds, episodes, relative)

    def states() -> Iterator[Float[np.ndarray, "_n s"]]:
        return (block.state for block in read_blocks(feeds, episodes, steps=1))

    def actions() -> Iterator[Float[np.ndarray, "_n a"]]:
        return (block.chunk[:, 0] for block in read_blocks(feeds, episodes, steps=1))

    found = describe_blocks(actions, "action")
    moving = [d for d, origin in enumerate(relative) if origin >= 0]
    if moving:
        origin = [relative[d] for d in moving]

        def differences() -> Iterator[Float[np.ndarray, "_n m"]]:
            for state, chunk, valid, *_ in read_blocks(feeds, episodes):
                yield (chunk[..., moving] - state[:, None, origin])[valid]

        for name, values in describe_blocks(differences, "relative action").items():
            if name != "count":
                found[name][moving] = values
    return RobotStats(describe_blocks(states, "state"), found)


def _check_sizes(
    feeds: Sequence[Feed], episodes: Sequence[Int64[np.ndarray, " _e"]], relative: Sequence[int]
) -> None:
    found = {}
    for feed, chosen in zip(feeds, episodes, strict=True):
        state, chunk, *_ = next(read_blocks([feed], [chosen[:1]], steps=1))
        found[feed.frames.name] = (state.shape[1], chunk.shape[2])
    if len(set(found.values())) > 1:
        sizes = ", ".join(f"{name} has {s} and {a}" for name, (s, a) in found.items())
        raise ValueError(
            f"Datasets of one embodiment differ in their state and action dims: {sizes}; choose "
            "columns, give a transform, or name another embodiment."
        )
    states, actions = next(iter(found.values()))
    if relative and (len(relative) != actions or not all(-1 <= d < states for d in relative)):
        raise ValueError(
            f"An embodiment's relative is {list(relative)}, but its datasets ({', '.join(found)}) "
            f"have {actions} action dims; give for each a state dim below {states}, or -1."
        )


def _read_as(feed: Feed) -> str:
    """Settings that, besides its content, determine the feed's numbers."""
    return repr((feed.state, feed.actions, feed.ahead, feed.transform, _summed(feed)))


def _summed(feed: Feed) -> tuple[object, ...]:
    frames = feed.frames
    if isinstance(frames, RelabelledFrames) and frames.increments:
        parts = ("parts",) if feed.transform and frames.sums_parts(feed.ahead) else ()
        return sorted(frames.increments.items()), frames.step, *parts
    return ()


def _end_to_end(columns: Sequence[Stats]) -> Stats:
    whole = {n: np.concatenate([np.ravel(c[n]) for c in columns]) for n in columns[0]}
    return whole | {"count": columns[0]["count"]}


def _digest(
    feeds: Sequence[Feed], episodes: Sequence[Int64[np.ndarray, " _e"]], relative: Sequence[int]
) -> str:
    digest = hashlib.sha256(f"{_FORMAT}: {tuple(relative)}".encode())
    for feed, chosen in zip(feeds, episodes, strict=True):
        digest.update(f"{feed.frames.digest} {_read_as(feed)}".encode())
        digest.update(np.ascontiguousarray(chosen, np.int64).tobytes())
    return digest.hexdigest()[:16]
