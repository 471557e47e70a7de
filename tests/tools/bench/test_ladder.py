"""The ladder's rungs train on the same samples with the same loss, and differ in one thing each."""

import json
from dataclasses import fields, replace
from itertools import islice, pairwise

import jax
import numpy as np
import pytest

from models.files.terminal import Console
from models.layers.dit import TransformerConfig
from models.layers.gemma import GemmaConfig
from models.layers.qwen3 import QwenConfig
from models.layers.siglip import SiglipConfig
from tools.bench.ladder import ladder
from tools.bench.ladder.dataset import make
from tools.bench.ladder.ladder import LadderSizes
from tools.bench.ladder.rungs import RUNGS, laid, opened

pytestmark = pytest.mark.slow

SIZES = LadderSizes(
    episodes=6, frames=10, picture=32, samples=8, loaded=2, trained=1, warm=1, rounds=2
)
VISION = SiglipConfig(width=16, depth=1, hidden=16, heads=1)
STACK = GemmaConfig(16, 1, 16, heads=1, kv_heads=1, head_dim=8)
BLOCK = TransformerConfig(depth=1, heads=1, head_dim=16)
SMALL = {"vision": VISION, "image_size": 28, "horizon": 4}
MODELS = {
    "π0.5": ladder.MODELS["π0.5"].changed(language=STACK, expert=STACK, **SMALL),
    "GR00T-N1.5": ladder.MODELS["GR00T-N1.5"].changed(
        language=QwenConfig(16, 1, 16, heads=1, kv_heads=1, head_dim=8),
        adapter=BLOCK,
        dit=replace(BLOCK, depth=2),
        hidden=16,
        **SMALL,
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def found(cache):
    figure = cache / "ladder.svg"
    return ladder.run(Console(quiet=True), None, cache, figure, SIZES, {"π0.5": MODELS["π0.5"]})


@pytest.fixture(scope="module")
def groots_loss():
    model = MODELS["GR00T-N1.5"].build()
    params = ladder.stirred(jax.jit(model.init)(jax.random.key(0)))

    @jax.jit
    def loss(batch):
        total, count = model.loss(params, batch, jax.random.key(0))
        return total / count

    return loss


@pytest.fixture(scope="module")
def frames(cache):
    root = make(cache / "ladder-6x10-32", SIZES.episodes, SIZES.frames, SIZES.picture)
    return opened(root, 28, cache)


def batches(rung, model, frames, number=3):
    with laid(rung, MODELS[model], frames, SIZES.samples).batches() as loaded:
        return list(islice(loaded, number))


def by_id(batch) -> dict[int, tuple[np.ndarray, ...]]:
    """State, chunk and text of each sample of a batch."""
    told: dict[int, tuple[np.ndarray, ...]] = {}
    for row, slot in np.argwhere(batch.weight > 0).tolist():
        mine = batch.prefix_segment[row] == slot + 1
        source = batch.prefix_source[row][mine]
        words = source - batch.images.shape[1] * 4
        numbers = batch.state[row, slot], batch.actions[row, slot]
        told[int(batch.sample_id[row, slot])] = (*numbers, batch.text[row][words[words >= 0]])
    return told


def test_a_run_tells_all_rungs_as_json_and_draws_them(found, cache):
    told = json.loads(json.dumps(found))["models"]["π0.5"]
    assert [rung["name"] for rung in told["rungs"]] == [rung.name for rung in RUNGS]
    for rung in told["rungs"]:
        for part in ("loading", "computing", "together"):
            low, high = rung[part]["range"]
            assert 0 < low <= rung[part]["samples/s"] <= high
            assert rung[part]["cpu_ms"] > 0
    assert told["sizes"]["parameters"] > 0
    assert "--peer" in found["peer"]
    assert (cache / "ladder.svg").read_text().startswith("<?xml")


def test_no_rung_changes_a_loss_of_pi05(found):
    family = found["models"]["π0.5"]
    losses = [rung["loss"] for rung in family["rungs"]]
    np.testing.assert_allclose(losses, losses[0], rtol=ladder.TOLERANCE)
    assert family["loss_difference"] <= ladder.TOLERANCE


def test_no_rung_changes_a_loss_of_groot(groots_loss, frames):
    first, *others = [batches(RUNGS[n], "GR00T-N1.5", frames, 1)[0] for n in (0, 4, 5, 7)]
    told = float(groots_loss(first))
    for other in others:
        assert float(groots_loss(other)) == pytest.approx(told, rel=ladder.TOLERANCE)


@pytest.mark.parametrize("name", ["images", "text"])
def test_the_loss_that_is_compared_depends_on_pictures_and_prompts(name, groots_loss, frames):
    (batch,) = batches(RUNGS[-1], "GR00T-N1.5", frames, 1)
    swapped = replace(batch, **{name: getattr(batch, name)[::-1]})
    assert abs(float(groots_loss(swapped) / groots_loss(batch)) - 1) > 10 * ladder.TOLERANCE


def test_rows_get_shorter_and_fuller_from_rung_to_rung(found):
    rungs = found["models"]["π0.5"]["rungs"][3:]
    places = [rung["rows"][0] * rung["rows"][1] for rung in rungs]
    assert places[0] > places[1] > places[2] == places[3]
    assert rungs[-1]["rows"][0] == SIZES.samples // 4
    assert rungs[0]["fill"] < rungs[1]["fill"] < rungs[2]["fill"]


@pytest.mark.parametrize("model", MODELS)
def test_every_rung_trains_on_the_same_samples_in_the_same_steps(model, frames):
    first, *others = [batches(rung, model, frames) for rung in RUNGS]
    for other in others:
        for began, ours in zip(first, other, strict=True):
            expected, told = by_id(began), by_id(ours)
            assert told.keys() == expected.keys()
            assert len(told) == SIZES.samples
            for number, arrays in expected.items():
                for ours_, theirs in zip(told[number], arrays, strict=True):
                    np.testing.assert_array_equal(ours_, theirs)


def test_every_way_to_read_pictures_gives_the_same_ones(frames):
    (began,), *others = [batches(rung, "π0.5", frames, 1) for rung in RUNGS[:4]]
    assert began.images.shape == (8, 3, 28, 28, 3)
    assert began.images[:, :2].any(axis=(2, 3, 4)).all()
    assert not began.images[:, 2].any()
    for (other,) in others:
        np.testing.assert_array_equal(other.images, began.images)


def test_prompts_take_the_limit_at_first_and_then_the_batchs_longest(frames):
    padded, cut = (batches(rung, "GR00T-N1.5", frames, 1)[0] for rung in RUNGS[4:6])
    assert padded.prefix_segment.shape == (8, 2 * 4 + 200)
    used = int((cut.prefix_segment > 0).sum(axis=1).max())
    assert used <= cut.prefix_segment.shape[1] < used + 32
    assert cut.prefix_source[cut.prefix_segment > 0].max() < 2 * 4 + cut.text.shape[1]


def test_a_rung_changes_one_thing():
    for before, after in pairwise(RUNGS):
        changed = [
            f.name for f in fields(after) if getattr(before, f.name) != getattr(after, f.name)
        ]
        assert len(changed) == 2
        assert changed[0] == "name"


def test_a_rung_with_another_loss_is_refused():
    first = np.array([2.0, 1.0])
    assert ladder.difference("packed rows", first * (1 + 5e-6), first) < 1e-5
    with pytest.raises(ValueError, match=r"'packed rows' a loss differs .* by 2\.0e-05 of it"):
        ladder.difference("packed rows", np.array([2.0, 1.00002]), first)
