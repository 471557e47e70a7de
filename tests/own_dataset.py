"""Episodes as a folder of .npz files, one each, for `--data-format own_dataset.py:NPZ`."""

import hashlib
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from data.dataset import Format, Runs
from data.errors import DatasetError


class NpzDataset:
    """Each file has what `column_names` and `cameras` name, [frames, …], and a text, `task`."""

    fps, robot_type = 10.0, "pusher"
    column_names = ("observation.state", "action")
    cameras = ("observation.images.front",)

    def __init__(self, path):
        self.root, self.name = Path(path), Path(path).absolute().name
        self.files = sorted(self.root.glob("*.npz"))

    def file(self, i):
        return self.files[i]

    def read(self, i, name):
        try:
            with np.load(self.files[i]) as episode:
                return episode[name]
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            sentence = f"cannot be read ({error}); record this episode again."
            raise DatasetError(self.files[i], name, sentence) from None

    @cached_property
    def features(self):
        first = {name: self.read(0, name) for name in (*self.column_names, *self.cameras)}
        numbers = {n: {"dtype": str(first[n].dtype), "shape": first[n].shape[1:]} for n in first}
        return numbers | {c: numbers[c] | {"dtype": "image"} for c in self.cameras}

    @cached_property
    def lengths(self):
        return np.array([len(self.read(i, "action")) for i in range(len(self.files))], np.int64)

    @cached_property
    def tasks(self):
        return [str(self.read(i, "task")) for i in range(len(self.files))]

    @property
    def prompts(self):
        return tuple((text,) for text in sorted(set(self.tasks)))

    @property
    def runs(self):
        numbers = np.searchsorted(sorted(set(self.tasks)), self.tasks)
        episodes = np.arange(len(self.files))
        return Runs(episodes, np.zeros_like(episodes), self.lengths, numbers)

    @property
    def present(self):
        return np.ones((len(self.files), len(self.cameras)), bool)

    @cached_property
    def digest(self):
        sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.files]
        return hashlib.sha256("".join(sums).encode()).hexdigest()

    def stream(self, names, episodes=None):
        for i in range(len(self.files)) if episodes is None else episodes:
            yield {name: self.read(i, name) for name in names}

    def frames(self, i, camera):
        return self.read(i, camera)


NPZ = Format("npz", recognises=lambda folder: bool(folder.list("*.npz")), open=NpzDataset)
