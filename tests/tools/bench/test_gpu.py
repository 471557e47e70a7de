"""`make gpu` shrunk to a CPU: every benchmark runs, what fails is recorded and stops no other, what
is cut short keeps its rows, and the page says what the JSON says."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from models.files.terminal import Console
from parallel.planning.cluster import CHIPS
from parallel.planning.random_batch import random_batch
from tools.bench import gpu
from tools.bench.__main__ import _WITH_PEER, _WITH_TINY, BENCHMARKS
from tools.bench.attempt import tell
from tools.bench.gpu import MEASUREMENTS, PAGE, PARTS, RESULTS, errors, main, measure, unpack
from tools.bench.gpu_page import page
from tools.bench.models import step
from tools.bench.models.stepper import held_bytes, stepper
from tools.bench.process import ended, last_json

CHEAP = ("attention", "act")
"""Benchmarks that compile for less than a minute; `make drill` runs the others."""
BENCHES = [
    pytest.param(
        each, id=each.name, marks=pytest.mark.slow if each.name in CHEAP else pytest.mark.drill
    )
    for each in MEASUREMENTS
    if not each.tests and not each.arguments
]
MACHINE = {"platform": "gpu", "device": "1 × A GPU", "python": "3.12", "packages": "jax 0.12"}
BY_NAME = {each.name: each for each in MEASUREMENTS}


@pytest.mark.slow
@pytest.mark.parametrize("each", BENCHES)
def test_a_benchmark_runs_shrunk_and_its_result_makes_a_section(each, tmp_path):
    found = import_module(BENCHMARKS[each.name]).run(Console(quiet=True), tiny=True)
    assert not list(errors(found))
    assert found["ratio"] > 0
    result = {"name": each.name, "began": "then", **found}
    (tmp_path / f"{each.name}.json").write_text(json.dumps(result))
    made = page(tmp_path, MEASUREMENTS)
    assert f"## {each.name}: {each.about}" in made
    assert made.count("\n| ") > 2


def test_a_part_shares_its_time_a_failure_stops_no_other_and_results_travel_in_one_file(
    monkeypatch, tmp_path, capsys
):
    limits = []

    def run(each, limit, tiny):
        limits.append((each.name, round(limit)))
        inner = [{"batch": 32, "error": "out of memory"}] if each.name == "act" else []
        return {"name": each.name, "part": each.part, "began": "then", "rows": inner}

    monkeypatch.setattr(gpu, "run", run)
    out, folder, made = tmp_path / "out" / "gpu.tar", tmp_path / "results", tmp_path / "gpu.md"
    assert measure(["step"], 210, out, MACHINE) == 0
    assert measure(["act", "rl"], 100, out, MACHINE) == 1
    assert limits == [("step", 210), ("products", 50), ("act", 100), ("colocated", 100)]
    said = capsys.readouterr().out
    assert "| 32 | out of memory |" in said
    assert "Failed: act." in said
    unpack([out], folder, made)
    assert {file.stem for file in folder.iterdir()} == {name for name, _ in limits}
    assert json.loads((folder / "act.json").read_text())["machine"] == MACHINE
    assert "1 × A GPU" in made.read_text()


def test_of_files_with_the_same_measurement_the_last_counts(monkeypatch, tmp_path):
    files = []
    for began in ("first", "last"):
        result = {"name": "fp8", "began": began}
        monkeypatch.setattr(gpu, "run", lambda *_, result=result: result)
        files.append(tmp_path / f"{began}.tar")
        measure(["fp8"], 1, files[-1], MACHINE)
    unpack(files, tmp_path, tmp_path / "gpu.md")
    assert json.loads((tmp_path / "fp8.json").read_text())["began"] == "last"


def test_a_file_that_no_gpu_measured_is_refused(monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.tar"
    file.write_text("words")
    assert main(["--unpack", str(file)]) == 1
    assert "give a file that --out named" in capsys.readouterr().out
    for name, found in (("fp8", {"tiny": True}), ("../fp8", {})):
        file.unlink()
        monkeypatch.setattr(gpu, "run", lambda *_, r=found | {"name": name, "began": ""}: r)
        measure(["fp8"], 1, file, MACHINE)
        assert main(["--unpack", str(file)]) == 1
        assert f"{file} holds {name}.json, which no GPU has measured" in capsys.readouterr().out
    assert main(["--unpack", str(tmp_path / "none.tar")]) == 1
    assert "none.tar" in capsys.readouterr().out


def test_what_is_cut_short_keeps_its_rows_and_is_no_failure(monkeypatch):
    stopped = {"error": "It was stopped after 0 s: "}
    monkeypatch.setattr(gpu, "ended", lambda *_: stopped | {"rows": [{"batch": 1}]})
    found = gpu.run(BY_NAME["act"], 0)
    assert found["rows"] == [{"batch": 1}]
    assert found["stopped"] == 0
    assert "Stopped after 0 s" in gpu.section(found | {"machine": MACHINE}, "acting")
    assert not list(errors(found))
    monkeypatch.setattr(gpu, "ended", lambda *_: dict(stopped))
    assert list(errors(gpu.run(BY_NAME["act"], 0))) == [stopped["error"]]
    monkeypatch.setattr(gpu, "ended", lambda *_: {"name": "act", "rows": []})
    assert gpu.run(BY_NAME["act_openpi"], 0)["name"] == "act_openpi"


def test_the_outcomes_of_tests_are_read_though_pytest_did_not_finish():
    said = """
tests/models/test_gpu.py::test_one[blocked 1] PASSED                     [ 25%]
tests/models/test_gpu.py::test_one[dense] SKIPPED (no NVIDIA GPU here)   [ 50%]
tests/models/test_gpu.py::test_two FAILED                                [ 75%]
"""
    rows = gpu.outcomes(said + "tests/models/test_gpu.py::test_three ")["rows"]
    assert rows == [
        {"name": "tests/models/test_gpu.py::test_one[blocked 1]", "outcome": "passed"},
        {
            "name": "tests/models/test_gpu.py::test_one[dense]",
            "outcome": "skipped",
            "why": "no NVIDIA GPU here",
        },
        {"name": "tests/models/test_gpu.py::test_two", "outcome": "failed", "error": "FAILED"},
    ]
    found = gpu.outcomes(said + "FAILED tests/models/test_gpu.py::test_two - assert 1 < 0\n")
    assert list(errors(found)) == ["assert 1 < 0"]
    assert "[ 75%]" in found["said"]
    assert gpu.outcomes("no tests ran") == {}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "describe", lambda: {"platform": "cpu", "device": "1 × cpu"})
    assert main(["--part", "fp8"]) == 1
    assert "no NVIDIA GPU: JAX sees only 1 × cpu" in capsys.readouterr().out


def test_a_process_that_dies_or_hangs_gives_its_error():
    died = [sys.executable, "-c", "import sys; print('{}'); sys.exit('CUDA: out of memory')"]
    found = ended(died, {}, 60, last_json)
    assert found == {"error": "It ended with 1: CUDA: out of memory"}
    hangs = [sys.executable, "-c", "print('at work', flush=True); import time; time.sleep(60)"]
    found = ended(hangs, {}, 1.5, last_json)
    assert found["error"].startswith("It was stopped after 2 s")
    half = "print('{\"rows\": [1]}', flush=True); import os; os.kill(os.getpid(), 9)"
    found = ended([sys.executable, "-c", half], {}, 60, last_json)
    assert found == {"rows": [1], "error": "It was ended by SIGKILL."}
    said = [sys.executable, "-c", "print('a line'); print('{\"ratio\": 2}')"]
    assert ended(said, {}, 60, last_json) == {"ratio": 2}


@pytest.mark.parametrize("status", [0, 1])
def test_what_a_process_left_running_is_stopped(status):
    leaves = (
        "import subprocess, sys; left = subprocess.Popen(['sleep', '60']);"
        f"print('{{\"pid\": %d}}' % left.pid); sys.exit({status})"
    )
    assert_ends(ended([sys.executable, "-c", leaves], {"PATH": os.defpath}, 60, last_json)["pid"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_the_one_that_started_it(number, tmp_path):
    file = tmp_path / "pid"
    file.touch()
    inner = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    outer = (
        "import sys; from tools.bench.process import ended, last_json;"
        f"ended([sys.executable, '-c', {inner!r}], {{}}, 60, last_json)"
    )
    with subprocess.Popen([sys.executable, "-c", outer], cwd=gpu.ROOT) as process:
        while not (pid := file.read_text()):
            time.sleep(0.02)
        process.send_signal(number)
    assert_ends(pid)


def assert_ends(pid):
    """Asserts that a process is gone within five seconds."""
    until, status = time.monotonic() + 5, Path(f"/proc/{pid}/status")
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_a_benchmark_has_measured_is_told_where_stdout_is_for_json(capsys):
    tell(Console(), {"rows": []})
    assert capsys.readouterr().out == ""
    tell(Console(stderr=True), {"rows": [1]})
    assert last_json(capsys.readouterr().out) == {"rows": [1]}


@pytest.mark.parametrize(("gib", "shares"), [(73, [1, 1, None, 1]), (129, [1, 1, 1, 1])])
def test_cards_of_80_and_of_141_gb_run_the_same_programs(monkeypatch, gib, shares):
    pi05 = {"full": 63.9, "dots": 91.7}
    card = SimpleNamespace(memory_stats=lambda: {"bytes_limit": gib * 2**30})
    monkeypatch.setattr(step.jax, "devices", lambda: [card])
    monkeypatch.setattr(step, "_config", lambda _, way, share: share * pi05[way.remat] * 2**30)
    monkeypatch.setattr(step, "held", lambda config, *_: config)
    preset = step.benched("tiny")
    assert [next(step.fitting(preset, way, 8, 4), None) for way in step.WAYS] == shares


@pytest.mark.slow
def test_the_bytes_and_the_prediction_of_a_step_are_its_own_programs_whatever_ran_before():
    preset, mesh = step.benched("tiny"), step.make_mesh(step.MeshConfig(), jax.devices()[:1])
    programs = [
        stepper(
            preset.model.build(),
            preset.optimizer,
            jax.device_put(random_batch(preset.model, rows, 2)),
            mesh,
        )[1]
        for rows in (4, 1)
    ]
    many, one = (step.predicted_seconds(each.as_text(), mesh, CHIPS["h100"]) for each in programs)
    assert many > one > CHIPS["h100"].step_seconds
    many, one = map(held_bytes, programs)
    assert many > one


def test_all_gpu_tests_are_named():
    files = [file for file in (gpu.ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    marked = [str(f.relative_to(gpu.ROOT)) for f in files if "mark.gpu\n" in f.read_text()]
    assert sorted(marked) == sorted(file for each in MEASUREMENTS for file in each.tests)


def test_each_measurement_is_a_benchmark_by_its_name_or_by_its_arguments():
    for each in (each for each in MEASUREMENTS if not each.tests):
        name, *options = each.arguments or (each.name,)
        assert name in _WITH_TINY
        assert name in _WITH_PEER or not options
    assert PARTS[:3] == ("kernels", "step", "act")


def test_the_page_says_what_the_json_says_and_no_more(tmp_path):
    assert PAGE.read_text() == page(RESULTS, MEASUREMENTS)
    assert "Nothing has been measured" in page(tmp_path, MEASUREMENTS)
    row = {"model": "pi05", "precision": "bf16", "mfu": 0.4321, "parameters": 3_351_374_624}
    lost = {"model": "groot", "error": "RESOURCE_EXHAUSTED"}
    result = {
        "name": "step", "began": "2026-12-01T00:00:00Z", "seconds": 80.5, "ratio": 1.25,
        "ours": "50.0 samples/s", "other": "40.0 in bf16", "rows": [row, lost],
        "machine": {"device": "1 × NVIDIA H200", "python": "3.12.3", "packages": "jax 0.11.2"},
    }  # fmt: skip
    (tmp_path / "step.json").write_text(json.dumps(result))
    (tmp_path / "fp8.json").write_text(
        json.dumps({"name": "fp8", "began": "then", "error": "It was stopped after 240 s: "})
    )
    made = page(tmp_path, MEASUREMENTS)
    missing = (
        "tests, attention, products, act, physics, sim, colocated, pi05, act_openpi, processes"
    )
    assert f"Not measured yet: {missing}." in made
    assert "2026-12-01T00:00:00Z on 1 × NVIDIA H200, Python 3.12.3, jax 0.11.2, 80.5 s" in made
    assert "1.25 times: 50.0 samples/s, 40.0 in bf16." in made
    assert "| model | precision | mfu | parameters | error |" in made
    assert "| pi05 | bf16 | 0.432 | 3,351,374,624 |  |" in made
    assert "| groot |  |  |  | RESOURCE_EXHAUSTED |" in made
    assert "It was stopped after 240 s:" in made
