"""A run of RL begins, ends and goes on, whatever acts and learns in it."""

import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from models.checkpoints import own
from parallel.checkpoint import CheckpointWriter
from parallel.hooks import Hook
from parallel.hosts import exits
from parallel.monitor.goodput import read_account
from parallel.runs.retention import Retention
from tests.helpers.parallel.opened import Run
from tests.helpers.rl.counted import CONFIG, Counting, losses, run
from tests.helpers.rl.opened import improve


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return out, run(out)


def test_a_run_saves_on_the_way_and_at_its_end_what_a_policy_is_loaded_from(whole):
    out, improved = whole
    assert improved.finished
    assert improved.step == 7
    assert own.steps(out / "checkpoints") == [4, 6, 7]
    saved = own.restore_params(out, "ema")
    assert np.asarray(saved["w"]) == np.asarray(improved.params["w"])
    assert [step for step, _ in losses(out)] == list(range(7))


@pytest.mark.parametrize("steps", [2, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(whole, steps, tmp_path):
    out, improved = whole
    assert run(tmp_path, config=replace(CONFIG, learner_steps=steps)).finished
    again = run(tmp_path, resume=True)
    assert np.asarray(again.params["w"]) == np.asarray(improved.params["w"])
    assert losses(tmp_path) == losses(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("given_up", [True, False])
def test_a_signal_ends_a_run_with_its_last_whole_step_saved(whole, number, given_up, tmp_path):
    def struck(step, should_stop):
        if step == 3:
            os.kill(os.getpid(), number)
            assert should_stop()
            return given_up
        return False

    stopped = run(tmp_path, Counting(struck))
    made = 3 if given_up else 4
    code = {signal.SIGTERM: 75, signal.SIGINT: 130}[number]
    assert (stopped.finished, stopped.step, stopped.exit_code) == (False, made, code)
    assert own.steps(tmp_path / "checkpoints")[-1] == made
    assert run(tmp_path, resume=True).finished
    assert losses(tmp_path) == losses(whole[0])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"source": "sha256:2"}, "its source was 'sha256:1' and is 'sha256:2' now"),
        ({"max_steps": 9}, "its max_steps was 7 and is 9 now"),
        ({"fps": 10}, "its fps was None and is 10 now"),
    ],
)
def test_a_run_is_not_resumed_in_a_changed_environment(changed, why, tmp_path):
    run(tmp_path, config=replace(CONFIG, learner_steps=2))
    other = Counting()
    other.environment = Counting.environment | changed
    with pytest.raises(ValueError, match=why + r".*--checkpoint .*/checkpoints/2 with another --"):
        run(tmp_path, other, resume=True)
    assert own.steps(tmp_path / "checkpoints") == [2]


def test_a_checkpoint_that_records_no_environment_is_resumed_and_that_is_said(whole, tmp_path):
    """Early versions' checkpoints are like this."""
    with CheckpointWriter(tmp_path / "checkpoints", {"rl": "a test"}, {}) as writer:
        place = Counting()
        place.run(lambda found: None, lambda: False, 2)
        writer.save(2, place.state(), place.record())
    (tmp_path / "config.json").write_text("{}")
    console = Console(record=True, file=StringIO())
    at = Run(tmp_path, {"rl": "a test"}, {})
    assert improve(lambda: nullcontext(Counting()), at, CONFIG, console, resume=True).finished
    assert "does not record its environment" in console.export_text()
    assert own.read_json(tmp_path, "config")["environment"] == Counting.environment


def test_a_run_is_not_resumed_for_fewer_steps_than_it_has_made(tmp_path):
    run(tmp_path, config=replace(CONFIG, learner_steps=4))
    with pytest.raises(ValueError, match="has made 4 steps already, but only 3 were asked for"):
        run(tmp_path, config=replace(CONFIG, learner_steps=3), resume=True)


def test_an_error_ends_the_run_and_the_steps_saved_before_it_are_gone_on_from(whole, tmp_path):
    def broken(step, should_stop):
        if step == 5:
            raise FloatingPointError("not finite")
        return False

    with pytest.raises(FloatingPointError, match="not finite"):
        run(tmp_path, Counting(broken))
    assert own.steps(tmp_path / "checkpoints") == [2, 4]
    assert run(tmp_path, resume=True).finished
    assert losses(tmp_path) == losses(whole[0])


def test_evaluation_sees_the_policy_before_while_and_after(tmp_path):
    seen = {}

    def evaluate(step, params, stopping):
        seen[step] = float(params["w"])
        return {"closed_loop_copy_seconds": 0.0}

    hooks = [Hook(3, evaluate, ends=True)]
    run(tmp_path, hooks=hooks)
    assert list(seen) == [0, 3, 6, 7]
    assert seen[0] == 1
    assert len(set(seen.values())) == 4
    run(tmp_path, config=replace(CONFIG, learner_steps=8), resume=True, hooks=hooks)
    assert list(seen) == [0, 3, 6, 7, 8], "a resumed run does not begin with an evaluation"


def test_a_folder_with_a_run_is_refused_without_resume_and_one_without_is_with_it(whole, tmp_path):
    with pytest.raises(ValueError, match="holds a run already, saved at step 7"):
        run(whole[0])
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        run(tmp_path, resume=True)


def test_a_run_whose_checkpoints_are_away_is_refused_and_keeps_its_metrics(tmp_path):
    run(tmp_path, config=replace(CONFIG, learner_steps=3))
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for resume in (True, False):
        with pytest.raises(FileNotFoundError, match=r"checkpoints is missing, but .* at step 3"):
            run(tmp_path, resume=resume)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    assert run(tmp_path, resume=True).finished


def test_a_damaged_line_of_the_metrics_is_set_aside_and_the_run_goes_on(whole, tmp_path):
    run(tmp_path, config=replace(CONFIG, learner_steps=3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": \n' + path.read_bytes())
    assert run(tmp_path, resume=True).finished
    assert losses(tmp_path) == losses(whole[0])
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes().startswith(b'{"step": \n')


def test_metrics_are_on_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    save = CheckpointWriter.save

    def saving(writer, step, *rest):
        assert [at for at, _ in losses(tmp_path)] == list(range(step))
        return save(writer, step, *rest)

    monkeypatch.setattr(CheckpointWriter, "save", saving)
    assert run(tmp_path, config=replace(CONFIG, learner_steps=3)).finished


def test_a_run_whose_disk_is_lost_goes_on_from_its_mirror_as_if_nothing_had_happened(
    whole, tmp_path
):
    out, mirror = tmp_path / "run", str(tmp_path / "mirror")
    run(out, config=replace(CONFIG, learner_steps=4), mirror=mirror)
    assert own.steps(tmp_path / "mirror" / "checkpoints")[-1] == 4
    shutil.rmtree(out)
    assert run(out, resume=True, mirror=mirror).finished
    assert losses(out) == losses(whole[0])
    assert own.steps(tmp_path / "mirror" / "checkpoints")[-1] == 7
    assert read_account(tmp_path / "mirror").steps == 7


@pytest.mark.parametrize("late", [0, 1])
def test_the_checkpoint_with_the_highest_success_stays_also_if_that_is_known_late(late, tmp_path):
    """`late`: an evaluation ends with the next."""
    success = {2: 0.2, 4: 0.9, 6: 0.9, 8: 0.4, 10: 0.1}
    scores, pending = {}, set()

    def evaluate(step, params, stopping):
        pending.add(step)
        for over in sorted(pending)[: len(pending) - late]:
            scores[over] = 1 - success[over]
            pending.discard(over)
        return {}

    keep = Retention(1, 0, scores, pending)
    run(tmp_path, config=replace(CONFIG, learner_steps=10), keep=keep, hooks=[Hook(2, evaluate)])
    assert own.steps(tmp_path / "checkpoints") == [4, 10]
    assert keep.best_of(own.steps(tmp_path / "checkpoints")) == 4


def test_every_so_many_checkpoints_stay(tmp_path):
    run(tmp_path, config=replace(CONFIG, save_every=1, keep=1, keep_every=3))
    assert own.steps(tmp_path / "checkpoints") == [3, 6, 7]


def test_a_run_accounts_for_its_time_over_all_its_starts(tmp_path):
    console = Console(record=True, file=StringIO())
    at, config = Run(tmp_path, {"rl": "a test"}, {}), replace(CONFIG, save_every=3)

    def killed(step, should_stop):
        if step == 5:
            raise FloatingPointError("not finite")
        return False

    with pytest.raises(FloatingPointError):
        improve(lambda: nullcontext(Counting(killed)), at, config, console)
    improve(lambda: nullcontext(Counting()), at, config, console, resume=True)
    account = read_account(tmp_path)
    assert (account.steps, account.lost_steps, account.starts) == (7, 2, 2)
    assert all(account.seconds[cause] > 0 for cause in ("step", "compile", "start", "checkpoint"))
    assert "7 steps in 2 starts, 2 lost and repeated" in console.export_text()


def test_a_record_that_no_placement_left_is_refused_by_checkpoint_and_field(tmp_path):
    class Strict(Counting):
        def restore(self, state, record):
            raise ValueError("number is 'seven', expected a whole number from 0 to 2147483648")

    run(tmp_path, config=replace(CONFIG, learner_steps=2))
    with pytest.raises(
        ValueError, match=r"checkpoints/2, position: number is 'seven'.*; copy"
    ) as no:
        run(tmp_path, Strict(), resume=True)
    assert no.value.exit_code == exits.REFUSED
