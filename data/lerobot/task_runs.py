"""Tasks of a dataset's frames, and their wordings.

LeRobot lists an episode's instructions in its metadata, and each frame refers to one of them. A
listed instruction that no frame refers to is another wording of those that frames refer to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64

from data.dataset import Prompts, Runs, cut_into_episodes
from data.errors import DatasetError


def runs_and_prompts(
    lengths: Int64[np.ndarray, " e"],
    texts: pa.ListArray | None,
    tasks: Mapping[int, str],
    tasks_file: object,
    task_indices: Callable[[Int64[np.ndarray, " k"]], Iterator[Int64[np.ndarray, " n"]]],
) -> tuple[Runs, Prompts]:
    """The runs of frames with one task, by episode and frame, and the wordings of each task.

    An episode that lists one instruction, known to `tasks`, is one run of it. Its frames are not
    read; for a dataset of a million episodes, that would take too long at every start.

    Args:
      texts: instructions that each episode lists.
      tasks: instruction by task index.
      tasks_file: name of the file of `tasks` in messages.
      task_indices: task index of every frame of given episodes, episodes end to end, in blocks.

    Raises:
      DatasetError: a frame's task index has no text.
    """
    prompts: dict[tuple[str, ...], int] = {}
    single, code, known = _single(lengths, texts, set(tasks.values()))
    of_text = np.array([prompts.setdefault((text,), len(prompts)) for text in known], np.int64)
    alone = np.flatnonzero(single)
    pieces = [np.stack([alone, 0 * alone, lengths[alone], of_text[code[alone]]], axis=1)]
    rest = np.flatnonzero(~single)
    told_of = cut_into_episodes(lengths[rest], task_indices(rest))
    for episode, indices in zip(rest, told_of, strict=True):
        first = np.flatnonzero(np.diff(indices, prepend=indices[0] - 1))
        told = [_text(tasks, int(k), tasks_file, int(episode)) for k in indices[first]]
        listed = texts[int(episode)].as_py() if texts is not None else None
        further = [t for t in dict.fromkeys(listed or ()) if t and t not in told]
        task = [prompts.setdefault((text, *further), len(prompts)) for text in told]
        length = np.diff(first, append=len(indices))
        pieces.append(np.stack([np.full(len(first), episode), first, length, task], axis=1))
    rows = np.concatenate(pieces).astype(np.int64)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    return Runs(*np.ascontiguousarray(rows.T)), tuple(prompts)


def _single(
    lengths: Int64[np.ndarray, " e"], texts: pa.ListArray | None, known: set[str]
) -> tuple[Bool[np.ndarray, " e"], Int64[np.ndarray, " e"], list[str]]:
    """Mask of the episodes that list one known instruction, its index, and the instructions."""
    none = np.zeros(len(lengths), np.int64)
    if texts is None:
        return none.astype(bool), none, []
    counts = pc.fill_null(pc.list_value_length(texts), 0).to_numpy(zero_copy_only=False)
    coded = texts.flatten().dictionary_encode()
    every = coded.dictionary.to_pylist()
    code = none.copy()
    starts = np.cumsum(counts) - counts
    single = counts == 1
    code[single] = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)[starts[single]]
    used = [k for k in np.unique(code[single]).tolist() if k >= 0 and every[k] in known]
    single &= np.isin(code, used)
    place = {k: at for at, k in enumerate(used)}
    renumber = np.array([place.get(k, 0) for k in range(len(every))] or [0], np.int64)
    return single, renumber[np.maximum(code, 0)], [every[k] for k in used]


def _text(tasks: Mapping[int, str], index: int, file: object, episode: int) -> str:
    if index not in tasks:
        raise DatasetError(
            str(file),
            f"task_index {index}",
            f"is the task of episode {episode} but has no text (there are {_some(sorted(tasks))}); "
            "add its instruction.",
        )
    return tasks[index]


def _some(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 20 else f"{values[0]} to {values[-1]}"
