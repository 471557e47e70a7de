"""Two recordings of one scene have nothing to be said about; each mistake that a robot's client
makes with pictures, units, signs, order and rate is named, and that one alone."""

import json

import numpy as np
import pytest

from data import open_dataset
from data.lerobot.writer import DatasetWriter
from data.statistics.difference import DELTA_T, difference

NAMES = ["x", "y", "grip"]


def scene(rng, shape=(32, 32)):
    """A blue sky over red ground, with something green at the left; noise over all."""
    height, width = shape
    picture = np.zeros((height, width, 3))
    picture[: height // 2, :, 2] = 200
    picture[height // 2 :, :, 0] = 160
    picture[height // 4 : height // 2, : width // 3, 1] = 220
    return np.clip(picture + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)


def recording(path, seed=0, *, see=lambda x: x, change=lambda x: x, wrist=True, **options):
    """Episodes whose states and pictures are changed as a client might."""
    rng = np.random.default_rng(seed)
    names, fps, prompts = (
        options.get("names", NAMES),
        options.get("fps", 10),
        options.get("prompts", ("push", "pull")),
    )
    sample = see(scene(rng, options.get("shape", (32, 32))))
    cameras = {"observation.images.front": sample.shape}
    cameras |= {"observation.images.wrist": (16, 16, 3)} if wrist else {}
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": names},
        "action": {"dtype": "float32", "shape": (3,), "names": names},
    } | {
        name: {"dtype": "video", "shape": shape, "names": ["height", "width", "channels"]}
        for name, shape in cameras.items()
    }
    if "waits" in options:
        features[DELTA_T] = {"dtype": "float32", "shape": (1,), "names": None}
    with DatasetWriter(path, fps=fps, features=features) as writer:
        for i in range(6):
            values = rng.uniform((-1, 0.2, 0), (1, 1.2, 0.1), (30, 3)).astype(np.float32)
            columns = {"observation.state": change(values).astype(np.float32), "action": values}
            if "waits" in options:
                columns[DELTA_T] = np.full((30, 1), 0.1, np.float32)
                columns[DELTA_T][7] = options["waits"]
            shape = options.get("shape", (32, 32))
            front = np.stack([see(scene(rng, shape)) for _ in range(30)])
            pictures = {"observation.images.front": front}
            if wrist:
                pictures["observation.images.wrist"] = np.full((30, 16, 16, 3), 90, np.uint8)
            writer.add_episode(columns, pictures, prompts[i % len(prompts)])
    return open_dataset(path)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return recording(tmp_path_factory.mktemp("first") / "a")


def found(first, tmp_path, **changes):
    other = recording(tmp_path / "b", 1, **changes)
    return difference(first, other, lambda what, done, total: None)


def test_two_recordings_of_one_scene_differ_in_nothing_that_matters(first, tmp_path):
    result = found(first, tmp_path)
    assert result.findings == ()
    assert len(result.dims) == 6
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["first"]["episodes"] == 6


def degrees(x):
    return np.concatenate([x[:, :1] * 180 / np.pi, x[:, 1:]], 1)


def outside(x):
    return x + np.array([0, 5, 0], np.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"see": lambda x: x[..., ::-1]}, "best if its red and blue channels are swapped"),
        ({"see": lambda x: x[::-1]}, "best if it is upside-down."),
        ({"see": lambda x: x[:, ::-1]}, "best if it is mirrored left to right"),
        ({"see": lambda x: x[::-1, ::-1]}, "best if it is turned by 180°."),
        ({"see": lambda x: x[::-1, :, ::-1]}, "upside-down, and its red and blue channels"),
        ({"shape": (24, 40)}, "32 × 32 pixels in the first and 24 × 40 pixels in the second"),
        ({"change": degrees}, "observation.state 'x' varies 57.3 times as much in the second"),
        ({"change": lambda x: x * np.array([1, -1, 1])}, "'y' has the opposite sign"),
        ({"change": outside}, "'y' is outside the first's range in 100 % of the second's frames"),
        ({"change": lambda x: x * np.array([1, 1, 0])}, "'grip' never changes in the second"),
        ({"names": ["y", "x", "grip"]}, "in another order: ['x', 'y', 'grip'] and ['y', 'x'"),
        ({"fps": 30}, "The first has 10 frames per second, the second 30"),
        ({"wrist": False}, "The second has no camera 'wrist'"),
        ({"prompts": ("push", "Push!")}, "1 of the second's 2 prompts are not in the first"),
        ({"waits": 2.0}, "up to 2 s apart, but 0.1 s at the median"),
    ],
)
def test_each_mistake_is_named(first, tmp_path, changes, said):
    findings = found(first, tmp_path, **changes).findings
    assert any(said in line for line in findings), findings
    other = [line for line in findings if said not in line]
    allowed = {"names": 2, "change": 0}.get(next(iter(changes)), 0)
    assert len(other) <= allowed, findings


def test_darker_pictures_are_named(first, tmp_path):
    (said,) = found(first, tmp_path, see=lambda x: (x * 0.3).astype(np.uint8)).findings
    assert "Camera 'front' is darker in the second" in said


def test_swapped_cameras_are_named(tmp_path):
    def two(path, cameras):
        rng = np.random.default_rng(0)
        features = {"action": {"dtype": "float32", "shape": (1,), "names": ["x"]}} | {
            f"observation.images.{name}": {
                "dtype": "video",
                "shape": (32, 32, 3),
                "names": ["height", "width", "channels"],
            }
            for name in cameras
        }
        with DatasetWriter(path, fps=10, features=features) as writer:
            for _ in range(2):
                shown = {
                    cameras[0]: np.stack([scene(rng) for _ in range(9)]),
                    cameras[1]: np.full((9, 32, 32, 3), 200, np.uint8),
                }
                pictures = {f"observation.images.{name}": x for name, x in shown.items()}
                columns = {"action": rng.normal(size=(9, 1)).astype(np.float32)}
                writer.add_episode(columns, pictures, "push")
        return open_dataset(path)

    one, other = two(tmp_path / "a", ("front", "wrist")), two(tmp_path / "b", ("wrist", "front"))
    findings = difference(one, other, lambda what, done, total: None).findings
    said = " ".join(findings)
    assert (
        "'front' of the second resembles the first's best if it shows what camera 'wrist'" in said
    )
    assert (
        "'wrist' of the second resembles the first's best if it shows what camera 'front'" in said
    )


def test_shares_outside_are_those_counted_by_hand(first, tmp_path):
    def partly(x):
        return np.where(np.arange(len(x))[:, None] < 3, x + np.array([10, 0, 0]), x)

    result = found(first, tmp_path, change=partly)
    (dim,) = [d for d in result.dims if (d.column, d.name) == ("observation.state", "x")]
    inside = dim.outside - 0.1  # of the other frames, which were drawn anew
    assert 0 <= inside < 0.02
    assert dim.beyond == pytest.approx((dim.second[4] - dim.first[4]) / half(dim.first))


def half(values):
    return (values[3] - values[1]) / 2
