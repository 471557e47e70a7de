"""Trackers are told a run once, in the same place before and after a resume, and cost it nothing
when they fail. The services are the real libraries, without a network."""

import json
from importlib.util import find_spec

import pytest

from models.files.terminal import Console
from parallel.hooks import Hook
from parallel.monitor.metrics import MetricsWriter, read_metrics
from parallel.trackers.tracker import TrackedRun, find_tracker
from parallel.trackers.trackers import FILE_NAME, Trackers, check_trackers
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, position
from tests.helpers.parallel.tracked import read_mlflow, read_trackio, read_wandb

OWN = '''
import json

class Notes:
    """Lines in a file beside this one."""

    def __init__(self, run):
        self.id, self.place = run.id or run.name + "-1", "a file"
        self._path = __import__("pathlib").Path(__file__).parent / f"{type(self).__name__}.jsonl"

    def log(self, step, metrics):
        self.write([self.id, step, dict(metrics)])

    def finish(self, outcome):
        self.write([self.id, outcome])

    def write(self, line):
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\\n")

class Deaf(Notes):
    def log(self, step, metrics):
        raise ConnectionError("nobody is there\\nand more of it")

class Slow(Notes):
    def finish(self, outcome):
        __import__("time").sleep(0.5)

class Absent(Notes):
    def __init__(self, run):
        raise ConnectionError("no such server")
'''


def trained(directory, track):
    measured = Hook(4, lambda step, state, stopping: {"val_loss": 1 / step})
    where = Run(directory, config={"model": "toy"}, assets={})
    return train(
        Denoiser(),
        RULES,
        batches,
        position,
        where,
        TrainerConfig(train_steps=4, save_every=4, log_every=1, eval_every=4),
        OPTIMIZER,
        hooks=[measured],
        track=track,
    )


def told(directory, track, steps, start=0, resume=False, outcome="failed"):
    """Lets a run write these steps, and end so."""
    config = {"optimizer": {"name": "muon"}, "note": "<b>"}
    directory.mkdir(exist_ok=True)
    with (
        Trackers(track, directory, config, resume, Console()) as trackers,
        MetricsWriter(directory, start, trackers) as writer,
    ):
        for step in steps:
            writer.write(step, {"loss": 1 / (1 + step), "seconds/step": 0.5})
            if step % 4 == 3:
                writer.write(step, {"val_loss": 2.0**-step})
        trackers.outcome = outcome


def interrupted(directory, track):
    """A run that was lost after step 6, and went on from its checkpoint of 4 steps to its end."""
    told(directory, track, range(7))
    told(directory, track, range(4, 8), start=4, resume=True, outcome="finished")


LOSSES = [(step, 1 / (1 + step)) for step in range(8)]
HELD_OUT = [(3, 2.0**-3), (7, 2.0**-7)]


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def heard(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_at_once_hear_every_step_once_though_some_were_made_twice(tmp_path, own, capsys):
    run = tmp_path / "run"
    interrupted(run, [f"{own}:Notes", f"{own}:Deaf"])
    lines = heard(tmp_path / "Notes.jsonl")
    assert {line[0] for line in lines} == {"run-1"}
    assert [line[1] for line in lines if len(line) == 2] == ["failed", "finished"]
    rows = [(line[1], line[2]) for line in lines if len(line) == 3]
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == LOSSES
    assert [(step, row["val_loss"]) for step, row in rows if "val_loss" in row] == HELD_OUT
    said = capsys.readouterr().out
    assert ":Deaf: step 0 did not arrive (nobody is there); the run continues." in said
    assert ":Deaf: 8 lines did not arrive; metrics.jsonl has them all." in said
    book = json.loads((run / FILE_NAME).read_text())[f"{own}:Notes"]
    names = ["loss", "seconds/step", "val_loss"]
    assert book == {"id": "run-1", "step": 7, "names": names}


def test_steps_made_again_after_a_rollback_are_not_told_again(tmp_path, own):
    with Trackers([f"{own}:Notes"], tmp_path, {}, False, Console()) as trackers:
        for start, steps in ((0, range(6)), (4, range(4, 8))):
            with MetricsWriter(tmp_path, start, trackers) as writer:
                for step in steps:
                    writer.write(step, {"loss": float(start)})
    rows = [(line[1], line[2]["loss"]) for line in heard(tmp_path / "Notes.jsonl")[:-1]]
    assert rows == [*((step, 0.0) for step in range(6)), (6, 4.0), (7, 4.0)]


@pytest.mark.parametrize(("known", "heard_late"), [(True, [(3, {"val_loss": 0.125})]), (False, [])])
def test_a_run_that_was_lost_while_it_evaluated_tells_what_it_then_finds(
    tmp_path, own, known, heard_late
):
    """A book of before names were kept says nothing of what a step lacked."""
    run, track = tmp_path / "run", [f"{own}:Notes"]
    told(run, track, range(3))
    with (
        Trackers(track, run, {}, True, Console()) as trackers,
        MetricsWriter(run, 3, trackers) as writer,
    ):
        writer.write(3, {"loss": 0.25})
    if not known:
        book = json.loads((run / FILE_NAME).read_text())
        del book[track[0]]["names"]
        (run / FILE_NAME).write_text(json.dumps(book))
    (tmp_path / "Notes.jsonl").unlink()
    told(run, track, range(2, 5), start=2, resume=True)
    late = [(line[1], line[2]) for line in heard(tmp_path / "Notes.jsonl") if len(line) == 3]
    assert [row for row in late if "val_loss" in row[1]] == heard_late
    assert [step for step, row in late if "loss" in row] == [4]


@pytest.mark.parametrize("book", ["{torn", '{"a": 3}', "[]"])
def test_trackers_begin_new_runs_where_their_book_is_damaged(tmp_path, own, book, capsys):
    (tmp_path / FILE_NAME).write_text(book)
    told(tmp_path, [f"{own}:Notes"], range(2), resume=True)
    assert [line[1] for line in heard(tmp_path / "Notes.jsonl")] == [0, 1, "failed"]
    assert "trackers.json is damaged; trackers begin new runs." in capsys.readouterr().out


def test_a_training_run_tells_its_trackers_what_it_logs(tmp_path, own):
    trained(tmp_path / "run", [f"{own}:Notes"])
    *rows, ended = heard(tmp_path / "Notes.jsonl")
    logged = read_metrics(tmp_path / "run")
    assert [{"step": step, **row} for _, step, row in rows] == logged
    assert ended[1] == "finished"


def test_a_tracker_that_is_slow_to_end_is_not_told_as_one_that_lost_lines(
    tmp_path, own, capsys, monkeypatch
):
    monkeypatch.setattr("parallel.trackers.trackers._LAST_SECONDS", 0.1)
    told(tmp_path / "run", [f"{own}:Slow"], range(3))
    said = capsys.readouterr().out.replace("\n", " ")
    assert ":Slow: all lines were sent, but it has not finished, so the last may be lost." in said
    assert "did not arrive" not in said


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_it_begins(tmp_path, own):
    with pytest.raises(ValueError, match=r"Absent could not be opened: no such server\.$"):
        told(tmp_path / "run", [f"{own}:Absent"], range(3))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="'wandbb' is not a tracker; give wandb, mlflow, trackio"):
        find_tracker("wandbb")
    with (
        pytest.raises(ValueError, match="names wandb twice")
        if find_spec("wandb")
        else (pytest.raises(ValueError, match=r"pip install -e '\.\[wandb\]'"))
    ):
        check_trackers(["wandb:a", "wandb:b"])


def test_wandb_holds_a_resumed_run_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "a run"
    interrupted(run, ["wandb:arms"])
    ids, held = read_wandb(run)
    assert ids == {json.loads((run / FILE_NAME).read_text())["wandb:arms"]["id"]}
    assert held["loss"] == LOSSES
    assert held["val_loss"] == HELD_OUT


def test_mlflow_holds_a_resumed_run_once(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs MLflow: pip install -e '.[mlflow]'")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "a run"
    interrupted(run, ["mlflow:arms"])
    ids, held, statuses = read_mlflow()
    assert ids == {json.loads((run / FILE_NAME).read_text())["mlflow:arms"]["id"]}
    assert statuses == ["FINISHED"]
    assert held["loss"] == LOSSES
    assert held["val_loss"] == HELD_OUT
    data = MlflowClient().get_run(ids.pop()).data
    assert data.params == {"optimizer.name": "muon", "note": "<b>"}


def test_mlflow_takes_names_of_any_characters(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs MLflow: pip install -e '.[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from parallel.trackers.mlflow import Mlflow

    config = {"cameras": {"left (rgb)": "a", "../b": "c"}, "k" * 300: 1}
    tracker = Mlflow(TrackedRun(tmp_path, "arms", None, config))
    tracker.log(0, {"samples/pick & place": 2.0, "samples/../x": 3.0})
    tracker.finish("finished")
    from mlflow.tracking import MlflowClient

    data = MlflowClient().get_run(tracker.id).data
    assert data.metrics == {"samples/pick _ place": 2.0, "x": 3.0}
    assert data.params == {"cameras.left _rgb_": "a", "cameras.../b": "c", "k" * 250: "1"}


def test_trackio_holds_a_resumed_run_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="needs trackio: pip install -e '.[trackio]'")
    run = tmp_path / "a run"
    interrupted(run, ["trackio:arms"])
    names, held = read_trackio(tmp_path / "trackio")
    assert names == {json.loads((run / FILE_NAME).read_text())["trackio:arms"]["id"]}
    assert held["loss"] == LOSSES
    assert held["val_loss"] == HELD_OUT
