"""openpi's half of the statistics benchmark: its own way to normalisation statistics, over
LeRobot's dataset.

openpi's scripts/compute_norm_stats.py reads every sample of its training loader, pictures and
action chunks included, and counts states and actions in histograms. openpi's script itself is in no
package; this one does the same with openpi's own loader, transforms and statistics: batches of 32
from two workers in order, without the last incomplete one. openpi pins a LeRobot that is on no
registry, so its loader reads with LeRobot 0.4.4 instead.

Run by the Python of an environment that has both, never imported by ours. Make one with LeRobot as
the first lines of tests/fixtures/lerobot/make.py say (and torchcodec==0.13.0, `--no-deps`), and
install in it tyro and what the first lines of tests/fixtures/openpi/make.py name, except numpy. It
reads one JSON object a line on stdin and answers each with one on stdout:

    {"run": "about"}  -> {"versions": {...}}
    {"run": "make", "root": "DIR", "kind": "av1"}  -> {"frames": n}: as tools/bench/peers/lerobot.py
    {"run": "stats", "root": "DIR", "horizon": 50}
          -> {"seconds": s, "cpu_seconds": c, "frames": n, "statistics": {"state": {"mean": [...],
          "std": [...], "q01": [...], "q99": [...]}, "actions": {...}}}

The script ends when stdin ends.
"""

# ruff: noqa: E402

import importlib.util
import json
import os
import shutil
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

spec = importlib.util.spec_from_file_location("peer", Path(__file__).with_name("lerobot.py"))
assert spec is not None
assert spec.loader is not None
peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer)  # finds FFmpeg, and sends what libraries print to stderr


class Absent(types.ModuleType):
    """A package that openpi imports and that is not used here."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


ABSENT = (
    "openpi_client",
    "transformers",
    "tqdm_loggable",
    "tqdm_loggable.auto",
    "openpi.models_pytorch",
    "openpi.policies",
    "openpi.policies.aloha_policy",
    "openpi.policies.droid_policy",
    "openpi.policies.libero_policy",
)
sys.modules |= {name: Absent(name) for name in ABSENT}

import numpy as np
from lerobot.datasets import lerobot_dataset
from openpi import transforms
from openpi.models.pi0_config import Pi0Config
from openpi.shared.normalize import RunningStats
from openpi.training import config, data_loader

for name in ABSENT:
    del sys.modules[name]

BATCH, WORKERS = 32, 2  # openpi's defaults


class RemoveStrings(transforms.DataTransformFn):
    """Drops strings: only numbers make batches."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in sample.items() if np.asarray(v).dtype.kind != "U"}


def stats(root: str, horizon: int) -> dict[str, Any]:
    """Times the statistics of a dataset's states and actions from opening it."""
    path = Path(root)
    lerobot_dataset.HF_LEROBOT_HOME = path.parent
    there = lerobot_dataset.LeRobotDatasetMetadata(path.name, root=path).camera_keys
    cpu, start = peer.cpu_seconds(), time.perf_counter()
    cameras = {camera.rpartition(".")[2]: camera for camera in there}
    wanted = {"images": cameras, "state": "observation.state", "actions": "action"}
    described = config.DataConfig(
        repo_id=path.name,
        repack_transforms=transforms.Group(inputs=[transforms.RepackTransform(wanted)]),
        action_sequence_keys=("action",),
    )
    dataset = data_loader.create_torch_dataset(described, horizon, Pi0Config())
    dataset = data_loader.TransformedDataset(
        dataset, [*described.repack_transforms.inputs, RemoveStrings()]
    )
    batches = len(dataset) // BATCH
    loader = data_loader.TorchDataLoader(
        dataset, local_batch_size=BATCH, num_workers=WORKERS, num_batches=batches
    )
    running = {key: RunningStats() for key in ("state", "actions")}
    for batch in loader:
        for key, statistics in running.items():
            statistics.update(np.asarray(batch[key]))
    found = {key: statistics.get_statistics() for key, statistics in running.items()}
    seconds, cpu = time.perf_counter() - start, peer.cpu_seconds() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "frames": batches * BATCH,
        "statistics": {
            key: {field: getattr(s, field).tolist() for field in ("mean", "std", "q01", "q99")}
            for key, s in found.items()
        },
    }


def answer(run: str, **asked: Any) -> dict[str, Any]:
    """Answers one line."""
    if run == "about":
        packages = ("rlinf-openpi", "lerobot", "jax", "torch", "torchcodec", "numpy")
        return {"versions": {package: version(package) for package in packages}}
    if run == "make":
        return {"frames": peer.make(Path(asked["root"]), asked["kind"])}
    if run == "stats":
        return stats(**asked)
    raise ValueError(f"run is {run}; expected about, make or stats.")


if __name__ == "__main__":
    try:
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=peer.answers, flush=True)
    finally:
        shutil.rmtree(os.environ["CHILIAD_PEER_LINKS"], ignore_errors=True)
