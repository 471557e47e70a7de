import os
import signal
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from parallel import checkpoint
from parallel.hooks import Hook
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.metrics import read_metrics
from parallel.prefetch import Prefetcher
from parallel.trainer import TrainerConfig, check_start
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, fed, losses, position

MESH = make_mesh(MeshConfig(data=4, fsdp=2))
CONFIG = TrainerConfig(train_steps=12, save_every=4, log_every=3)


def run(directory, config=CONFIG, source=batches, model=None, mesh=MESH, **options):
    where = Run(directory, config={"model": "toy"}, assets={})
    model = model or Denoiser()
    return train(model, RULES, source, position, where, config, OPTIMIZER, mesh=mesh, **options)


def failing_at(step, make=None):
    """Batches that at one step are what `make` gives, or an error."""

    def source(start, where):
        for i, (b, facts) in enumerate(batches(start, where), start):
            if i == step and make is None:
                raise OSError(f"disk lost at {i}")
            yield make(b) if i == step and make else b, facts

    return source


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = run(directory)
    assert result.finished
    assert result.step == int(result.state.step) == 12
    return losses(directory)


def test_every_step_is_logged_once_with_its_times(tmp_path, uninterrupted):
    assert [step for step, _ in uninterrupted] == list(range(12))
    run(tmp_path, config=replace(CONFIG, train_steps=4))
    *lines, save = read_metrics(tmp_path)
    assert len(lines) == 4
    assert save.keys() == {"step", "save_blocking_seconds"}
    assert save["step"] == 3
    assert save["save_blocking_seconds"] > 0
    for line in lines:
        assert {"grad_norm", "learning_rate", "count", "samples_per_second"} < line.keys()
        assert line["step_seconds"] > 0
        share = line["data_wait"] / line["step_seconds"]
        assert share >= 0
        assert line["data_wait_share"] == pytest.approx(share)
        assert 0 <= line["data_ready"] <= 2
        assert line["samples"] == 24
        assert line["fill"] == 24 * 3 / (16 * 8)
    assert (tmp_path / "tensorboard").is_dir()


def test_a_run_whose_data_failed_resumes_with_the_same_losses(tmp_path, uninterrupted):
    with pytest.raises(OSError, match="disk lost at 7"):
        run(tmp_path, source=failing_at(7))
    assert checkpoint.latest(tmp_path / "checkpoints") == 4
    run(tmp_path, resume=True)
    assert losses(tmp_path) == uninterrupted


def test_a_run_whose_last_checkpoint_is_damaged_goes_back_and_repeats_the_same(
    tmp_path, uninterrupted, capsys
):
    with pytest.raises(OSError, match="disk lost at 10"):
        run(tmp_path, source=failing_at(10))
    file = next((tmp_path / "checkpoints" / "8" / "state" / "d").iterdir())
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run(tmp_path, resume=True)
    said = capsys.readouterr().out
    assert f"Checkpoint 8 is damaged and was set aside as 8.damaged: {file} has digest" in said
    assert f"Resuming {tmp_path} at step 4 of 12." in said
    assert losses(tmp_path) == uninterrupted
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 8, 12]


def test_a_run_resumes_on_another_mesh(tmp_path, uninterrupted):
    with pytest.raises(OSError, match="disk lost"):
        run(tmp_path, source=failing_at(5))
    run(tmp_path, resume=True, mesh=make_mesh(MeshConfig(fsdp=4)))
    ours, other = np.array(losses(tmp_path)), np.array(uninterrupted)
    np.testing.assert_allclose(ours, other, rtol=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_with_all_steps_before_it_saved(
    tmp_path, uninterrupted
):
    def poison(b):
        actions = b.actions.copy()
        actions[0, 0, 0, 0] = np.nan
        return replace(b, actions=actions)

    with pytest.raises(ValueError, match="Step 7 has loss nan"):
        run(tmp_path, source=failing_at(7, poison))
    assert checkpoint.latest(tmp_path / "checkpoints") == 7
    run(tmp_path, resume=True)
    assert losses(tmp_path) == uninterrupted


def test_evaluations_are_logged_and_see_the_state_after_so_many_updates(tmp_path):
    seen = []

    def evaluate(step, state, stopping):
        seen.append((step, int(state.step)))
        return {"eval_loss": 0.5}

    run(tmp_path, hooks=[Hook(5, evaluate)])
    assert seen == [(5, 5), (10, 10)]
    found = [line["step"] for line in read_metrics(tmp_path) if "eval_loss" in line]
    assert found == [4, 9]


def test_a_finished_run_resumed_trains_no_more(tmp_path):
    run(tmp_path, config=replace(CONFIG, train_steps=4))
    before = losses(tmp_path)
    result = run(tmp_path, config=replace(CONFIG, train_steps=4), source=None, resume=True)
    assert result.finished
    assert int(result.state.step) == 4
    assert losses(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_steps": 0}, "train_steps is 0; it must be at least 1"),
        ({"log_every": 0}, "log_every is 0; it must be at least 1"),
        ({"save_every": -1}, "save_every is -1; it must be at least 0"),
        ({"keep": 0}, "keep is 0; it must be at least 1"),
        ({"keep_every": -1}, "keep_every is -1"),
        ({"patience": -1}, "patience is -1"),
        ({"eval_every": -1}, "eval_every is -1"),
        ({"accumulation": 0}, "accumulation is 0; it must be at least 1"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"on_bad_step": "halt"}, "on_bad_step is 'halt'; choose one of stop, skip, rollback"),
        ({"spike_factor": -1.0}, "spike_factor is -1.0; it must be above 1"),
        ({"spike_factor": 0.5}, "spike_factor is 0.5; it must be above 1"),
    ],
)
def test_settings_that_no_run_could_go_by_are_refused_before_anything_starts(
    tmp_path, changes, said
):
    config = replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=rf"^trainer\.{said}"):
        check_start(16, MESH, config, OPTIMIZER)
    with pytest.raises(ValueError, match=rf"^trainer\.{said}"):
        run(tmp_path / "run", config, source=None)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten_nor_resumed_from_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run to resume: it has no config\.json"):
        run(tmp_path, resume=True)
    run(tmp_path, config=replace(CONFIG, train_steps=4))
    with pytest.raises(ValueError, match="holds a run already, saved at step 4"):
        run(tmp_path)


def test_resuming_with_another_model_is_refused_and_changes_nothing(tmp_path):
    run(tmp_path, config=replace(CONFIG, train_steps=4))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match="checkpoint of another model: params/down/kernel"):
        run(tmp_path, model=Denoiser(hidden=64), resume=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_a_signal_that_ends_the_loader_too_still_saves_and_says_so(
    tmp_path, uninterrupted, capsys, monkeypatch
):
    trained, waiting, take = threading.Event(), threading.Event(), Prefetcher.take

    def noted(*arguments):
        if trained.is_set():
            waiting.set()
        return take(*arguments)

    monkeypatch.setattr(Prefetcher, "take", noted)

    def source(start, where):
        yield from (fed(i) for i in range(start, 5))
        assert waiting.wait(300)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("Worker process was terminated")

    def evaluate(step, state, stopping):
        trained.set()
        return {}

    result = run(tmp_path, source=source, hooks=[Hook(5, evaluate)])
    assert not result.finished
    assert (
        "After the signal, the loader failed: RuntimeError('Worker process"
        in capsys.readouterr().out
    )
    assert checkpoint.latest(tmp_path / "checkpoints") == result.step == 5
    run(tmp_path, resume=True)
    assert losses(tmp_path) == uninterrupted


def test_data_that_ends_early_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="ended after 3 of 12 steps"):
        run(tmp_path, source=lambda start, where: iter([fed(i) for i in range(3)]))


@pytest.mark.slow
def test_a_run_told_to_stop_does_not_wait_for_slow_data(tmp_path, uninterrupted, monkeypatch):
    trained, released = threading.Event(), threading.Event()
    monkeypatch.setattr("parallel.prefetch._PATIENCE", 0.1)

    def source(start, where):
        yield from (fed(i) for i in range(start, 5))
        assert trained.wait(300)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        released.wait(600)

    def evaluate(step, state, stopping):
        trained.set()
        return {}

    result = run(tmp_path, source=source, hooks=[Hook(5, evaluate)])
    released.set()
    assert not result.finished
    assert checkpoint.latest(tmp_path / "checkpoints") == result.step == 5
    run(tmp_path, resume=True)
    assert losses(tmp_path) == uninterrupted


def test_an_evaluation_is_told_of_a_signal_and_not_logged(tmp_path):
    asked = []

    def evaluate(step, state, stopping):
        asked.append(stopping())
        os.kill(os.getpid(), signal.SIGTERM)
        asked.append(stopping())
        return {"eval_loss": 0.5}

    result = run(tmp_path, hooks=[Hook(5, evaluate)])
    assert asked == [False, True]
    assert result.step == checkpoint.latest(tmp_path / "checkpoints") == 5
    assert not [line for line in read_metrics(tmp_path) if "eval_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 8])
def test_an_evaluation_that_signals_interrupt_is_made_once_before_the_run_goes_on(tmp_path, at):
    made, begun, signals = [], [], [signal.SIGTERM] * 2

    def evaluate(step, state, stopping):
        if step == at and signals:
            os.kill(os.getpid(), signals.pop())
        if stopping():
            return {}
        made.append((step, int(state.step)))
        return {"val_loss": 1 / step}

    def begin(step, state, stopping):  # as an evaluation in closed loop
        return {} if stopping() else begun.append(step) or {}

    config = replace(CONFIG, train_steps=8, eval_every=4, keep_best="val_loss")
    options = {"config": config, "hooks": [Hook(4, evaluate), Hook(4, begin)]}
    for resume in (False, True):
        stopped = run(tmp_path, resume=resume, **options)
        assert (stopped.step, stopped.finished) == (at, False)
    for _ in range(2):
        assert run(tmp_path, resume=True, **options).finished
        assert (made, begun) == ([(4, 4), (8, 8)], [4, 8])
    found = [line for line in read_metrics(tmp_path) if "val_loss" in line]
    assert [(line["step"], line["val_loss"]) for line in found] == [(3, 1 / 4), (7, 1 / 8)]
    assert ["evaluated_late" in line for line in found] == [at == 4, at == 8]
    assert [step for step, _ in losses(tmp_path)] == list(range(8))


def test_an_owed_evaluation_that_is_no_better_ends_a_run_without_patience_left(tmp_path):
    signals = [signal.SIGTERM]

    def evaluate(step, state, stopping):
        if step == 8 and signals:
            os.kill(os.getpid(), signals.pop())
        return {} if stopping() else {"val_loss": float(step)}

    config = replace(CONFIG, eval_every=4, patience=1)
    options = {"config": config, "hooks": [Hook(4, evaluate)]}
    stopped = run(tmp_path, **options)
    assert (stopped.finished, stopped.exit_code) == (False, 75)
    ended = run(tmp_path, resume=True, **options)
    assert (ended.step, ended.finished, ended.exit_code) == (8, True, 0)


def test_a_signal_while_compiling_leaves_nothing_to_save(tmp_path, capsys):
    class Slow(Denoiser):
        def loss(self, params, batch, key):
            if isinstance(batch.state, jax.core.Tracer):
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(params, batch, key)

    result = run(tmp_path, model=Slow())
    assert (result.step, result.finished, result.exit_code) == (0, False, 75)
    assert "Stopped by SIGTERM after step 0 of 12, nothing to save yet" in capsys.readouterr().out
    assert checkpoint.latest(tmp_path / "checkpoints") is None
    assert losses(tmp_path) == []
