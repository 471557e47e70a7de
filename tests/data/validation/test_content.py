"""Content that teaches the wrong thing although every file is sound: cameras that show nothing,
episodes in other units or of another sign, angles that wrap. Nothing is found where all is well."""

import numpy as np
import pyarrow as pa
import pytest

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit
from data.lerobot.writer import DatasetWriter
from data.statistics.idle import IdleLimits
from data.statistics.stats import compute
from data.validation.check_columns import odd_episodes
from data.validation.looks import check_looks
from data.validation.validate import require_valid, validate
from data.view.browse import write_browser
from tests.helpers.data.damage import edit_column
from tests.helpers.data.recording import PARQUET

NUMBERS = ("observation.state", "action")
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (6,), "names": None},
    "action": {"dtype": "float32", "shape": (6,), "names": None},
    FRONT: {"dtype": "video", "shape": (32, 48, 3), "names": None},
    WRIST: {"dtype": "video", "shape": (32, 48, 3), "names": None},
}
LENGTHS = (20, 25, 22, 30, 20, 27, 25, 24)


def course(episode, length):
    """Joints in radians that swing, and a gripper that closes and opens again."""
    rng = np.random.default_rng(episode)
    time = np.linspace(0, 1, length)[:, None]
    turns, phase, size = rng.uniform((0.5, 0, 0.3), (1.5, 1, 1.2), (5, 3)).T
    joints = np.sin(2 * np.pi * (time * turns + phase)) * size
    first, last = rng.uniform(0.3, 0.6), rng.uniform(0.7, 0.95)
    return np.hstack([joints, np.where((time > first) & (time < last), 1.0, -1.0)])


def picture(episode, step, camera):
    y, x = np.mgrid[:32, :48]
    red, green, blue = (x * 3 + step * 8) % 256, y * 4, np.full_like(x, 20 * episode)
    return np.stack([red, green, blue] if camera == FRONT else [blue, red, green], -1)


def plain(values, episode):
    return values


def write(path, state=plain, action=plain, see=picture, names=None):
    cameras = (FRONT, WRIST) if see else ()
    features = {n: dict(told) for n, told in FEATURES.items() if n in (*NUMBERS, *cameras)}
    for column in NUMBERS:
        features[column]["names"] = names
    with DatasetWriter(path, fps=10, features=features) as writer:
        for episode, length in enumerate(LENGTHS):
            values = course(episode, length)
            columns = {
                "observation.state": state(values.copy(), episode).astype(np.float32),
                "action": action(values.copy(), episode).astype(np.float32),
            }
            frames = {
                camera: np.stack([see(episode, step, camera) for step in range(length)])
                for camera in cameras
            }
            writer.add_episode(columns, {c: x.astype(np.uint8) for c, x in frames.items()}, "push")
    return path


def in_degrees(values, episode):
    values[:, :5] *= 180 / np.pi if episode == 5 else 1
    return values


def in_radians(values, episode):
    values[:, :5] *= 1 if episode == 5 else 180 / np.pi
    return values


def flipped(values, episode):
    values[:, 5] *= -1 if episode % 2 else 1
    return values


def zero_to_one(values, episode):
    values[:, 5] = (values[:, 5] + 1) / 2 * (-1 if episode == 6 else 1)
    return values


def turning(values, episode):
    angle = np.linspace(2.5 + 0.1 * episode, 3.9, len(values))
    values[:, 3] = (angle + np.pi) % (2 * np.pi) - np.pi if episode != 4 else 0.1 * angle
    return values


def black_wrist(episode, step, camera):
    return 0 * picture(episode, step, camera) if camera == WRIST else picture(episode, step, camera)


def black_third(episode, step, camera):
    return picture(episode, step, camera) * (episode != 3 or camera != WRIST)


def frozen_fifth(episode, step, camera):
    return picture(episode, 0 if episode == 5 and camera == FRONT else step, camera)


def twice(episode, step, camera):
    return picture(episode, step, FRONT)


UNITS = "as if in degrees among radians"
FOUND = {
    "one episode in degrees": ({"action": in_degrees}, "action", UNITS, [5], "other units"),
    "one episode in radians": (
        {"state": in_radians}, "observation.state", "radians among degrees", [5], "other units"
    ),
    "a gripper that flips": (
        {"action": flipped}, "action", "opposite sign in dimension 5", [1, 3, 5, 7], "other sign"
    ),
    "one gripper of 0 to -1": (
        {"action": zero_to_one}, "action", "opposite sign in dimension 5", [6], "other sign"
    ),
    "an angle that wraps": (
        {"state": turning}, "observation.state", "jumps by 2π in dimension 3 (6 such steps",
        [0, 1, 2, 3, 5, 6], "wraps",
    ),
    "a black camera": ({"see": black_wrist}, WRIST, "is black in all 8", range(8), "blank"),
    "a black episode": ({"see": black_third}, WRIST, "is black in episode 3 of", [3], "blank"),
    "a frozen episode": ({"see": frozen_fifth}, FRONT, "the same picture thr", [5], "frozen"),
    "one camera twice": (
        {"see": twice}, WRIST, f"shows the same as camera '{FRONT}' in all 8", range(8),
        "same picture",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_wrong_content_is_found_where_it_is(tmp_path, case):
    changes, name, message, episodes, mark = FOUND[case]
    path = write(tmp_path / "set", **changes)
    (problem,) = validate(path, look=True)
    assert problem.severity == "warning"
    assert f"'{name}'" in problem.field
    assert message in problem.message
    counts = write_browser(
        open_dataset(path), tmp_path / "page", lambda *_: None, limits=IdleLimits()
    )
    named = ("other units", "other sign", "wraps", "blank", "frozen", "same picture")
    assert {m: counts[m] for m in named if counts[m]} == {mark: len(episodes)}
    if 1 < len(episodes) < 6:
        assert f"({', '.join(map(str, episodes))})" in problem.message
    elif len(episodes) == 1:
        assert f"episode {episodes[0]}" in problem.message


def either_way(values, episode):
    values[:, 5] *= -1 if episode == 1 else 1
    return values


def aborted(values, episode):
    values[:, :5] *= 180 / np.pi
    values[:, :5] *= np.array([1, 5, 1, 5, 2]) / 120 if episode == 5 else 1
    return values


def resting(values, episode):
    values[:, :5] = (values[:, :5] / (60 if episode == 5 else 1) + 0.08) * 180 / np.pi
    return values


def keyed(values, episode):
    keys = np.repeat([0, 1, -1 if episode == 2 else 0, 0, 1, 0], 5)
    values[:, 3] = 3.0 * keys[: len(values)]
    return values


def turning_twice(values, episode):
    values = turning(values, episode)
    values[:, 2] = np.degrees(values[:, 3])
    return values


def two_grippers(values, episode):
    quarter = np.arange(len(values)) * 4 // len(values)
    values[:, 4] = np.where(quarter == episode % 4, 1.0, -1.0)
    values[:, 5] = values[:, 4] * (-1 if episode == 3 else 1)
    return values


JOINTS = [f"joint {dim}" for dim in range(6)]
SOUND = {
    "a last joint that is no gripper": (either_way, either_way, JOINTS),
    "a last dim that moves either way": (flipped, flipped, None),
    "joints in degrees, once near zero": (aborted, plain, None),
    "joints in degrees, once at rest": (resting, plain, None),
    "a velocity that changes sides": (keyed, plain, None),
    "two grippers, once in turn": (
        two_grippers, two_grippers, [*JOINTS[:4], "left gripper", "right gripper"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_what_robots_do_is_not_taken_for_another_convention(tmp_path, case):
    state, action, names = SOUND[case]
    dataset = open_dataset(write(tmp_path / "set", state, action, None, names))
    stats = compute(dataset, names=NUMBERS)
    assert odd_episodes(dataset, stats, NUMBERS, lambda *_: None) == []


def test_each_angle_is_named_by_its_own_full_turn(tmp_path):
    dataset = open_dataset(write(tmp_path / "set", turning_twice, see=None))
    stats = compute(dataset, names=NUMBERS)
    found = odd_episodes(dataset, stats, NUMBERS, lambda *_: None)
    assert [(one.dims, one.sentence.split()[2]) for one in found] == [((3,), "2π"), ((2,), "360°")]


def test_a_camera_may_see_the_same_where_the_robot_stands_as_before(tmp_path):
    def back_at_each_look(values, episode):
        if episode == 5:
            values[np.linspace(0, len(values) - 1, 4).round().astype(int)] = values[0]
        return values

    path = write(tmp_path / "set", back_at_each_look, back_at_each_look, frozen_fifth)
    assert "same picture" not in str(validate(path, look=True))
    counts = write_browser(
        open_dataset(path), tmp_path / "page", lambda *_: None, limits=IdleLimits()
    )
    assert counts["frozen"] == 0


def test_nothing_is_found_where_all_is_well(tmp_path):
    path = write(tmp_path / "set")
    assert validate(path, look=True) == []
    looked = []
    assert require_valid(write(tmp_path / "black", see=black_wrist))  # training looks too
    assert validate(tmp_path / "black") == []
    validate(path, lambda what, done, total: looked.append((what, done, total)), look=True)
    assert ("Looking", len(LENGTHS), len(LENGTHS)) in looked


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (3.2, "begins at 3.2 s in episode 0, expected 0 s; if"),
        (1.7e9, "begins at 1.7e+09 s in episode 0, a time of day (seconds since 1970), expected"),
    ],
)
def test_times_that_begin_late_are_named_as_such_and_an_edit_mends_them(begin, message, tmp_path):
    path = write(tmp_path / "set")
    (path / "meta/checksums.json").unlink()
    late = lambda v, _: ([begin + x for x in v], pa.float64())  # noqa: E731
    edit_column(path, PARQUET, "timestamp", late)
    (problem,) = validate(path)
    assert message in problem.message
    edit_dataset([path], tmp_path / "new", Edit())
    assert validate(tmp_path / "new") == []
    assert open_dataset(tmp_path / "new").column("timestamp")[:3].tolist() == pytest.approx(
        [0, 0.1, 0.2]
    )


def test_the_number_of_pictures_looked_at_is_bounded(monkeypatch, tmp_path):
    dataset = open_dataset(write(tmp_path / "set"))
    asked = []

    class Long:
        root, cameras, prompts, fps = "set", (FRONT,), (("push",),), 10
        features, column_names = dataset.features, dataset.column_names
        lengths, present = np.full(5000, 40), np.ones((5000, 1), bool)

        def stream(self, names, episodes=None):
            for _ in range(5000) if episodes is None else episodes:
                yield {name: np.linspace((0,) * 6, (1,) * 6, 40) for name in names}

        def frames_at(self, i, camera, at):
            asked.append(len(at))
            return np.stack([picture(i, int(step), camera) for step in at]).astype(np.uint8)

    assert list(check_looks(Long(), (), lambda *_: None)) == []
    assert (len(asked), sum(asked)) == (64, 256)
