"""Which episodes are held out: some of every task, and never the double of one that is trained on.

Real datasets hold the same episode twice (five of thirty in one of LeRobot's own Meta-World
recordings); a random split would then measure memory and call it generalisation.
"""

import hashlib

import numpy as np
from jaxtyping import Int64, Shaped

from data.former_store import Store
from data.permutation import fold, shuffled

Episodes = Int64[np.ndarray, "e"]


def split_episodes(store: Store, fraction: float, seed: int = 0) -> tuple[Episodes, Episodes]:
    """Training and held-out episodes of a store, both sorted; about `fraction` of each task's
    episodes is held out, at least one where a task has several different ones.

    Raises:
      ValueError: `fraction` is not in 0..1, or no episode can be held out.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"The held-out fraction is {fraction}, expected a number between 0 and 1.")
    first_alike = alike(store.starts, store.lengths, store.states, store.actions)
    held: list[int] = []
    for task in np.unique(store.tasks):
        of_task = np.flatnonzero(store.tasks == task)
        different = np.unique(first_alike[of_task])
        count = min(max(1, round(fraction * len(different))), len(different) - 1)
        chosen = different[shuffled(len(different), fold(seed, int(task)))[:count]]
        held += of_task[np.isin(first_alike[of_task], chosen)].tolist()
    if not held:
        raise ValueError(
            f"{store.path}: no task has two different episodes, so none can be held out; "
            "record more, or train without holding any out."
        )
    held_out = np.array(sorted(held), np.int64)
    return np.setdiff1d(np.arange(len(store.lengths)), held_out), held_out


def alike(
    starts: Int64[np.ndarray, "e"],
    lengths: Int64[np.ndarray, "e"],
    *columns: Shaped[np.ndarray, "n _d"],
) -> Episodes:
    """For each episode the first one that has the same values in all `columns`."""
    seen: dict[bytes, int] = {}
    first = []
    for episode, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        values = b"".join(column[start : start + length].tobytes() for column in columns)
        first.append(seen.setdefault(hashlib.sha256(values).digest(), episode))
    return np.array(first, np.int64)
