"""What a user's own files change in a dataset: other wordings, a transform, and movements summed
over the steps of a chunk.

The wordings of an instruction and the transform of states and actions are read here, so that a
mistake in them is found at start and named.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from data.frames import Frames

Wordings = tuple[tuple[str, ...], ...]


class Retold:
    """`frames` with other wordings, and with increments that reach over a whole step.

    An increment (a movement since the last frame) becomes the movement within the next `step`
    frames: their sum, the last one in part, as far as the episode goes.

    Args:
      prompts: of each task.
      increments: dims of a column that are increments.
      step: frames, not necessarily whole.
    """

    def __init__(
        self,
        frames: Frames,
        prompts: Wordings,
        increments: Mapping[str, tuple[int, ...]],
        step: float,
    ) -> None:
        self.frames, self.prompts = frames, prompts
        self.increments, self.step = dict(increments), step

    def column(self, name: str, rows: Int64[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n d"]:
        """As the dataset has it, but for increments."""
        values = self.frames.column(name, rows)
        if name not in self.increments:
            return values
        dims = list(self.increments[name])
        episode = np.searchsorted(self.frames.starts, rows, "right") - 1
        last = (self.frames.starts + self.frames.lengths - 1)[episode]
        moved = np.zeros((*rows.shape, len(dims)))
        for later in range(int(np.ceil(self.step))):
            share = min(1.0, self.step - later) * (rows + later <= last)
            more = self.frames.column(name, np.minimum(rows + later, last)) if later else values
            moved += share[..., None] * more[..., dims]
        values = values.copy()
        values[..., dims] = moved
        return values

    def __getattr__(self, name: str) -> Any:
        if name == "frames":
            raise AttributeError(name)
        return getattr(self.frames, name)


@dataclass(frozen=True)
class Transform:
    """A user's function of (state [n, s], actions [n, h, a]) that returns two such arrays, by its
    file's name, so that worker processes find it too. `content` is the file's SHA-256: nothing else
    runs, whatever becomes of the file."""

    file: str = field(repr=False)
    function: str
    content: str

    @classmethod
    def find(cls, where: str) -> "Transform":
        """From `path/to/file.py:function`, of which nothing runs yet.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: that is no file and function.
        """
        file, _, function = where.rpartition(":")
        if not file or not function:
            raise ValueError(f"transform is '{where}'; give path/to/file.py:function.")
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file, needed for transform '{where}'.")
        return cls(file, function, hashlib.sha256(Path(file).read_bytes()).hexdigest())

    @classmethod
    def read(cls, where: str, content: str = "") -> "Transform":
        """From `path/to/file.py:function`, whose file runs.

        Args:
          content: SHA-256 that the file must have; any if empty.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it has no such function, or another content.
        """
        found = cls.find(where)
        found = replace(found, content=content or found.content)
        if not callable(_loaded(found.file, found.content).get(found.function)):
            raise ValueError(
                f"{found.file} has no function '{found.function}', needed as a transform."
            )
        return found

    def __call__(
        self, state: Float32[np.ndarray, "n s"], actions: Float32[np.ndarray, "n h a"]
    ) -> tuple[Float32[np.ndarray, "n s2"], Float32[np.ndarray, "n h a2"]]:
        """What the function makes of a batch.

        Raises:
          ValueError: that is not two arrays for the same samples and steps.
        """
        function: Callable[..., Any] = _loaded(self.file, self.content)[self.function]
        made = tuple(np.asarray(x, np.float32) for x in function(state, actions))
        kept = [x.shape[:-1] for x in made]
        if kept != [state.shape[:-1], actions.shape[:-1]]:
            raise ValueError(
                f"{self.file}: {self.function} made arrays of shape {[x.shape for x in made]} of a "
                f"state {state.shape} and actions {actions.shape}; only the last axis may change."
            )
        return made[0], made[1]


@lru_cache
def _loaded(file: str, content: str) -> dict[str, Any]:
    source = Path(file).read_bytes()
    if hashlib.sha256(source).hexdigest() != content:
        raise ValueError(
            f"{file} has changed: its SHA-256 was {content} when the run began; give it that "
            "content again, or start another run."
        )
    module = ModuleType(f"transform_{content}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    exec(compile(source, file, "exec"), module.__dict__)
    return module.__dict__


def read_wordings(file: str, empty: str, prompts: Wordings) -> Wordings:
    """A dataset's wordings with the paraphrases of a JSON file, {instruction: [paraphrase, …]}.

    Args:
      file: none, if empty.
      empty: stands for instructions without text.
      prompts: the dataset's own wordings of each task.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds something else, or none of the dataset's instructions.
    """
    known = tuple(tuple(w or empty for w in wordings) for wordings in prompts)
    if not file:
        return known
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{file}: no such file of paraphrases; mend 'prompts'.")
    try:
        more = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is no JSON ({error}); mend it.") from None
    if not (isinstance(more, dict) and all(_are_texts(texts) for texts in more.values())):
        raise ValueError(f"{file}: expected a table with a list of texts for each instruction.")
    told = {wording for wordings in known for wording in wordings}
    if not told & set(more):
        raise ValueError(
            f"{file}: knows none of the dataset's instructions ({sorted(told)[:3]}, …) but "
            f"{sorted(more)[:3]}, …; its keys must be the instructions, letter for letter."
        )
    return tuple(
        tuple(dict.fromkeys([*wordings, *(t for w in wordings for t in more.get(w, ()))]))
        for wordings in known
    )


def _are_texts(texts: Any) -> bool:
    return isinstance(texts, list) and all(isinstance(t, str) and t.strip() for t in texts)
