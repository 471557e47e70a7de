"""The programs that the benchmark reads are those of layers as a loop and of none."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.bench.parallel.explain import compiled_program
from tools.plan import PlannedRun
from tools.recipes.presets import TINY

DEPTH = 6
DEEP = replace(TINY, model=TINY.model.changed(vision=replace(TINY.model.vision, depth=DEPTH)))
RUN = PlannedRun(preset=f"{Path(__file__).resolve()}:DEEP", rows=16)


def turns(made):
    """Turns of the loops of the vision tower, which has no other than that over its layers."""
    return [loop["trips"] for loop in made["loops"] if loop["scope"] == "vision"]


@pytest.mark.slow
def test_the_programs_differ_in_their_loops_over_layers_and_not_in_their_products():
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    loop, unrolled = (compiled_program(replace(RUN, unroll=unroll)) for unroll in (False, True))
    assert max(turns(loop)) == DEPTH
    assert turns(unrolled) == []
    assert loop["program"]["tflop"] == pytest.approx(unrolled["program"]["tflop"], rel=0.1)
    for made in (loop, unrolled):
        program, parts = made["program"], made["scopes"].values()
        assert 0 < made["plan"]["mfu"] < 1
        assert sum(part["tflop"] for part in parts) == pytest.approx(program["tflop"])
        assert sum(part["ms"] for part in parts) < 1e3 * program["step_seconds"]
