"""GR00T-N1.5 fine-tuned in one command from a folder of LeRobot's form, by the preset of its
released preparation: chat, pictures and rows of embodiments, parts frozen, adapters in float8,
eight devices; then served, judged open loop and quantised."""

import dataclasses
import shutil
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from data.lerobot.writer import DatasetWriter
from data.mixture.mixed import Scales
from data.mixture.mixture import RobotConfig
from models import Policy, Scaling, load_policy
from models.files.terminal import Console
from models.load import inspect_params
from parallel.monitor.metrics import read_metrics
from tests.helpers.models.groot_whole import lerobots_folder, nvidias_folder, write_modality
from tests.helpers.tools.served import client, serving
from tests.helpers.tools.small_run import losses, one_device
from tools import quantize, serve, train
from tools.recipes import open_loop
from tools.recipes.open_loop import OpenLoopConfig
from tools.recipes.statistics import Scalings, kept_scales
from tools.serving.metrics import Metrics

pytestmark = pytest.mark.slow
QUIET = Console(quiet=True)
ROBOT_AND_FROZEN = (
    *("--embodiment", "new_embodiment"),
    *("--optimizer.rate-factors", "@llm", "0", "@visual", "0", ".", "1"),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path, rng = tmp_path_factory.mktemp("data") / "robot", np.random.default_rng(0)
    sizes = {"observation.state": 6, "action": 7}
    features = {
        name: {"dtype": "float32", "shape": (d,), "names": [f"joint{i}" for i in range(d)]}
        for name, d in sizes.items()
    } | {
        f"observation.images.{camera}": {
            "dtype": "video",
            "shape": (24, 32, 3),
            "names": ["height", "width", "channels"],
        }
        for camera in ("front", "wrist")
    }
    with DatasetWriter(path, fps=10, features=features, robot_type="robot") as writer:
        for i in range(4):
            state = np.sin(rng.uniform(0, 6, 7) + np.arange(20)[:, None] / 3).astype(np.float32)
            writer.add_episode(
                {"observation.state": state[:, :6], "action": state},
                {
                    f"observation.images.{camera}": rng.integers(0, 256, (20, 24, 32, 3), np.uint8)
                    for camera in ("front", "wrist")
                },
                ("put the_red mug on the plate", "open the drawer")[i % 2],
            )
    write_modality(path / "meta/modality.json")
    (path / "meta/checksums.json").unlink()
    return path


@pytest.fixture(scope="module")
def init(tmp_path_factory) -> Path:
    return lerobots_folder(tmp_path_factory.mktemp("groot") / "base")


def options(init: Path) -> list[str]:
    """Options that shrink the released preset's model to the folder's."""
    found = []
    config = inspect_params(init).config
    for stack in ("vision", "language", "adapter", "dit"):
        for field in dataclasses.fields(getattr(config, stack)):
            value = getattr(getattr(config, stack), field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                found += [f"--model.{stack}.{field.name.replace('_', '-')}", str(value)]
        found += [f"--model.{stack}.remat", "none"]
    names = ("image_size", "vocabulary", "image_token", "embodiments", "state_dim", "action_dim")
    for name in (*names, "horizon", "future_tokens", "positions", "hidden"):
        found += [f"--model.{name.replace('_', '-')}", str(getattr(config, name))]
    return [*found, "--model.compute.dtype", "float32"]


def command(dataset: Path, init: Path, out: Path, *more: str, devices: bool = False) -> None:
    """A run of two steps, on one device or on those that the options ask for."""
    paths, config, _ = train.parse(
        [
            *("--data", str(dataset), "--preset", "groot", "--init", str(init), "--out", str(out)),
            *(
                "--trainer.train-steps",
                "2",
                "--trainer.save-every",
                "2",
                "--trainer.eval-every",
                "0",
            ),
            *("--trainer.log-every", "1", "--rows.number", "8", "--rows.samples", "2"),
            *("--optimizer.warmup-steps", "1", "--mesh.data", "1", "--data.encoding", "raw"),
            *options(init),
            *more,
        ]
    )
    with nullcontext() if devices else one_device():
        assert train.run(paths, config, QUIET).finished


def shown(policy: Policy) -> np.ndarray:
    """Its actions for one observation."""
    pictures = np.random.default_rng(0).integers(0, 256, (1, 2, 24, 32, 3), np.uint8)
    return policy.act((pictures, np.zeros((1, 6))), ["open the drawer"], keys=[(0, 0)])


@pytest.fixture(scope="module")
def tuned(dataset, init, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "tuned"
    command(dataset, init, out, *ROBOT_AND_FROZEN)
    return out


def test_a_step_at_the_released_preparation_trains_the_robots_row_and_leaves_what_is_frozen(
    init, tuned
):
    rows = [row for row in read_metrics(tuned) if "loss" in row]
    assert len(rows) == 2
    assert all(np.isfinite(row["loss"]) for row in rows)
    before, after = load_policy(init), load_policy(tuned)
    assert after.model.config.projectors == (31,)
    moved = jax.tree.map(lambda a, b: np.abs(np.subtract(a, b)), before.params, after.params)
    for part in ("vision", "language", "embedding"):
        assert max(x.max() for x in jax.tree.leaves(moved[part])) == 0
    kernel = moved["action_encoder"]["action"]["kernel"].max(axis=(1, 2))
    assert kernel[31] > 0
    assert kernel[:31].max() < 1e-5 * kernel[31] + 1e-7


def test_what_was_fine_tuned_prepares_as_its_base_and_acts(init, tuned):
    base, after = load_policy(init).processor, load_policy(tuned)
    (robot,) = after.processor.embodiments
    assert after.processor == base.with_robots([robot])
    assert robot.cameras == ("front", "wrist")  # as modality.json calls them
    chunk = shown(after)
    assert chunk.shape == (1, 16, 7)
    assert np.isfinite(chunk).all()


def test_eight_devices_train_packed_chats_to_the_losses_of_one(dataset, init, tuned, tmp_path):
    mesh = ("--mesh.data", "4", "--mesh.fsdp", "2")
    command(dataset, init, tmp_path / "run", *ROBOT_AND_FROZEN, *mesh, devices=True)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tuned), rtol=1e-5)


def test_adapters_in_float8_train_and_leave_their_base(dataset, init, tmp_path):
    command(
        *(dataset, init, tmp_path / "run", "--embodiment", "new_embodiment"),
        *(
            "--model.compute.fp8",
            "current",
            "--optimizer.rate-factors",
            "lora_[ab]$",
            "4",
            ".",
            "0",
        ),
        *("model.language.lora:lora", "--model.language.lora.rank", "2"),
        *("--model.language.lora.alpha", "4"),
    )
    before, after = (flatten_dict(load_policy(x).params, sep="/") for x in (init, tmp_path / "run"))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    moved = {name: np.abs(x).max() for name, x in after.items() if name.endswith("lora_b")}
    assert moved
    assert min(moved.values()) > 0
    assert np.isfinite(shown(load_policy(tmp_path / "run"))).all()


def test_what_was_fine_tuned_is_served_judged_open_loop_and_quantised(dataset, tuned, tmp_path):
    config = serve.ServeConfig(tuned, sizes=(1,), euler_steps=2)
    with (
        serve._engine(config, Metrics()) as engine,
        serving(engine) as running,
        client(running.url) as robot,
    ):
        seen = {
            name: "open the drawer"
            if "prompt" in name
            else np.zeros(6)
            if "state" in name
            else np.zeros((24, 32, 3), np.uint8)
            for name in robot.metadata["inputs"]
        }
        actions = robot.infer(seen)["actions"]
    assert actions.shape == (16, 7)
    assert np.isfinite(actions).all()

    judged = OpenLoopConfig(str(dataset), tuned, tmp_path / "open", shown=0, observations=4)
    assert np.isfinite(open_loop.run(judged, QUIET).errors[open_loop.POLICY].mean)

    policy = load_policy(tuned)
    small = quantize.quantize(policy)
    assert quantize.size(small.params) < quantize.size(policy.params)
    whole = shown(policy)
    assert np.abs(shown(small) - whole).max() < 0.1 * np.abs(whole).max()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "say which embodiment the data is from: --embodiment new_embodiment"),
        (("--embodiment", "my_robot"), "GR00T has no embodiment 'my_robot'"),
        (("--embodiment", "gr1", "so100"), "there are 1 embodiments, but model.projectors gives"),
    ],
)
def test_robots_that_the_model_has_no_row_for_are_refused(dataset, init, tmp_path, more, told):
    with pytest.raises(ValueError, match=told):
        command(dataset, init, tmp_path / "run", *more)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (('"end": 7', '"end": 9'), r"action.gripper is 6 to 9, but the dataset's action has 7"),
        (('"start": 6', '"start": 5'), r"action are dims \[0, 1, .*; only all of them"),
        (('images.front', 'images.head'), r"cameras is .*observation.images.head"),
    ],
)  # fmt: skip
def test_a_modality_that_does_not_fit_the_dataset_is_refused(dataset, init, tmp_path, harm, told):
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    file = other / "meta/modality.json"
    file.write_text(file.read_text().replace(*harm))
    with pytest.raises(ValueError, match=told):
        command(other, init, tmp_path / "run", "--embodiment", "new_embodiment")


@pytest.mark.parametrize("write", [lerobots_folder, nvidias_folder])
def test_statistics_of_a_groot_folder_are_kept(init, tmp_path, write):
    folder = write(tmp_path / "groot")
    if write is nvidias_folder:
        with pytest.raises(ValueError, match=r"or put it into the same folder"):
            scales_of(folder, "min-max")
        write_modality(folder / "experiment_cfg/modality.json")
    kept, (robot,) = scales_of(folder, "min-max"), load_policy(init).processor.embodiments
    for found, wanted in ((kept.state, robot.state), (kept.actions, robot.actions)):
        np.testing.assert_allclose(found.offset, wanted.offset, rtol=1e-6)
        np.testing.assert_allclose(found.scale, wanted.scale, rtol=1e-6)
    with pytest.raises(ValueError, match=r"by min-max, not quantile; give --data.state-scaling"):
        scales_of(folder, "quantile")


def scales_of(folder: Path, scaling: Scaling) -> Scales:
    robot = RobotConfig("arm")
    return kept_scales(folder, [robot], {"arm": Scalings(scaling, scaling)})["arm"]


def test_a_base_without_a_tokenizer_asks_for_one(dataset, tmp_path):
    bare = lerobots_folder(tmp_path / "base", tokenizer=False)
    with pytest.raises(ValueError, match=r"--tokenizer FOLDER .the folder of its vocab"):
        command(dataset, bare, tmp_path / "run", "--embodiment", "new_embodiment")
