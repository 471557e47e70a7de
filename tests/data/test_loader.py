from dataclasses import fields, replace

import jax
import numpy as np
import pytest

from data import open_dataset
from data.former_store import ACTION, STATE, build_store
from data.loader import Loader, plan_source
from data.packing import fit_layout
from data.plan import Plan
from data.stats import normalizer
from models import Embodiment, Processor, pack
from models.tokenizer import Tokenizer
from tests.data.conftest import FRONT, LENGTHS, WRIST
from tests.data.test_packing import layout

STEPS, ROWS, HORIZON = 5, 8, 4


@pytest.fixture(scope="module")
def store(recorded, tmp_path_factory):
    return build_store(open_dataset(recorded), tmp_path_factory.mktemp("store") / "s", 16, "raw")


@pytest.fixture(scope="module")
def processor(store):
    stats = store.stats()
    scales = normalizer(stats[STATE], STATE), normalizer(stats[ACTION], ACTION)
    words = Tokenizer.build(store.prompts, 300).words
    robots = tuple(
        Embodiment(name, cameras, *scales)
        for name, cameras in (("both", (WRIST, FRONT)), ("wrist", (WRIST,)))
    )
    return Processor(16, 6, 5, HORIZON, "token", words, robots)


@pytest.fixture(scope="module")
def plan(store, processor):
    sources = (
        plan_source(store, processor, name="both", weight=0.6),
        plan_source(store, processor, name="wrist", embodiment=1, episodes=[0, 2, 3], weight=0.4),
    )
    budget = replace(layout(60, 8, 6, 40, 4, 1), image_size=16, state_dim=6, action_dim=5)
    return Plan(sources, replace(budget, horizon=HORIZON), ROWS, window=256)


def batches(stores, processor, plan, number=STEPS, **options):
    with Loader([stores, stores], processor, plan, **options) as loader:
        return [jax.tree.map(np.copy, next(loader)[0]) for _ in range(number)]


@pytest.fixture(scope="module")
def expected(store, processor, plan):
    return batches(store, processor, plan)


def assert_equal(actual, expected):
    for field in fields(expected):
        assert np.array_equal(getattr(actual, field.name), getattr(expected, field.name))


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_shares_put_together_are_the_batch_of_one(store, processor, plan, expected, hosts):
    shares = [
        batches(store, processor, plan, host_index=host, host_count=hosts) for host in range(hosts)
    ]
    for step in range(STEPS):
        together = jax.tree.map(lambda *x: np.concatenate(x), *(share[step] for share in shares))
        assert_equal(together, expected[step])


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": 3}, {"workers": 1}, {"workers": 2}]
)
def test_batches_do_not_depend_on_workers_or_threads(store, processor, plan, expected, options):
    for actual, batch in zip(batches(store, processor, plan, **options), expected, strict=True):
        assert_equal(actual, batch)


@pytest.mark.parametrize("start", [1, 3])
def test_a_start_at_any_step_gives_the_batches_from_there(store, processor, plan, expected, start):
    resumed = Plan(plan.sources, plan.layout, ROWS, window=256)
    later = batches(store, processor, resumed, STEPS - start, start_step=start)
    for actual, batch in zip(later, expected[start:], strict=True):
        assert_equal(actual, batch)


def test_a_batch_holds_the_planned_samples_in_the_robots_values(store, processor, plan, expected):
    ends = np.cumsum(LENGTHS)
    for step in (0, 4):
        rows = []
        for row in plan.rows(step):
            samples = []
            for draw in row:
                start, end = ends[draw.episode] - LENGTHS[draw.episode], ends[draw.episode]
                now = start + draw.frame
                steps = np.minimum(np.arange(now, now + HORIZON), end - 1)
                cameras = processor.embodiments[draw.source].cameras
                samples.append(
                    processor.sample(
                        store.images(now, cameras),
                        store.states[now],
                        store.prompt(draw.episode),
                        embodiment=draw.source,
                        actions=store.actions[steps],
                        valid=np.arange(now, now + HORIZON) < end,
                        id=draw.id,
                    )
                )
            rows.append(samples)
        assert_equal(expected[step], pack(rows, plan.layout))


def test_action_chunks_are_masked_past_the_end_of_the_episode(plan, expected):
    for step, batch in enumerate(expected):
        for r, row in enumerate(plan.rows(step)):
            for k, draw in enumerate(row):
                left = min(HORIZON, LENGTHS[draw.episode] - draw.frame)
                assert batch.action_mask[r, k, :left, :3].all()
                assert not batch.action_mask[r, k, left:].any()
                assert not batch.action_mask[r, k, :, 3:].any()


def test_held_out_episodes_are_never_drawn(plan):
    for step in range(40):
        for row in plan.rows(step):
            assert all(draw.episode in (0, 2, 3) for draw in row if draw.source == 1)


def test_info_counts_the_samples_of_each_source_and_the_fill(store, processor, plan, expected):
    with Loader([store, store], processor, plan, start_step=2) as loader:
        _, info = next(loader)
    drawn = [draw.source for row in plan.rows(2) for draw in row]
    assert info.step == 2
    assert info.samples == (drawn.count(0), drawn.count(1))
    assert info.fill == pytest.approx((expected[2].prefix_segment > 0).mean())
    assert info.fill == pytest.approx(plan.fill([2]).prefix)


def test_states_read_as_text_never_take_more_places_than_planned(store, processor):
    spelt = replace(processor, state_input="text")
    planned = plan_source(store, spelt).text
    states = np.random.default_rng(0).normal(scale=1.5, size=(50, 4))
    for episode, places in enumerate(planned[store.tasks, 0]):
        lengths = [len(spelt.tokens(store.prompt(episode), state)) for state in states]
        assert max(lengths) <= places


def test_a_fitted_layout_serves_the_loader(store, processor):
    source = plan_source(store, processor)
    images = np.repeat(source.images, source.runs.length)
    text = np.repeat(source.text[source.runs.task, 0], source.runs.length)
    budget = replace(layout(80, 0, 9, 0, 4, 1), image_size=16, state_dim=6, action_dim=5)
    fitted = fit_layout(images, text, replace(budget, horizon=HORIZON))
    with Loader([store], processor, Plan([source], fitted, 4)) as loader:
        batch, info = next(loader)
    assert batch.prefix_segment.shape == (4, fitted.prefix)
    assert info.fill > 0.8


def test_rows_that_do_not_divide_among_hosts_are_refused(store, processor, plan):
    with pytest.raises(ValueError, match="8 rows a step do not divide among 3 hosts"):
        Loader([store, store], processor, plan, host_count=3)


def test_a_store_of_another_size_or_robot_is_refused(store, processor, plan):
    with pytest.raises(ValueError, match="at 16 pixels, but embodiment 'both' needs"):
        Loader([store, store], replace(processor, image_size=32), plan)
    robots = tuple(replace(robot, cameras=("top",)) for robot in processor.embodiments)
    with pytest.raises(ValueError, match=r"needs \['top'\]"):
        Loader([store, store], replace(processor, embodiments=robots), plan)
    with pytest.raises(ValueError, match="The plan has 2 sources, but there are 1 stores"):
        Loader([store], processor, plan)
