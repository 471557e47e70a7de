"""Model FLOPs, MFU and percentiles of step times, each against what a pencil gives."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models import Pi
from parallel.mesh import make_mesh
from parallel.monitor.metrics import read_metrics
from parallel.monitor.speed import Speed, model_flops
from parallel.planning.cluster import CHIPS, chip_of
from parallel.planning.flops import gradient_work
from parallel.trainer import TrainerConfig
from tests.helpers.parallel import small_pi
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import LAYOUT, OPTIMIZER, RULES, Denoiser, batch, batches, position

MESH = make_mesh(devices=jax.devices()[:1])
H100 = "NVIDIA H100 80GB HBM3"


def placed(rows):
    return jax.tree.map(jax.numpy.asarray, rows)


def by_hand(rows):
    """Forward, and a gradient for each weight, and one for what the second layer reads."""
    actions = LAYOUT.horizon * LAYOUT.action_dim
    up, down = (LAYOUT.state_dim + actions) * 32, 32 * actions
    return 2 * rows * LAYOUT.samples * (2 * up + 3 * down)


def test_a_models_flops_are_those_of_its_products_forward_and_backward():
    assert model_flops(Denoiser(32), OPTIMIZER, placed(batch(0))) == {"float32": by_hand(16)}


@pytest.mark.slow
def test_what_is_recomputed_for_backward_does_not_count():
    rows = placed(small_pi.batch(0))
    once, again = (
        replace(
            small_pi.CONFIG,
            language=replace(small_pi.CONFIG.language, remat=remat),
            expert=replace(small_pi.CONFIG.expert, remat=remat),
            compute=replace(small_pi.CONFIG.compute, chunk=chunk),
        )
        for remat, chunk in (("none", 0), ("full", 64))
    )
    found = [model_flops(Pi(config), small_pi.OPTIMIZER, rows) for config in (once, again)]
    assert found[0] == found[1]
    computed = gradient_work(Pi(again), small_pi.OPTIMIZER, rows, trips=2)
    assert computed.flops > 1.2 * sum(found[0].values())


def test_a_report_has_the_percentiles_and_rates_of_the_steps_since_the_last():
    speed = Speed(8, H100)
    assert speed.report() == {}
    speed.flops = {"bfloat16": 4e15, "float32": 1e12}
    for seconds in (*[1.0] * 18, 3.0, 11.0):
        speed.add(seconds)
    found = speed.report()
    assert found["step_seconds_p50"] == 1
    assert found["step_seconds_p95"] == pytest.approx(np.percentile([*[1.0] * 18, 3, 11], 95))
    rate = 4.001e15 * 20 / 32 / 8
    assert found["tflops_per_device"] == pytest.approx(rate / 1e12)
    assert found["mfu"] == pytest.approx(rate / 989.4e12), "of the H100's dense bfloat16 peak"
    speed.add(2.0)
    assert speed.report()["step_seconds_p95"] == 2


def test_a_model_of_float32_is_held_to_that_peak():
    speed = Speed(1, H100)
    speed.flops = {"float32": 494.7e12, "bfloat16": 1.0}
    speed.add(2.0)
    assert speed.report()["mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "TPU v5e"])
def test_a_device_whose_peak_is_not_known_has_no_mfu(kind):
    assert chip_of(kind) is None
    speed = Speed(1, kind)
    speed.flops = {"float32": 1e9}
    speed.add(1.0)
    assert speed.report().keys() == {"step_seconds_p50", "step_seconds_p95", "tflops_per_device"}


def test_devices_are_found_by_the_names_that_jax_has_for_them():
    assert chip_of(H100) is CHIPS["h100"]
    assert chip_of("NVIDIA A100-SXM4-80GB") is CHIPS["a100"]


def test_a_run_logs_its_speed_as_often_as_tensorboard_and_not_that_of_its_first_step(tmp_path):
    where = Run(tmp_path, config={"model": "toy"}, assets={})
    config = TrainerConfig(train_steps=8, log_every=3)
    train(Denoiser(32), RULES, batches, position, where, config, OPTIMIZER, mesh=MESH)
    lines = {row["step"]: row for row in read_metrics(tmp_path) if "loss" in row}
    assert [step for step, row in lines.items() if "step_seconds_p50" in row] == [3, 6]
    for logged, steps in ((3, (1, 2, 3)), (6, (4, 5, 6))):
        row, seconds = lines[logged], [lines[step]["step_seconds"] for step in steps]
        assert row["step_seconds_p50"] == pytest.approx(np.median(seconds))
        assert row["tflops_per_device"] == pytest.approx(by_hand(16) * 3 / sum(seconds) / 1e12)
        assert "mfu" not in row, "a CPU's peak is not known"
