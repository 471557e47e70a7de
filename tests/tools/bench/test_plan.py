"""The plan's benchmark gives both sides the same samples and tells full rows from empty ones."""

import pytest

from tools.bench.data.plan import mixture, packed, planned, slowest
from tools.recipes.presets import PI05


@pytest.fixture(scope="module")
def shape():
    sources = mixture(30_000, PI05)
    return sources, PI05.layout(sources)


@pytest.mark.slow
def test_our_rows_are_fuller_than_grains(shape):
    ours, other = planned(*shape, 20_000), packed(*shape, ["prefix"], 8000)
    assert 1 > ours["fill"] > 0.98 > other["fill"] > 0.5


def test_the_mixture_has_the_frames_asked_for(shape):
    frames = sum(int(source.runs.length.sum()) for source in shape[0])
    assert frames == pytest.approx(30_000, rel=0.1)


@pytest.mark.slow
def test_a_rank_of_four_rows_or_more_has_less_than_2_percent_more_attention_than_the_mean(shape):
    """With 256 rows a step of the benchmark's own mixture, of one to three cameras."""
    found = slowest(*shape)
    assert all(of["ordered"] < 0.02 for ranks, of in found.items() if int(ranks) <= 64)
    assert found["64"]["as packed"] > 0.1
