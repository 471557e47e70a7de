"""Steps whose update would do harm, under each policy, and the same again when interrupted."""

from dataclasses import replace
from itertools import count

import jax
import numpy as np
import pytest

from parallel import checkpoint
from parallel.hosts.facts import HostFacts, put_facts
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.metrics import read_metrics
from parallel.monitor.spikes import BadStep, Spikes
from parallel.step import abstract_state, init_state, make_train_step
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batch, batches, fed, position

MESH = make_mesh(MeshConfig(data=4, fsdp=2))
ONE = make_mesh(devices=jax.devices()[:1])
CONFIG = TrainerConfig(train_steps=12, save_every=4, on_bad_step="skip")


def scaled(b, factor):
    """The batch with one row's actions times `factor`."""
    actions = b.actions.copy()
    actions[0] *= factor
    return replace(b, actions=actions)


def bad_at(steps, factor=np.nan, failing=None):
    """Batches of which some are bad, and one an error of the disk."""

    def source(start, where):
        for i, (b, info) in enumerate(batches(start, where), start):
            if i == failing:
                raise OSError(f"disk lost at {i}")
            yield scaled(b, factor) if i in steps else b, info

    return source


def run(directory, config, source, **options):
    where = Run(directory, config={}, assets={})
    return train(Denoiser(), RULES, source, position, where, config, OPTIMIZER, mesh=ONE, **options)


def lines(directory):
    found = [line for line in read_metrics(directory) if "loss" in line]
    return [(line["step"], repr(line["loss"]), line["skipped"]) for line in found]


def test_a_bad_step_changes_nothing_but_the_counts():
    abstract = abstract_state(Denoiser(), OPTIMIZER, RULES, MESH)
    step = make_train_step(Denoiser(), OPTIMIZER, MESH, abstract, hosts=True)
    placed = jax.tree.map(lambda x: x.sharding, abstract)

    def taken(b, stop_signal=0, limit=np.inf, halts_at=-1):
        state = init_state(Denoiser(), OPTIMIZER, abstract, 0)
        before = jax.device_get(state)
        b = jax.device_put(b, jax.NamedSharding(MESH, jax.P(("data", "fsdp"))))
        facts = HostFacts(stop_signal, limit, 0, 0, halts_at)
        state, metrics = step(state, b, 3, put_facts(facts, MESH))
        assert jax.tree.map(lambda x: x.sharding, state) == placed
        kept: dict[str, bool] = {}
        for x, y in zip(
            jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state)), strict=True
        ):
            kind = "arrays" if x.ndim else "counts"
            kept[kind] = kept.get(kind, True) and np.array_equal(x, y)
        return kept, bool(metrics["good"]), int(state.step)

    same, moved = {"arrays": True, "counts": False}, {"arrays": False, "counts": False}
    assert taken(batch(0)) == (moved, True, 1)
    assert taken(scaled(batch(0), np.nan)) == (same, False, 1)
    assert taken(batch(0), limit=1e-3) == (same, False, 1)
    untouched = {"arrays": True, "counts": True}
    assert taken(batch(0), stop_signal=15) == (untouched, True, 0)
    assert taken(batch(0), halts_at=0) == (moved, True, 1)
    assert taken(scaled(batch(0), np.nan), halts_at=0) == (untouched, False, 0)
    assert taken(batch(0), halts_at=1) == (untouched, True, 0)  # too late: step 0 halted the run


@pytest.mark.slow
def test_skipped_steps_are_counted_and_the_same_in_a_resumed_run(tmp_path, capsys):
    run(tmp_path / "whole", CONFIG, bad_at({5, 6, 9}))
    whole = lines(tmp_path / "whole")
    assert [(step, loss) for step, loss, skipped in whole if skipped] == [
        (5, "nan"),
        (6, "nan"),
        (9, "nan"),
    ]
    assert "3 of 12 steps were bad and were skipped." in capsys.readouterr().out
    with pytest.raises(OSError, match="disk lost at 10"):
        run(tmp_path / "cut", CONFIG, bad_at({5, 6, 9}, failing=10))
    run(tmp_path / "cut", CONFIG, bad_at({5, 6, 9}), resume=True)
    assert lines(tmp_path / "cut") == whole
    assert "3 of 12 steps were bad and were skipped." in capsys.readouterr().out


@pytest.mark.parametrize(("bad", "source"), [(6, bad_at({6})), (30, bad_at({10, 30}, 1e3))])
def test_a_bad_step_stops_the_run_each_time_until_it_is_skipped(tmp_path, bad, source):
    skipping = replace(CONFIG, train_steps=34, save_every=25, spike_factor=8.0)
    stopping = replace(skipping, on_bad_step="stop")
    said = rf"Step {bad} has .* resume with --trainer\.on_bad_step skip to leave it out"
    for resume in (False, True):
        with pytest.raises(BadStep, match=said):
            run(tmp_path / "cut", stopping, source, resume=resume)
        assert checkpoint.latest(tmp_path / "cut" / "checkpoints") == bad
    run(tmp_path / "cut", skipping, source, resume=True)
    run(tmp_path / "whole", skipping, source)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_ten_bad_steps_in_a_row_end_a_run_that_skips_them(tmp_path):
    with pytest.raises(BadStep, match=r"Step 11 .* 10 steps in a row were skipped") as caught:
        run(tmp_path, replace(CONFIG, train_steps=20), bad_at(set(range(2, 20))))
    assert caught.value.step == 11


@pytest.mark.slow
def test_a_gradient_far_above_the_usual_is_a_spike_in_a_resumed_run_too(tmp_path):
    config = replace(CONFIG, train_steps=40, save_every=7, spike_factor=8.0)
    run(tmp_path / "whole", config, bad_at({10, 30}, factor=1e3))
    whole = lines(tmp_path / "whole")
    assert [step for step, _, skipped in whole if skipped] == [30]  # at 10 nothing is usual yet
    with pytest.raises(OSError, match="disk lost"):
        run(tmp_path / "cut", config, bad_at({10, 30}, factor=1e3, failing=29))
    run(tmp_path / "cut", config, bad_at({10, 30}, factor=1e3), resume=True)
    assert lines(tmp_path / "cut") == whole
    stopping = replace(config, on_bad_step="stop")
    with pytest.raises(BadStep, match=r"Step 30 has gradient norm \d+.*, above 8 times the usual"):
        run(tmp_path / "stopping", stopping, bad_at({10, 30}, factor=1e3))


def test_the_limit_uses_only_steps_that_are_read_by_then():
    spikes = Spikes("skip", 2.0, None)
    for step in range(30):
        spikes.after(step, True, {"grad_norm": float(step)}, np.inf)
    resumed = Spikes("skip", 2.0, spikes.record())
    assert spikes.limit(30) == resumed.limit(30) == 2 * np.median(range(28))
    assert Spikes("skip", 2.0, None).limit(30) == np.inf


def following(ranges):
    """Batches of these indices, one after another."""
    return lambda start, where: (fed(i) for r in ranges for i in r)


@pytest.mark.slow
def test_a_rollback_goes_on_from_the_checkpoint_with_the_batches_after_the_bad_one(
    tmp_path, capsys
):
    config = replace(CONFIG, on_bad_step="rollback")
    result = run(tmp_path / "whole", config, bad_at({2, 8}))
    assert result.step == int(result.state.step) == 12
    said = " ".join(capsys.readouterr().out.split())
    assert "Going back to step 0 and on from there with batch 3." in said
    assert "Going back to step 4 and on from there with batch 9." in said
    run(tmp_path / "plain", CONFIG, following([range(3, 7), count(9)]))
    assert lines(tmp_path / "whole") == lines(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("failing", [10, 14])
def test_a_rollback_is_repeated_by_a_resumed_run(tmp_path, failing):
    config = replace(CONFIG, on_bad_step="rollback")
    run(tmp_path / "whole", config, bad_at({2, 8}))
    with pytest.raises(OSError, match="disk lost"):
        run(tmp_path / "cut", config, bad_at({2, 8}, failing=failing))
    run(tmp_path / "cut", config, bad_at({2, 8}), resume=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_a_checkpoint_from_which_all_goes_wrong_ends_the_run(tmp_path):
    config = replace(CONFIG, on_bad_step="rollback")
    with pytest.raises(BadStep, match="Step 4 has loss nan"):
        run(tmp_path, config, bad_at(set(range(4, 30))))
