r"""LeRobot's half of a benchmark: it records datasets with its own writer and reads them with its
own loader.

Run by the Python of an environment that has LeRobot 0.4.4 or 0.6.1, never imported by ours.

    0.4.4 (Python 3.11): the first lines of tests/fixtures/lerobot/make.py say how to make one;
          torchcodec==0.13.0 comes on top (`pip install --no-deps`; the last version whose wheel is
          for the CPU).
    0.6.1 (Python 3.12): pip install 'lerobot[dataset]==0.6.1' torch==2.11.0 torchvision==0.26.0 \
          torchcodec==0.11.1; torch's wheel for CUDA runs on a CPU too, but takes 6 GB.

torchcodec looks for FFmpeg's libraries, so this script restarts itself with the ones that PyAV
brings along on its path. It reads one JSON object a line on stdin and answers each with one on
stdout, so that a benchmark can alternate its own rounds with LeRobot's and a drifting machine slows
both alike.

    {"run": "about"}  -> {"versions": {...}, "backends": [...]}: the backends that can be imported
    {"run": "make", "root": "DIR", "kind": "av1"}  -> {"frames": n}: records a dataset, unless it
          is there: two cameras, state of 8, action of 7; textured, noisy pictures that move.
          Kinds: av1, h264 and png (in the parquet), 20 episodes of 100 frames of 224 x 224 at
          10 fps; av1_480, h264_480, and av1_480_3 with a third camera, 4 episodes of 100 frames of
          480 x 640 at 30 fps
    {"run": "read", "root": "DIR", "backend": "torchcodec", "workers": 0, "batch": 32, "chunk": 50,
     "warm": 2, "batches": 10, "seed": 0}
          -> {"seconds": s, "cpu_seconds": c, "samples": n, "shapes": {...}}: shuffled batches from
          torch's DataLoader, each sample with the next `chunk` actions; `warm` batches are read
          before the clocks start. Pictures are uint8 where LeRobot can give them so, as its own
          training asks for (0.6.1), otherwise float32. CPU is that of this process and of the
          workers, torch has one thread in each

The script ends when stdin ends.
"""

# ruff: noqa: E402

import inspect
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import types
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import active_children
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def start_with_ffmpeg() -> None:
    """Restarts this script, with PyAV's FFmpeg under the names that torchcodec looks for."""
    links = Path(tempfile.mkdtemp())
    for file in Path(sysconfig.get_path("purelib"), "av.libs").glob("lib*.so*"):
        name = re.fullmatch(r"(lib(?:av|sw)\w+)-\w+\.so\.(\d+).*", file.name)
        if name:
            (links / f"{name[1]}.so.{name[2]}").symlink_to(file)
    paths = [str(links), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ |= {"LD_LIBRARY_PATH": os.pathsep.join(paths), "CHILIAD_PEER_LINKS": str(links)}
    os.execv(sys.executable, [sys.executable, *sys.argv])


if "CHILIAD_PEER_LINKS" not in os.environ:
    start_with_ffmpeg()
answers, sys.stdout = sys.stdout, sys.stderr
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]  # holds this lerobot.py
os.environ |= {"HF_HUB_OFFLINE": "1", "SVT_LOG": "1", "PYTHONWARNINGS": "ignore"}
warnings.filterwarnings("ignore")
# Builds of torchvision for CUDA declare operators that a CPU torch lacks; no operator is used here.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")

import cv2
import numpy as np
import torch
from lerobot.datasets import video_utils
from lerobot.datasets.lerobot_dataset import LeRobotDataset

KINDS = {  # codec (none: PNG), episodes, height, width, fps, cameras
    "av1": ("libsvtav1", 20, 224, 224, 10, 2),
    "h264": ("h264", 20, 224, 224, 10, 2),
    "png": (None, 20, 224, 224, 10, 2),
    "av1_480": ("libsvtav1", 4, 480, 640, 30, 2),
    "av1_480_3": ("libsvtav1", 4, 480, 640, 30, 3),
    "h264_480": ("h264", 4, 480, 640, 30, 2),
}
LENGTH, STATE, ACTION = 100, 8, 7
CAMERAS = ("observation.images.front", "observation.images.wrist", "observation.images.side")
TASKS = ("lift the red block", "push the blue block to the left", "open the drawer")


def make(root: Path, kind: str) -> int:
    """Records a dataset of that kind at `root`, as a whole or not at all; returns the number of
    frames."""
    codec, episodes, height, width, fps, count = KINDS[kind]
    cameras = CAMERAS[:count]
    if root.exists():
        return episodes * LENGTH
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    picture = {
        "dtype": "video" if codec else "image",
        "shape": (height, width, 3),
        "names": ["height", "width", "channels"],
    }
    dataset = LeRobotDataset.create(
        repo_id=f"bench/{kind}",
        fps=fps,
        features={
            **{camera: dict(picture) for camera in cameras},
            "observation.state": {"dtype": "float32", "shape": (STATE,), "names": None},
            "action": {"dtype": "float32", "shape": (ACTION,), "names": None},
        },
        root=partial,
        use_videos=codec is not None,
        image_writer_threads=2,
        **encoding(codec or "libsvtav1"),
    )
    draw = np.random.default_rng(20261121)
    for episode in range(episodes):
        state, action = (walk(draw, size) for size in (STATE, ACTION))
        videos = {camera: video(draw, height, width) for camera in cameras}
        for t in range(LENGTH):
            columns = {"observation.state": state[t], "action": action[t]}
            pictures = {camera: next(frames) for camera, frames in videos.items()}
            dataset.add_frame({**columns, **pictures, "task": TASKS[episode % len(TASKS)]})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    shutil.rmtree(partial / "images", ignore_errors=True)
    partial.rename(root)
    return episodes * LENGTH


def encoding(codec: str) -> dict[str, Any]:
    """The option that names a codec; LeRobot 0.6 has all of an encoder's options in one."""
    if "vcodec" in inspect.signature(LeRobotDataset.create).parameters:
        return {"vcodec": codec}
    from lerobot.configs.video import RGBEncoderConfig

    return {"rgb_encoder": RGBEncoderConfig(vcodec=codec)}


def walk(draw: np.random.Generator, size: int) -> np.ndarray:
    """A random walk [LENGTH, size]."""
    return np.cumsum(draw.normal(scale=0.1, size=(LENGTH, size)), axis=0).astype(np.float32)


def video(draw: np.random.Generator, height: int, width: int) -> Iterator[np.ndarray]:
    """A coloured texture that the camera pans over, three moving blocks, and a sensor's noise."""
    coarse = draw.uniform(30, 220, (24, 32, 3)).astype(np.float32)
    scene = cv2.resize(coarse, (width + 2 * LENGTH, height), interpolation=cv2.INTER_CUBIC)
    start, speed = draw.uniform(0.2, 0.6, (3, 2)), draw.uniform(-0.003, 0.003, (3, 2))
    colours, side = draw.uniform(0, 255, (3, 3)), height // 6
    for t in range(LENGTH):
        frame = scene[:, t : t + width].copy()
        for (y, x), colour in zip(start + t * speed, colours, strict=True):
            top, left = int(y * height), int(x * width)
            frame[top : top + side, left : left + side] = colour
        noise = draw.standard_normal(frame.shape, np.float32)
        yield np.clip(frame + 4 * noise, 0, 255).astype(np.uint8)


def read(
    root: str,
    backend: str,
    workers: int,
    batch: int,
    chunk: int,
    warm: int,
    batches: int,
    seed: int,
) -> dict[str, Any]:
    """Times `batches` batches after `warm` of them."""
    video_utils._default_decoder_cache.clear()  # forked workers must not share its open files
    fps = json.loads((Path(root) / "meta/info.json").read_text())["fps"]
    options = inspect.signature(LeRobotDataset.__init__).parameters
    as_bytes = {"return_uint8": True} if "return_uint8" in options else {}
    dataset = LeRobotDataset(
        f"bench/{Path(root).name}",
        root=root,
        video_backend=backend,
        delta_timestamps={"action": [k / fps for k in range(chunk)]},
        **as_bytes,
    )
    order = torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        generator=order,
        persistent_workers=workers > 0,
    )
    stream = endless(loader)
    for _ in range(warm):
        next(stream)
    cpu, start = cpu_seconds(), time.perf_counter()
    for _ in range(batches):
        found = next(stream)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    shapes = {k: f"{v.dtype} {list(v.shape)}" for k, v in found.items() if hasattr(v, "shape")}
    samples = batches * batch
    return {"seconds": seconds, "cpu_seconds": cpu, "samples": samples, "shapes": shapes}


def endless(loader: torch.utils.data.DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def cpu_seconds() -> float:
    """CPU time that this process and its living children have used."""
    ticks = 0
    for child in active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def serve() -> Iterator[dict[str, Any]]:
    """Answers each line of stdin."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        run = asked.pop("run")
        if run == "about":
            packages = ("lerobot", "torch", "torchvision", "torchcodec", "av", "datasets")
            installed = [package for package in packages if find_spec(package)]
            yield {
                "versions": {package: version(package) for package in installed},
                "backends": [b for b in ("torchcodec", "pyav") if b == "pyav" or b in installed],
            }
        elif run == "make":
            yield {"frames": make(Path(asked["root"]), asked["kind"])}
        elif run == "read":
            yield read(**asked)
        else:
            raise ValueError(f"{line.strip()}: run must be about, make or read")


if __name__ == "__main__":
    try:
        for answer in serve():
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        shutil.rmtree(os.environ["CHILIAD_PEER_LINKS"], ignore_errors=True)
