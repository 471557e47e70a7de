"""Objects as notebooks show them: short, told by what is known already, and with nothing of a
dataset's or a suite's text read as HTML."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from data import open_dataset
from data.dataset import LoadedEpisode, Runs
from data.packing.plan import Plan, PlanSource
from models import pack
from models.files import html
from parallel.planning.predict import Choice, Prediction
from sim.open_loop import BLIND, POLICY, OpenLoop, RecordedChunks
from sim.results import Episode, Evaluation, Failure
from tests.helpers.data.layouts import layout
from tests.helpers.data.recording import FRONT, WRIST, make_episode, write
from tests.helpers.models.rows import LAYOUT, sample
from tests.helpers.models.tiny_policy import PROCESSOR, tiny_policy

HOSTILE = '<script>alert("1")</script>\x1b[2J'
ESCAPED = "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\\x1b[2J"


def text_of(shown: str) -> str:
    """A card without its tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", shown).split())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    episodes = [make_episode(0, 7), make_episode(1, 12)._replace(task=HOSTILE)]
    return open_dataset(write(tmp_path_factory.mktemp("recording") / "small", episodes))


def batch():
    return pack([[sample(1, 3, 1), sample(2, 4, 5)], [sample(1, 2, 9)]], LAYOUT)


def evaluation(tasks: int = 2) -> Evaluation:
    names = (HOSTILE, *(f"task {i}" for i in range(1, tasks)))
    episodes = tuple(
        Episode(name, i, name, name, "", i % 2 == 0, False, 10, 1.0, 0.0, np.zeros((10, 2)))
        for i, name in enumerate(names)
    )
    return Evaluation(HOSTILE, names, names, episodes, 10, (Failure("task 1", 9, "gone", 2),))


def open_loop() -> OpenLoop:
    rng = np.random.default_rng(0)
    actions = rng.normal(size=(8, 3, 2))
    recorded = RecordedChunks(
        episode=np.repeat([0, 1], 4),
        frame=np.tile(np.arange(4), 2),
        actions=actions,
        valid=np.ones((8, 3), bool),
        before=rng.normal(size=(8, 2)),
        scale=np.ones(2),
        names=(HOSTILE, "gripper"),
    )
    predicted = {POLICY: -actions, BLIND: -actions}
    return OpenLoop(recorded, predicted, {HOSTILE: 9.0}, ("push",) * 8, 0.2)


def prediction() -> Prediction:
    parts = {"compute": 0.6, "bubble": 0.0, "update": 0.4}
    memory = {"state": 3 * 2.0**30, "activations": 2.0**30}
    return Prediction(Choice((8, 4, 1, 1, 1)), memory, 1e12, (), parts, 0.0, 0.4321, 1234.5)


def plan(sources: int = 1) -> Plan:
    made = [
        PlanSource(
            name=f"{HOSTILE}{i}",
            weight=1.0,
            runs=Runs(*(np.array([x]) for x in (0, 0, 40, 0))),
            images=np.array([1]),
            text=np.array([[5, 8]]),
        )
        for i in range(sources)
    ]
    return Plan(made, layout(64, 6, 8, 64, 4), 2)


def test_a_dataset_tells_its_episodes_columns_cameras_and_tasks(dataset):
    shown = text_of(dataset._repr_html_())
    assert "2, 19 frames at 20 per second" in shown
    for name in (FRONT, WRIST, "observation.state", "x, y, z, grip", "lift the red block"):
        assert name in shown
    assert "frame_index" not in shown


def test_an_episode_shows_frames_of_every_camera(dataset):
    episode = dataset.episode(1)
    assert isinstance(episode, dict)
    shown = episode._repr_html_()
    assert shown.count('<img alt="observation.images.') == 2
    assert "12 × 48 × 64 × 3" in shown
    assert ESCAPED in shown
    assert LoadedEpisode()._repr_html_()


def test_text_views_fit_a_screen_and_mistakes_answer_in_a_sentence(dataset):
    lines = repr(dataset).splitlines()
    assert lines[0] == "LeRobotDataset small: 2 episodes, 19 frames at 20 fps, robot test"
    assert "  observation.state         float32 [4]" in lines
    assert "  observation.images.front  video [48, 64, 3]" in lines
    assert len(lines) == 6
    assert len(dataset) == 2
    assert np.array_equal(dataset[1]["action"], dataset.column("action", [1]))
    assert np.array_equal(dataset[-1][FRONT], dataset.frames(1, FRONT))
    assert [len(episode["action"]) for episode in dataset] == [7, 12]
    episode = repr(dataset[1])
    assert "\n  action                    float32 [12, 3]\n" in episode
    assert "\x1b" not in episode
    many = LoadedEpisode({f"column {i}": np.zeros((5, i)) for i in range(400)}, task="go " * 900)
    assert len(repr(many).splitlines()) == 18
    assert max(map(len, repr(many).splitlines())) <= 100
    for wrong, error, message in (
        (lambda: dataset[2], IndexError, "no episode 2; there are 2."),
        (lambda: dataset["action"], TypeError, r"dataset\['action'\] names no episode; give its n"),
        (lambda: dataset.episode(99), IndexError, "no episode 99; there are 2."),
        (lambda: dataset.episode("0"), TypeError, r"dataset\['0'\] names no episode; give its nu"),
        (lambda: dataset[0]["actions"], KeyError, "no 'actions'; the episode has 'observation.st"),
    ):
        with pytest.raises(error, match=message):
            wrong()


def test_a_batch_tells_what_it_is_filled_with():
    shown = text_of(batch()._repr_html_())
    assert "2 of 24 prefix places" in shown
    assert "3 in 6 slots" in shown
    places = 16 + 9 + 3
    assert f"{places / 48:.1%} filled" in shown
    assert f"uint8{[2, *batch().images.shape[1:]]}" in shown


def test_a_batch_is_shown_wherever_its_arrays_are():
    whole = batch()
    on_device = jax.device_put(whole)
    assert text_of(on_device._repr_html_()) == text_of(whole._repr_html_())
    seen = []

    def traced(batch):
        seen.append((repr(batch), batch._repr_html_()))
        return batch.weight.sum()

    jax.jit(traced)(whole)
    abstract = jax.eval_shape(lambda: pack([[]], LAYOUT))
    seen.append((repr(abstract), abstract._repr_html_()))
    seen.append((repr(jax.tree.map(lambda x: None, whole)), ""))
    assert repr(whole) == seen[0][0]
    assert all(len(told) < 600 for told, _ in seen)
    assert all("filled" not in shown for _, shown in seen)


def test_a_policy_tells_its_robot_and_size_without_its_parameters():
    policy = tiny_policy()
    size = sum(leaf.size for leaf in jax.tree.leaves(policy.params))
    assert repr(policy) == f"Policy(family='pi', robot='arm', {size:,} parameters in float32)"
    shown = text_of(policy._repr_html_())
    for told in (f"{size:,} parameters", "6 steps of up to 4 dims", "2 Euler steps", "front"):
        assert told in shown
    robot = replace(PROCESSOR.embodiments[0], name="<b>arm", cameras=("<i>front",))
    hostile = replace(policy, processor=replace(PROCESSOR, embodiments=(robot,)))
    assert "<b>" not in hostile._repr_html_()
    assert "<i>" not in hostile._repr_html_()
    bare = replace(policy, processor=None, params=None)
    assert "arm" not in repr(bare) + bare._repr_html_()


def test_an_evaluation_tells_its_success_with_the_interval():
    found = evaluation()
    shown = text_of(found._repr_html_())
    assert "50.0 % (1/2, 95 % CI 9.5–90.5 %)" in shown
    assert "1 starts, which are not counted" in shown
    assert len(repr(evaluation(500))) < 200
    lost = replace(found, episodes=())
    assert "success" not in lost._repr_html_()


def test_an_open_loop_tells_errors_and_findings():
    found = open_loop()
    shown = text_of(found._repr_html_())
    assert f"policy {found.errors[POLICY].mean:.3g}" in shown
    assert "as good with black images" in shown
    assert len(repr(found)) < 200


def test_a_prediction_tells_step_memory_and_what_it_is_made_of():
    shown = text_of(prediction()._repr_html_())
    for told in (
        "1 s",
        "1,23",
        "43.2%",
        "4.0 GiB",
        "compute 60.0%",
        "state 75.0%",
        "data=8×fsdp=4",
    ):
        assert told in shown
    assert "bubble" not in shown


def test_a_plan_tells_its_sources_and_how_full_rows_are():
    made = plan()
    shown = text_of(made._repr_html_())
    assert f"{made.fill(range(1)).prefix:.1%} in the first batch" in shown
    assert "2 of 64 prefix places" in shown


@pytest.mark.parametrize("make", [evaluation, open_loop, plan], ids=lambda make: make.__name__)
def test_text_of_others_is_not_read_as_html(make):
    shown = make()._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_a_datasets_text_is_not_read_as_html(dataset):
    shown = dataset._repr_html_()
    assert "<script" not in shown
    assert ESCAPED in shown


def test_what_is_shown_stays_short_however_much_there_is():
    assert len(evaluation(500)._repr_html_()) < 20_000
    assert len(plan(40)._repr_html_()) < 20_000
    assert "and 480 more" in evaluation(500)._repr_html_()
    assert len(html.plain("x" * 10_000)) == 200
    long = np.zeros((5000, 480, 640, 3), np.uint8)
    assert len(html.strip(long, "front")) < 20_000
