"""`make gpu` shrunk to a CPU: every benchmark runs, what fails is recorded and stops no other, what
lacks is named, and the page says what the JSON says."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jax
import pytest

from models.terminal import Console
from parallel.planning.random_batch import random_batch
from tools.bench import gpu
from tools.bench.attempt import tell
from tools.bench.gpu import MEASUREMENTS, PAGE, RESULTS, errors, main
from tools.bench.gpu_page import page
from tools.bench.models import step
from tools.bench.process import ended, last_json

CHEAP = ("attention", "act")
"""Benchmarks that compile for less than a minute; `make drill` runs the others."""
BENCHES = [
    pytest.param(
        each, id=each.name, marks=pytest.mark.slow if each.name in CHEAP else pytest.mark.drill
    )
    for each in MEASUREMENTS
    if each.module and not each.wants
]


@pytest.mark.slow
@pytest.mark.parametrize("each", BENCHES)
def test_a_benchmark_runs_shrunk_and_its_result_makes_a_section(each, tmp_path):
    found = import_module(each.module).run(Console(quiet=True), tiny=True)
    assert not list(errors(found))
    assert found["ratio"] > 0
    result = {"name": each.name, "began": "then", **found}
    (tmp_path / f"{each.name}.json").write_text(json.dumps(result))
    made = page(tmp_path, MEASUREMENTS)
    assert f"## {each.name}: {each.about}" in made
    assert made.count("\n| ") > 2


MACHINE = {"platform": "gpu", "device": "1 × A GPU", "python": "3.12", "packages": "jax 0.12"}


def test_a_failure_is_recorded_stops_no_other_and_is_tried_again(monkeypatch, tmp_path, capsys):
    ran = []

    def run(each, limit, tiny, gpus):
        ran.append(each.name)
        result = {"name": each.name, "part": each.part, "began": "then", "seconds": 1.0}
        inner = [{"batch": 32, "error": "out of memory"}] if each.name == "act" else []
        return result | {"rows": inner}

    monkeypatch.setattr(gpu, "describe", lambda: MACHINE)
    monkeypatch.setattr(gpu, "run", run)
    options = ["--tiny", "--out", str(tmp_path), "--part", "act", "rl"]
    assert main(options) == 1
    assert ran == ["act", "act_openpi", "colocated"]
    assert "act: 1 failed: out of memory" in capsys.readouterr().out
    assert json.loads((tmp_path / "act.json").read_text())["machine"]["device"] == "1 × A GPU"
    assert main(options) == 1
    assert ran == ["act", "act_openpi", "colocated", "act"]
    said = capsys.readouterr().out
    assert "colocated  RL with environments, policy and learner on the GPU: finished" in said
    assert main([*options, "--again"]) == 1
    assert ran[4:] == ["act", "act_openpi", "colocated"]
    assert "out of memory" in (tmp_path / "gpu.md").read_text()


def test_without_time_for_it_a_part_is_left_for_the_next_call(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "run", lambda *_: pytest.fail("it was begun"))
    options = gpu._parser().parse_args(["--minutes", "1"])
    assert gpu.measure(["fp8"], tmp_path, options, MACHINE, time.monotonic()) == 0
    said = capsys.readouterr().out
    assert "No time left for fp8, products; run the same command again to continue" in said
    assert said.endswith(" with them, with --minutes 4.\n")
    options = gpu._parser().parse_args([])
    assert gpu.measure(["fp8"], tmp_path, options, MACHINE, time.monotonic() - 540) == 0
    assert capsys.readouterr().out.endswith(
        "No time left for fp8, products; run the same command again to continue with them.\n"
    )


def test_what_failed_is_tried_again_after_what_was_never_tried(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(gpu, "run", lambda each, *_: ran.append(each.name) or {"error": "no"})
    (tmp_path / "fp8.json").write_text('{"error": "It was stopped"}')
    options = gpu._parser().parse_args([])
    assert gpu.measure(["fp8"], tmp_path, options, MACHINE, time.monotonic()) == 1
    assert ran == ["products", "fp8"]


def test_what_fails_sooner_than_before_leaves_what_was_measured(monkeypatch, tmp_path):
    options, file = gpu._parser().parse_args([]), tmp_path / "act.json"
    bad = {"batch": 8, "error": "out of memory"}

    def tried(*rows, name="rows"):
        found = {name: list(rows), "error": "It was stopped after 360 s"}
        monkeypatch.setattr(gpu, "run", lambda *_: found)
        assert gpu.measure(["act"], tmp_path, options, MACHINE, time.monotonic()) == 1
        return json.loads(file.read_text())[name]

    assert tried({"batch": 1}, {"batch": 2}) == [{"batch": 1}, {"batch": 2}]
    assert tried({"batch": 1}, bad, bad) == [{"batch": 1}, {"batch": 2}]
    assert tried({"batch": 1}, {"batch": 4}) == [{"batch": 1}, {"batch": 4}]
    file.write_text("damaged {")
    figures = {"ours": {"1": 3.5, "2": 4.5}}
    assert tried(figures, name="figures") == [figures]
    assert tried(name="figures") == [figures]


def test_processes_on_one_gpu_are_left_out(tmp_path, capsys):
    options = gpu._parser().parse_args([])
    assert gpu.measure(["multi"], tmp_path, options, MACHINE, time.monotonic()) == 0
    found = json.loads((tmp_path / "processes.json").read_text())
    assert found["left_out"] == "it needs 2 GPUs or more"


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "describe", lambda: {"platform": "cpu", "device": "1 × cpu"})
    assert main(["--part", "fp8"]) == 1
    assert "no NVIDIA GPU that JAX can use: JAX sees only 1 × cpu" in capsys.readouterr().out


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


def test_packages_that_other_packages_require_on_this_system_are_named(monkeypatch):
    monkeypatch.setattr(gpu, "_owners", lambda: {"httpx2": ["httpx2"]})
    monkeypatch.setattr(gpu, "needed", lambda each: ["httpx2"])
    asked = ["core2==2; sys_platform != 'emscripten'", "js; sys_platform == 'emscripten'"]
    monkeypatch.setattr(gpu, "requires", lambda name: [*asked, "brotli; extra == 'brotli'"])

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gpu, "distribution", absent)
    assert gpu.incomplete(MEASUREMENTS[1]) == ["core2"]


def test_what_a_python_lacks_is_named_for_each_part(monkeypatch):
    by_name = {each.name: each for each in MEASUREMENTS}
    assert all(gpu.lacking(each) == [] for each in MEASUREMENTS)
    monkeypatch.setattr(gpu, "_is_here", lambda name: name not in ("mujoco", "tyro", "openpi"))
    assert gpu.lacking(by_name["attention"]) == ["tyro"]
    assert gpu.lacking(by_name["sim"]) == ["mujoco", "tyro"]
    assert gpu.run(by_name["sim"], 1)["error"] == "This Python lacks mujoco, tyro."
    assert gpu.run(by_name["pi05"], 1)["left_out"] == "not installed here: openpi"


@pytest.mark.slow
def test_the_bytes_of_a_step_are_its_own_programs_whatever_ran_before():
    preset, mesh = step.benched("tiny"), step.make_mesh(step.MeshConfig(), jax.devices()[:1])
    held = [
        step.stepper(
            preset.model,
            preset.optimizer,
            jax.device_put(random_batch(preset.model, rows, 2)),
            mesh,
        )[1]
        for rows in (4, 1)
    ]
    assert held[1] < held[0]


def test_the_gpu_tests_are_found():
    names = {file.name for file in gpu.gpu_tests()}
    assert {"test_gpu.py", "test_attention.py", "test_physics.py"} <= names


def test_each_measurement_is_a_benchmark_by_its_name_or_that_beside_a_peer():
    from tools.bench.__main__ import _WITH_PEER, _WITH_TINY, BENCHMARKS

    for each in (each for each in MEASUREMENTS if each.module):
        name = each.name.removesuffix("_openpi")
        assert BENCHMARKS[name] == each.module
        assert name in _WITH_TINY
        assert "--peer" not in each.options or name in _WITH_PEER
        assert each.seconds <= each.limit


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
        "tests, attention, unrolled, pi05, products, act, act_openpi, sim, colocated, processes"
    )
    assert f"Not measured yet: {missing}." in made
    assert "2026-12-01T00:00:00Z on 1 × NVIDIA H200, Python 3.12.3, jax 0.11.2, 80.5 s" in made
    assert "1.25 times: 50.0 samples/s, 40.0 in bf16." in made
    assert "| model | precision | mfu | parameters | error |" in made
    assert "| pi05 | bf16 | 0.432 | 3,351,374,624 |  |" in made
    assert "| groot |  |  |  | RESOURCE_EXHAUSTED |" in made
    assert "It was stopped after 240 s:" in made
