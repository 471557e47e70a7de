import pytest
from rich.console import Console

from parallel.monitor.metrics import FILE_NAME, MetricsWriter, is_line, read_metrics
from parallel.runs.json_lines import set_damage_aside


def write(directory, steps, start=0):
    with MetricsWriter(directory, start) as writer:
        for step in steps:
            writer.write(step, {"loss": step + start / 10})


def test_resuming_drops_the_lines_past_the_checkpoint(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, range(3, 6), start=3)
    lines = [(line["step"], line["loss"]) for line in read_metrics(tmp_path)]
    assert lines == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.3), (4, 4.3), (5, 5.3)]


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    write(tmp_path, [3], start=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_failed_truncation_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, range(3))
    before = (tmp_path / FILE_NAME).read_text()

    def fail(*paths):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, [1], start=1)
    assert (tmp_path / FILE_NAME).read_text() == before


def test_a_run_that_makes_no_step_drops_none(tmp_path):
    write(tmp_path, range(3))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.sync()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_damaged_line_is_named_and_set_aside_when_the_run_goes_on(tmp_path, capsys):
    write(tmp_path, range(3))
    path = tmp_path / FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    damaged = "".join([lines[0], '{"step": 1, "lo\n', lines[2], '{"step": 3, "lo'])
    path.write_text(damaged)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a line of this log"):
        read_metrics(tmp_path)
    set_damage_aside(path, is_line, Console())
    said = capsys.readouterr().out
    assert f"{path}, line 2: damaged; the file was set aside as {path.name}.damaged" in said
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == damaged
    write(tmp_path, [3], start=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 2, 3]
