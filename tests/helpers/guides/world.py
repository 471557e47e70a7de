"""The folder in which commands of the guides run: small datasets, runs and checkpoints under the
names that the guides use, copied to where a command may change them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from chiliad_client import ControlLoop, EpisodeRecorder, LoopSettings
from data.lerobot.writer import DatasetWriter
from tests.helpers.client.fakes import FakeClock, FakeRobot, FakeServer
from tests.helpers.data.aloha import write_aloha
from tests.helpers.data.npz_episodes import write_episodes
from tests.helpers.data.recording import FEATURES, make_episode
from tests.helpers.data.v21 import write_v21
from tests.helpers.guides.shrink import SMALLER, STAGE, outputs, rewritten
from tests.helpers.models import groot17_case, policy_cases, rule_weights
from tests.helpers.models.groot_whole import WHOLE, lerobots_folder, nvidias_folder, write_modality
from tests.helpers.models.hub import Hub
from tests.helpers.models.released_cases import RELEASED_CASES, case_policy
from tests.helpers.tools.served import certificate

FIXTURES = RELEASED_CASES.parent
FAST = FIXTURES / "pi0_fast"
TRAIN = SMALLER["train"]
MADE = (
    f"record --suite {STAGE}:SUITE --episodes 12 --image-size 16 --subtasks --out PATH",
    f"record --suite {STAGE}:SUITE --episodes 12 --image-size 16 --subtasks --seed 1 --out OTHER",
    "data convert PATH STORE --image-size 16",
    "convert_checkpoint checkpoints/pi05_base runs/base --tokenizer paligemma_tokenizer.model",
    "convert_checkpoint runs/base checkpoints/lerobot --to lerobot",
    f"train --data PATH --preset {STAGE}:TINY --out runs/lift {TRAIN}",
    f"train --data PATH --preset {STAGE}:PI05 --init runs/base --out runs/mine {TRAIN}",
    f"train --data PATH --preset {STAGE}:GROOT --init GR00T-N1.5-3B "
    f"--tokenizer eagle2hg-processor-groot-n1p5 --embodiment 3 --out runs/groot {TRAIN}",
    f"train --data PATH --preset {STAGE}:GROOT17 --init GR00T-N1.7-3B "
    f"--tokenizer Cosmos-Reason2-2B --embodiment 4 --out runs/groot17 {TRAIN}",
    f"train --data PATH --preset {STAGE}:SMOLVLA --init smolvla_base "
    f"--tokenizer SmolVLM2-500M-Video-Instruct --out runs/smolvla {TRAIN}",
    "convert_checkpoint checkpoints/dp runs/dp",
    f"train --data PATH --preset sight.py:SIGHT --out runs/sight {TRAIN}",
    f"train --data mixture.json --preset {STAGE}:TABLETOP --out runs/all {TRAIN}",
    f"train --data datasets/cups --preset {STAGE}:PI05 --init runs/base --out runs/cups {TRAIN}",
    "record --suite line.py:LINE --episodes 6 --image-size 16 --out datasets/line",
    f"train --data datasets/line --preset {STAGE}:TINY --out runs/line {TRAIN}",
    f"evaluate --checkpoint runs/lift --suite {STAGE}:SUITE --episodes 1 --out "
    "runs/lift/evaluation",
    f"rl --checkpoint runs/lift --preset tabletop-grpo --out runs/grpo {SMALLER['rl']}",
)
"""Commands that make the world out of what is written by hand."""
HUB = {
    "models/lerobot/pi05_base": "checkpoints/lerobot",
    "models/nvidia/GR00T-N1.5-3B": "GR00T-N1.5-3B",
    "datasets/me/cups": "datasets/cups",
    "datasets/ORG/NAME": "PATH",
}
"""Repositories of the hub, and what of the world is in them."""
_KINDS = (
    (r"datasets/(?!cups|line\b)[\w-]+|recordings/monday|data/arm-lift", "PATH"),
    (r"OLD", "PATH"),
    (r"stores/\w+", "STORE"),
    (r"runs/(lift-rl|lift-population|grpo|ppo|groot-grpo|mine-rl|door)[\w-]*", "runs/grpo"),
    (r"runs/(libero|sft|NAME)", "runs/mine"),
    (r"runs/(?!base|mine|groot|smolvla|dp\b|sight|all|cups|line\b|grpo)[\w-]+", "runs/lift"),
)
"""Names in guides, and what of the world they are."""


def build(folder: Path, pages: dict[str, str], run: Callable[[str], None], hub: Hub) -> None:
    """Makes the world in `folder`, the current one, a hub and an empty S3 bucket; `pages` are the
    guides' own files by name."""
    for name, text in pages.items():
        text = re.sub(r"from tools\.recipes\.presets import (PI05|TINY)", _import, text)
        (folder / name).write_text(text)
    tokenizer = RELEASED_CASES / "tokenizer.model"
    for name in ("paligemma_tokenizer.model", "FILE.model"):
        shutil.copy(tokenizer, folder / name)
    shutil.copy(FAST / "tokenizer.model", folder / "pi0_fast_tokenizer.model")
    shutil.copytree(FAST / "fast", folder / "fast")
    shutil.copytree(WHOLE / "eagle", folder / "eagle2hg-processor-groot-n1p5")
    lerobots_folder(folder / "GR00T-N1.5-3B")
    groot17_case.folder("checkpoint", folder).rename(folder / "GR00T-N1.7-3B")
    shutil.copytree(groot17_case.BACKBONE, folder / "Cosmos-Reason2-2B")
    smolvla = rule_weights.whole(FIXTURES / "smolvla/two_cameras", folder / "smolvla_base")
    (words,) = (smolvla / "HuggingFaceTB").iterdir()
    words.rename(folder / "SmolVLM2-500M-Video-Instruct")
    policy_cases.case_policy("diffusion_ddpm", folder / "checkpoints/dp")
    checkpoints = folder / "checkpoints"
    for name in ("pi05_base", "pi05_libero", "pi05_droid"):
        case_policy(RELEASED_CASES / "openpi" / name, checkpoints)
    assets = checkpoints / "pi05_base/assets"  # of several robots, as openpi's has
    shutil.copytree(assets / "robot", assets / "trossen")
    for name in ("pi0_fast_base", "pi0_fast_libero"):
        case_policy(FAST / "openpi" / name, checkpoints)
    shutil.copytree(checkpoints / "pi05_droid", folder / "mine/30000", symlinks=True)
    nvidias_folder(checkpoints / "cups")
    write_episodes(folder / "episodes", 8)
    write_v21(folder / "v21", [make_episode(0, 5)], FEATURES, 20)
    shutil.copytree(FIXTURES / "rlds/tfrecord", folder / "droid")
    _record_cups(folder / "datasets/cups")
    _record_seen(folder / "seen/monday")
    write_aloha(folder / "recordings/cube")
    sets = [{"path": name, "embodiment": arm} for name, arm in (("PATH", "arm"), ("OTHER", "tab"))]
    (folder / "mixture.json").write_text(json.dumps({"datasets": sets}))
    (folder / "one.json").write_text(json.dumps({"datasets": [{"path": "PATH"}]}))
    (folder / "flagged.txt").write_text("1\n")
    (folder / "token").write_text("secret\n")
    certificate(folder)
    (folder / "certificate.pem").rename(folder / "chain.pem")
    for command in MADE:
        run(f"python -m tools.{command}")
    for name in ("runs/mine", "PATH"):
        fsspec.filesystem("s3").put(name, f"bucket/{name}", recursive=True)
    for name, source in HUB.items():
        hub.add(name, {str(f.relative_to(source)): f.read_bytes() for f in _files(Path(source))})


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _import(found: re.Match[str]) -> str:
    return f"from tests.helpers.guides.stage import {found[1]}"


def kind(command: str) -> str:
    """The command with the names of one kind made one, and its outputs left out: commands of which
    this is the same do the same."""
    whole = ((rf"(?<![\w/-])({pattern})(?![\w-])", name) for pattern, name in _KINDS)
    return re.sub(r"--out \S+", "--out", rewritten(command, whole))


def copy(world: Path, command: str, folder: Path) -> None:
    """Copies to a folder what a command names of the world."""
    made = outputs(command)
    for file in world.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    named = re.findall(r"(?<![\w/])\w[\w.-]*(?:/\w[\w.-]*)?", command)
    named += ["PATH", "OTHER"] if ".json" in command else []
    named += ["runs/lift"] if "ws://" in command else []
    for name in {*named} - {*made}:
        if (source := world / kind(name)).is_dir():
            shutil.copytree(source, folder / name)
    for name in made:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / name, ignore_errors=True)


def _record_cups(path: Path) -> None:
    """Demonstrations of GR00T's fixture's robot, with its modality.json."""
    rng = np.random.default_rng(0)
    dims = {"observation.state": 6, "action": 7}
    cameras = [f"observation.images.{name}" for name in ("front", "wrist")]
    kinds = ("height", "width", "channels")
    features: dict[str, Any] = {
        **{n: {"dtype": "float32", "shape": (d,), "names": None} for n, d in dims.items()},
        **{n: {"dtype": "video", "shape": (24, 32, 3), "names": kinds} for n in cameras},
    }
    with DatasetWriter(path, fps=10, features=features, robot_type="robot") as writer:
        for task in ("put the red mug on the plate", "open the drawer") * 3:
            numbers = {n: rng.normal(size=(12, d)).astype(np.float32) for n, d in dims.items()}
            frames = {n: rng.integers(0, 256, (12, 24, 32, 3), np.uint8) for n in cameras}
            writer.add_episode(numbers, frames, task)
    write_modality(path / "meta/modality.json")
    (path / "meta/checksums.json").unlink()


def _record_seen(folder: Path) -> None:
    """An episode as `chiliad_client` keeps it."""
    clock = FakeClock()
    server = FakeServer(clock, lambda message: np.linspace(0, 0.9, 20).reshape(10, 2), delay=0.15)
    with EpisodeRecorder(folder, queued=1000) as recorder:
        loop = LoopSettings(10)
        ControlLoop(Seeing(clock), server, "push", loop, recorder=recorder, clock=clock).run(2)


class Seeing(FakeRobot):
    """Has a camera."""

    def observe(self):
        return {**super().observe(), "observation/front": np.zeros((16, 24, 3), np.uint8)}
