"""Time and memory until the first batch of a run on a million episodes.

The metadata is synthetic: episodes of 8 to 40 frames, 50,000 different instructions, two cameras
whose pictures are all black and lie in one shard under many names. The code that makes any store
makes a frame store of it. Then a fresh process does everything that a run of the preset `pi05` does
before its first step, except for the model. Another process opens the same metadata as LeRobot
v3.0.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool
from rich.table import Table

from tools.bench.process import ending

if TYPE_CHECKING:  # the measured processes import no models
    from models.files.terminal import Console

_SECONDS, _GIGABYTES = 10.0, 2.0
_EPISODES, _INSTRUCTIONS, _PER_FILE, _PER_GROUP = 1_000_000, 50_000, 20_000, 1000
_CAMERAS = ("observation.images.front", "observation.images.wrist")
_DIMS = {"observation.state": 4, "action": 3}
_FPS = 30

Report = dict[str, Any]


class SyntheticDataset:
    """A dataset of which only the metadata exists; numbers are random."""

    name, root, fps, cameras = "synthetic", "synthetic", _FPS, _CAMERAS
    column_names = tuple(_DIMS)

    def __init__(self, episodes: int, instructions: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(8, 41, episodes)
        self.tasks = rng.integers(0, instructions, episodes)
        self.instructions = [_instruction(rng) + f" {number}" for number in range(instructions)]
        self.num_episodes, self.num_frames = episodes, int(self.lengths.sum())
        named = f"synthetic {episodes} {instructions}"
        self.digest = hashlib.sha256(named.encode()).hexdigest()

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Features in the form of info.json."""
        pictures = {"dtype": "video", "shape": [224, 224, 3], "names": ["height", "width", "c"]}
        numbers = {n: {"dtype": "float32", "shape": [d], "names": None} for n, d in _DIMS.items()}
        return numbers | dict.fromkeys(_CAMERAS, pictures)

    @cached_property
    def runs(self) -> Any:
        """Runs of frames; every episode is one."""
        from data.frames import Runs

        number = np.arange(self.num_episodes)
        return Runs(number, np.zeros_like(number), self.lengths, self.tasks)

    @property
    def prompts(self) -> tuple[tuple[str, ...], ...]:
        """One wording of each task."""
        return tuple((text,) for text in self.instructions)

    @property
    def present(self) -> Bool[np.ndarray, "e c"]:
        """All cameras in all episodes."""
        return np.ones((self.num_episodes, len(_CAMERAS)), bool)

    def stream(self, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """Columns in blocks."""
        rng, left = np.random.default_rng(1), self.num_frames
        while left:
            rows = min(left, 1 << 20)
            yield {n: rng.normal(size=(rows, _DIMS[n])).astype(np.float32) for n in names}
            left -= rows


def make_store(dataset: SyntheticDataset, path: Path, image_size: int) -> None:
    """A raw frame store whose shards are one file of black pictures."""
    from data.files.folder import LocalFolder
    from data.files.job import running
    from data.store import convert

    def run(making: Any, parts: Sequence[convert.WorkUnit], done: Any) -> Iterator[Any]:
        for part in parts:
            if not part.stop:
                yield making(part, done)
                continue
            key, number = part.name.rsplit("-", 1)
            files = [convert.shard_file(key, int(number), c, "raw") for c in _CAMERAS]
            for name in files:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(black, path / name)
            (path / "parts").mkdir(exist_ok=True)
            manifest = {name: [black.stat().st_size, "0" * 64] for name in files}
            (path / part.manifest).write_text(json.dumps(manifest))
            yield None

    settings = convert.Settings(image_size, "raw")
    black = path.with_name("black.rgb")
    _write_black(black, min(settings.shard_frames, dataset.num_frames), image_size)
    with running(run):  # type: ignore[arg-type]
        convert.convert(dataset, LocalFolder(path), settings)  # type: ignore[arg-type]
    black.unlink()


def make_metadata(dataset: SyntheticDataset, path: Path) -> None:
    """meta/ of LeRobot v3.0, many episodes a file, and one small data file."""
    ends = np.cumsum(dataset.lengths)
    (path / "meta").mkdir(parents=True)
    info = {
        "codebase_version": "v3.0",
        "robot_type": "synthetic",
        "fps": _FPS,
        "total_episodes": dataset.num_episodes,
        "total_frames": dataset.num_frames,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": dataset.features,
    }
    (path / "meta/info.json").write_text(json.dumps(info))
    texts = pa.array(dataset.instructions)
    index = pa.array(range(len(texts)))
    pq.write_table(pa.table({"task_index": index, "task": texts}), path / "meta/tasks.parquet")
    for file, first in enumerate(range(0, dataset.num_episodes, _PER_FILE)):
        last = min(first + _PER_FILE, dataset.num_episodes)
        count, task = last - first, dataset.tasks[first:last]
        place = {
            f"videos/{camera}/{field}": np.full(count, value)
            for camera in _CAMERAS
            for field, value in (("chunk_index", 0), ("file_index", file), ("from_timestamp", 0.5))
        }
        table = {
            "episode_index": np.arange(first, last),
            "tasks": pa.ListArray.from_arrays(np.arange(count + 1), texts.take(task)),
            "length": dataset.lengths[first:last],
            "data/chunk_index": np.zeros(count, np.int64),
            "data/file_index": np.full(count, file),
            "dataset_from_index": (ends - dataset.lengths)[first:last],
            "dataset_to_index": ends[first:last],
            **place,
        }
        _write_parquet(path / f"meta/episodes/chunk-000/file-{file:03d}.parquet", table)
        none = np.zeros(0, np.int64)
        rows = {"episode_index": none, "frame_index": none, "index": none, "task_index": none}
        _write_parquet(path / f"data/chunk-000/file-{file:03d}.parquet", rows)


def begin_run(path: Path) -> Report:
    """Seconds of each part of a run's start from a store, and the memory it took."""
    clock = _Clock()
    with clock("import"):
        from data.frames import Feed
        from data.loader.loader import Loader, plan_source
        from data.mixture.split import split_episodes
        from data.packing.plan import Plan
        from data.statistics.scaling import normalizer
        from data.store.store import open_store
        from models import Embodiment
        from models.inputs.tokenizer import Tokenizer
        from tools.recipes.presets import PI05
    with clock("open the store"):
        store = open_store(path)
        _ = store.lengths, store.prompts, store.runs, store.stats
    with clock("hold episodes out"):
        training, _ = split_episodes(store, 0.01)
    with clock("list words"):
        texts = [text for task in store.prompts for text in task]
        texts += [f"Task: , State: {number};\nAction: " for number in range(256)]
        words = Tokenizer.build(texts, PI05.model.vocabulary)
    with clock("count tokens"):
        model = PI05.model
        state, action = (normalizer(store.stats[name], name) for name in _DIMS)
        robot = Embodiment("synthetic", store.cameras, state, action)
        processor = model.processor([robot], words)
        feed = Feed(store, 0, store.cameras, tuple(range(model.horizon)))
        source = plan_source(feed, processor, episodes=training.tolist())
    with clock("plan"):
        plan = Plan([source], PI05.layout([source]), PI05.rows.number)
        _ = plan.digest, plan.fill(range(20))
    with clock("first batch"):
        loader = Loader([feed], processor, plan)
        next(loader)
    report = clock.report()
    loader.close()
    return report


def open_metadata(path: Path) -> Report:
    """Seconds to open the LeRobot dataset and know of all its episodes, and the memory."""
    clock = _Clock()
    with clock("import"):
        from data import open_dataset
    with clock("open the dataset"):
        dataset = open_dataset(path)
        _ = dataset.lengths
    with clock("runs and prompts"):
        _ = dataset.runs, dataset.prompts
    with clock("cameras present"):
        _ = dataset.present
    return clock.report()


def run(console: "Console", episodes: int = _EPISODES) -> dict[str, Any]:
    """Seconds to the first batch, of the ten that it may take, and the most memory held.

    Raises:
      ValueError: one of the measured processes failed or was stopped.
    """
    from tools.bench.attempt import tell

    with TemporaryDirectory() as folder, console.status("Making the metadata"):
        dataset = SyntheticDataset(episodes, min(_INSTRUCTIONS, episodes))
        store, metadata = Path(folder) / "store", Path(folder) / "dataset"
        make_store(dataset, store, 224)
        make_metadata(dataset, metadata)
        reports = {"store": _measured(begin_run, store)}
        tell(console, {"unit": "s", "reports": reports})
        reports["LeRobot metadata"] = _measured(open_metadata, metadata)
    for name, report in reports.items():
        table = Table(name, "seconds", "CPU seconds", title=f"{report['GB']:.2f} GB")
        for part, seconds in report["parts"].items():
            table.add_row(part, *(f"{s:.2f}" for s in seconds))
        table.add_row("all", f"{report['seconds']:.2f}", f"{report['CPU seconds']:.2f}")
        console.print(table)
    begun = reports["store"]
    return {
        "ratio": _SECONDS / begun["seconds"],
        "ours": f"{begun['seconds']:.1f} s and {begun['GB']:.2f} GB to the first batch",
        "other": f"{_SECONDS:.0f} s and {_GIGABYTES:.0f} GB that it may take",
        "unit": "s",
        "episodes": episodes,
        "reports": reports,
    }


class _Clock:
    """Seconds of each part, as wall-clock time and CPU time."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        before = time.perf_counter(), time.process_time()
        yield
        after = time.perf_counter(), time.process_time()
        self.parts[part] = after[0] - before[0], after[1] - before[1]

    def report(self) -> Report:
        """Report with the totals and the most memory held."""
        wall, cpu = map(sum, zip(*self.parts.values(), strict=True))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"parts": self.parts, "seconds": wall, "CPU seconds": cpu, "GB": memory}


def _measured(what: Callable[[Path], Report], path: Path) -> Report:
    """Report of a fresh process.

    Raises:
      ValueError: it failed or was stopped.
    """
    command = [sys.executable, "-m", "tools.bench.data.start", what.__name__, str(path)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if done.returncode:
        raise ValueError(f"The process of {what.__name__} {ending(done.returncode)}.")
    return json.loads(done.stdout.splitlines()[-1])


def _write_black(path: Path, pictures: int, size: int) -> None:
    """A raw shard of black pictures, which are holes in the file: only their CRCs take room."""
    from data.store import convert

    picture = bytes(3 * size**2)
    crc, stride = (
        google_crc32c.value(picture).to_bytes(4, "little"),
        convert.raw_record((size, size)),
    )
    with path.open("wb") as file:
        for number in range(pictures):
            os.pwrite(file.fileno(), crc, (number + 1) * stride.itemsize - len(crc))


def _instruction(rng: np.random.Generator) -> str:
    verb, colour, thing, place = (
        words[rng.integers(len(words))]
        for words in (
            ("pick up", "push", "lift", "wipe", "open", "stack", "turn over", "hand me"),
            ("red", "green", "small blue", "large yellow", "shiny", "old wooden", "clear"),
            ("block", "mug", "plate of rice", "drawer", "towel", "box", "spoon", "jar lid"),
            ("", "on the table", "next to the sink", "in the left basket with both hands"),
        )
    )
    return f"{verb} the {colour} {thing} {place}".strip()


def _write_parquet(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=_PER_GROUP)


if __name__ == "__main__":
    measure = {f.__name__: f for f in (begin_run, open_metadata)}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]))))
