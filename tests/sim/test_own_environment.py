"""The environments of docs/own_environment.md work as it says."""

import re
from pathlib import Path

import numpy as np
import pytest

from sim.evaluate import evaluate
from sim.protocol import Start
from sim.statistics import Rate
from sim.suites import load_suite

GUIDE = Path(__file__).parents[2] / "docs" / "own_environment.md"
SIZE = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The guide's files."""
    folder = tmp_path_factory.mktemp("own")
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), re.S):
        (folder / name).write_text(code)
    return folder


@pytest.fixture(params=["line.py", "line_suite.py"])
def suite(folder, request):
    return load_suite(f"{folder / request.param}:LINE")


def obedient(observation, prompts, keys):
    """Goes where it is told: [N, 8, 1]."""
    side = [-1.0 if "left" in prompt else 1.0 for prompt in prompts]
    return np.tile(np.array(side)[:, None, None], (1, 8, 1))


def starts(suite, seeds):
    return [Start(task, seed) for task in suite.tasks for seed in seeds]


def test_a_policy_that_obeys_succeeds_and_one_that_does_not_fails(suite):
    slots = suite.open(suite.tasks, 3, SIZE)
    wanted = starts(suite, range(4))
    obeyed = evaluate(slots, obedient, wanted, replan_steps=8, clips=2)
    assert len(obeyed.episodes) == len(wanted)
    assert {episode.goal for episode in obeyed.episodes} == {"left", "right"}
    assert all(episode.success for episode in obeyed.episodes)
    assert not obeyed.failures
    assert obeyed.clips
    assert obeyed.unrepeatable == 0
    idle = evaluate(slots, lambda *seen: 0 * obedient(*seen), wanted, replan_steps=8)
    slots.close()
    assert not any(episode.success for episode in idle.episodes)
    assert {episode.length for episode in idle.episodes} == {40}


def test_a_goal_that_a_prompt_names_is_measured_where_the_slots_judge_it_and_else_not(suite):
    slots = suite.open(suite.tasks, 3, SIZE)
    wanted = starts(suite, range(4))
    told = evaluate(slots, obedient, wanted, replan_steps=8, control="other prompt", clips=2)
    own = evaluate(slots, obedient, wanted, replan_steps=8, clips=0)
    slots.close()
    assert told.success.successes == 0
    assert len(told.clips) == 2
    assert own.named == own.success == Rate(len(wanted), len(wanted))
    judged = len(suite.tasks) == 1  # the one in JAX
    assert told.named == (Rate(len(wanted), len(wanted)) if judged else None)
    assert (told.to_json()["named"] is None) == (not judged)
    assert {e.named_achieved for e in told.episodes} == {True if judged else None}


def test_a_variant_is_the_same_episode_seen_otherwise(folder):
    (more,) = re.findall(r"```python\n(from dataclasses .*?)```", GUIDE.read_text(), re.S)
    file = folder / "varied.py"
    file.write_text((folder / "line.py").read_text() + more)
    suite = load_suite(f"{file}:VARIED")
    dim = suite.variants["dim"]
    assert (dim.name, dim.about, dim.first_seed) == ("dim", "half the light", suite.first_seed)
    seen = []
    for either in (suite, dim):
        slots = either.open(either.tasks, 1, SIZE)
        slots.begin(0, Start("line", 3))
        seen.append(slots.poll()[0])
    light, dark = seen
    assert np.array_equal(dark.observation.state, light.observation.state)
    assert np.array_equal(dark.observation.images, light.observation.images // 2)
    assert light.observation.images.max() == 255


def test_an_episode_is_the_same_in_any_slot_and_is_seen_where_it_is(suite):
    slots = suite.open(suite.tasks, 2, SIZE)
    for slot in range(2):
        slots.begin(slot, Start(suite.tasks[0], 7))
    first, second = finished(slots, 2)
    assert np.array_equal(first.observation.images, second.observation.images)
    assert first.observation.state == second.observation.state
    for slot in range(2):
        slots.send(slot, np.full((4, 1), 0.5))
    moved = finished(slots, 2)[0].observation
    slots.close()
    assert moved.state[0] == pytest.approx(first.observation.state[0] + 0.2, abs=1e-6)
    lit = np.linspace(-1.2, 1.2, SIZE)[moved.images[0, 0, :, 0] == 255]
    assert lit.mean() == pytest.approx(moved.state[0], abs=0.06)


def finished(slots, count):
    """Outcomes of so many slots, in their order."""
    outcomes = []
    while len(outcomes) < count:
        outcomes += slots.poll()
    return sorted(outcomes, key=lambda outcome: outcome.slot)


def test_the_examples_are_as_short_as_promised(folder):
    for names in (["line.py"], ["line_simulator.py", "line_suite.py"]):
        lines = [line for name in names for line in (folder / name).read_text().splitlines()]
        assert sum(bool(line) and not line.startswith(("import", "from")) for line in lines) <= 40
