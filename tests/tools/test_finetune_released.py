"""Fine-tuning openpi's checkpoints as docs/checkpoints.md shows it: the committed fixtures, through
the command's own options, until the result acts and serves."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from data.lerobot.writer import DatasetWriter
from models import Policy, load_policy
from models.checkpoints.statistics_file import read_scale
from models.families.pi.released import CAMERAS
from models.files.terminal import Console
from tests.helpers.models.openpi_numbers import FIXTURES
from tests.helpers.tools.served import client, serving
from tests.helpers.tools.small_run import losses, one_device
from tools import train
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
STATISTICS = FIXTURES / "pi0" / "assets" / "robot" / "norm_stats.json"
PROMPTS = ("push", "pull the thing")
STATE, ACTION = 7, 6
ADAPTERS_ALONE = ("--optimizer.rate-factors", "lora_[ab]$", "4", ".", "0")
IN_FOUR_BITS = (
    *("--model.compute.quantized", "^(language|expert)/layers/(attention|mlp)/"),
    *("--model.compute.quantized-kind", "nf4", "--optimizer.frozen-dtype", "bfloat16"),
)
ONE, EIGHT = ("--mesh.data", "1"), ("--mesh.data", "4", "--mesh.fsdp", "2")


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Motion within the range of openpi's statistics, of which dim 5 never changes."""
    path, rng = tmp_path_factory.mktemp("data") / "robot", np.random.default_rng(0)
    sizes = {"observation.state": STATE, "action": ACTION}
    features = {
        name: {"dtype": "float32", "shape": (d,), "names": [f"joint{i}" for i in range(d)]}
        for name, d in sizes.items()
    } | {
        f"observation.images.{camera}": {
            "dtype": "video",
            "shape": (16, 16, 3),
            "names": ["height", "width", "channels"],
        }
        for camera in CAMERAS
    }
    scale = read_scale(STATISTICS, "state", "z-score")
    with DatasetWriter(path, fps=10, features=features, robot_type="robot") as writer:
        for i in range(6):
            phase = rng.uniform(0, 6, STATE) + np.arange(12)[:, None] / 3
            state = scale.inverse(1.5 * np.sin(phase))
            state[:, 5] = 5
            writer.add_episode(
                {"observation.state": state, "action": state[:, :ACTION]},
                {
                    f"observation.images.{camera}": rng.integers(0, 256, (12, 16, 16, 3), np.uint8)
                    for camera in CAMERAS
                },
                PROMPTS[i % 2],
            )
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A SentencePiece file of few words, as PaliGemma's of many."""
    file, words = tmp_path_factory.mktemp("words") / "words.model", io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PROMPTS, "Task: , State: 0 1 2 3 4 5 6 7 8 9;\nAction: "] * 9),
        model_writer=words,
        vocab_size=64,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    file.write_bytes(words.getvalue())
    return file


def sizes(name: str) -> dict[str, object]:
    """Options that shrink a preset's model to a fixture's sizes."""
    told = json.loads((FIXTURES / name / "config.json").read_text())
    widths = {"width": "width", "depth": "depth", "hidden": "mlp_dim", "heads": "num_heads"}
    own = {"vision": {"patch": "patch"}, "language": {"kv-heads": "num_kv_heads"}}
    own["language"]["head-dim"] = "head_dim"
    own["expert"] = own["language"]
    found = {
        f"model.{part}.{ours}": told[part][theirs]
        for part in ("vision", "language", "expert")
        for ours, theirs in (widths | own[part]).items()
    }
    found |= {f"model.{part}.remat": "none" for part in ("vision", "language", "expert")}
    return found | {
        "model.image-size": told["image_size"],
        "model.vocabulary": told["vocabulary"],
        "model.state-dim": told["action_dim"],
        "model.action-dim": told["action_dim"],
        "model.horizon": told["horizon"],
        "model.euler_steps": 2,
        "model.compute.dtype": "float32",
    }


def adapters(ranks: tuple[int, int, int, int]) -> list[str]:
    """Options of LoRA everywhere, as docs/checkpoints.md spells them."""
    found = []
    places = ("language.attention", "language.mlp", "expert.attention", "expert.mlp")
    for place, rank in zip(places, ranks, strict=True):
        found += [f"model.{place}-lora:lora", f"--model.{place}-lora.rank", str(rank)]
        found += [f"--model.{place}-lora.alpha", str(rank)]
    return found


def assert_z_scores_of_the_checkpoint(policy: Policy) -> None:
    (robot,) = policy.processor.embodiments
    for feature, scale in (("state", robot.state), ("actions", robot.actions)):
        stats = json.loads(STATISTICS.read_text())["norm_stats"][feature]
        assert scale.offset == tuple(stats["mean"])
        np.testing.assert_allclose(scale.scale, np.array(stats["std"]) + 1e-6, rtol=1e-12)


def finetune(
    name: str, dataset: Path, tokenizer: Path, out: Path, *options: str, steps: int = 20
) -> Policy:
    """The policy that a fixture becomes."""
    shrunk = sizes(name) | {
        "trainer.train_steps": steps,
        "trainer.save-every": steps,
        "trainer.eval-every": 0,
        "trainer.log-every": 1,
        "rows.number": 8,
        "rows.samples": 2,
        "data.holdout": 0,
        "optimizer.learning-rate": 3e-3,
        "optimizer.warmup-steps": 2,
        "optimizer.ema-decay": 0,
        "augment.crop": 1,
        "augment.rotation": 0,
    }
    arguments = ["--preset", name.partition("_")[0], "--data", str(dataset), "--out", str(out)]
    arguments += ["--init", str(FIXTURES / name), "--tokenizer", str(tokenizer)]
    arguments += [part for key, value in shrunk.items() for part in (f"--{key}", str(value))]
    paths, config, _ = train.parse([*arguments, *options])
    assert train.run(paths, config, QUIET).finished
    return load_policy(out)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("pi05", ONE, id="pi05, whole, 1 device"),
        pytest.param(
            "pi0",
            (*EIGHT, "--statistics", str(FIXTURES / "pi0")),
            id="pi0, whole, 8 devices, its own statistics",
        ),
        pytest.param(
            "pi05",
            (*EIGHT, *ADAPTERS_ALONE, *adapters((4, 4, 4, 4))),
            id="pi05, fresh adapters alone, 8 devices",
        ),
        pytest.param(
            "pi0_lora",
            (*ONE, *ADAPTERS_ALONE, *adapters((3, 5, 2, 7))),
            id="pi0, its adapters alone, 1 device",
        ),
        pytest.param(
            "pi05",
            (*EIGHT, *IN_FOUR_BITS, *ADAPTERS_ALONE, *adapters((4, 4, 4, 4))),
            id="pi05, adapters on NF4, 8 devices",
        ),
        pytest.param("pi0", (*ONE, "--model.compute.fp8", "current"), id="pi0, float8, 1 device"),
        pytest.param(
            "pi05", (*EIGHT, "--model.compute.fp8", "current"), id="pi05, float8, 8 devices"
        ),
    ],
)
def test_a_released_checkpoint_is_finetuned_acts_and_serves(
    name, options, dataset, tokenizer, tmp_path
):
    policy = finetune(name, dataset, tokenizer, tmp_path / "run", *options)
    found = losses(tmp_path / "run")
    assert len(found) == 20
    assert np.mean(found[-5:]) < 0.9 * np.mean(found[:5])
    if "--statistics" in options:
        assert_z_scores_of_the_checkpoint(policy)
    policy = dataclasses.replace(policy, sizes=(1,))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 40, 60, 3), np.uint8)
    state = np.array(policy.processor.embodiments[0].state.offset, np.float32)
    chunk = policy.act((images[None], state[None]), [PROMPTS[0]], [(1, 0)])[0]
    assert chunk.shape == (6, ACTION)
    assert np.isfinite(chunk).all()
    message = {f"observation/{c}": image for c, image in zip(CAMERAS, images, strict=True)}
    message |= {"observation/state": state, "prompt": PROMPTS[0]}
    engine = Engine(policy, Metrics(), deadline=0, capacity=4)
    with engine, serving(engine) as running, client(running.url) as robot:
        np.testing.assert_allclose(robot.infer(message)["actions"], chunk, atol=1e-6)
