"""The float8 benchmark says what it needs where it cannot run, and its batch is π0.5's."""

import pytest

from models import PiConfig
from models.files.terminal import Console
from parallel.planning.random_batch import random_batch
from tools.bench.models import fp8, products


def test_without_a_hopper_gpu_the_benchmark_refuses_in_one_sentence():
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 9\.0 .* cpu"):
        fp8.run(Console())


@pytest.mark.slow
def test_products_are_measured_shrunk_and_refused_at_their_sizes_without_a_gpu():
    with pytest.raises(ValueError, match=r"needs a GPU; .* cpu"):
        products.run(Console())
    found = products.run(Console(), tiny=True)["rows"]
    assert not [row for row in found if "error" in row]
    assert {(row["of"], row["name"]) for row in found} == {
        *(("training", name) for name in ("bf16", "current", "block")),
        *(("acting", name) for name in ("bf16", "kept in float8", "block")),
    }


def test_the_batch_has_no_empty_place_at_the_released_sizes():
    batch = random_batch(PiConfig(), 8, 2)
    assert batch.images.shape == (8, 4, 224, 224, 3)
    assert (batch.prefix_segment > 0).all()
