"""All benchmarks of a CPU by one command: each is one of `tools.bench`, what fails stops no other,
what is there is skipped."""

import json
import sys
from pathlib import Path

import pytest

from models.terminal import Console
from tools.bench.__main__ import _WITH_PEER, _WITH_WIDTH, BENCHMARKS
from tools.bench.all import BENCHES, QUICK, CpuBench, command, listed, main, measure, summary
from tools.bench.learn import LearnSizes

GPU_ALONE = {"fp8", "processes", "products", "step"}
OF_TRAINED = {"rounding", "solver"}
"""Benchmarks of policies that another command trains."""
SMALL = "from tools.bench.data.plan import mixture, planned; import json; \
from tools.recipes.presets import PI05 as p; s = mixture(3000, p); \
print(json.dumps({'ratio': 2.5, **planned(s, p.layout(s), 1000)}))"
STANDINS = {
    "plan": ("-c", SMALL),
    "fails": ("-c", "import sys; sys.exit('Traceback\\n  somewhere\\nMemoryError: no room')"),
    "silent": ("-c", "print('{}')"),
    "recipe": ("-m", "tools.bench", "recipe", "--json"),
}


def words(bench: CpuBench) -> list[str]:
    """A stand-in's command, that needs nothing of the machine's time."""
    return [sys.executable, *STANDINS[bench.name]] if bench.name in STANDINS else []


def test_each_is_a_benchmark_and_none_that_a_cpu_can_run_is_missing() -> None:
    names = [each.name for each in BENCHES]
    assert len(set(names)) == len(names)
    given = {each.name: each.of[0] if each.of else each.name for each in BENCHES}
    assert {*given.values()} == BENCHMARKS.keys() - GPU_ALONE - OF_TRAINED
    assert {each.of[0] for each in BENCHES if "--width" in each.of} == set(_WITH_WIDTH)
    tasks = {task.name for task in LearnSizes().tasks}
    assert {each.of[2] for each in BENCHES if "--task" in each.of} == tasks
    with_peer = {given[each.name] for each in BENCHES if each.peer}
    assert with_peer == set(_WITH_PEER) - {"ladder"}
    assert sum(each.minutes <= QUICK for each in BENCHES) > 5


def test_the_command_of_one_with_another_side(tmp_path: Path) -> None:
    by_name = {each.name: each for each in BENCHES}
    python = tmp_path / "python"
    assert command(by_name["pi05"], {}) == []
    assert command(by_name["ladder"], {})[2:] == ["tools.bench", "ladder", "--json"]
    assert command(by_name["pi05"], {"pi05": [python]})[3:] == [
        "pi05",
        "--peer",
        str(python),
        "--json",
    ]
    assert command(by_name["packing_real"], {})[3:] == ["packing", "--width", "real", "--json"]
    both = command(by_name["data"], {"data": [python, tmp_path / "other"]})
    assert both[-4:] == ["--peer", str(python), str(tmp_path / "other"), "--json"]


@pytest.mark.slow
def test_a_failure_stops_no_other_and_the_next_call_goes_on(tmp_path: Path) -> None:
    out, benches = tmp_path / "out", [CpuBench(name, 1, name) for name in STANDINS]
    benches.append(CpuBench("apart", 1, "has another side", peer="openpi"))
    console = Console(quiet=True)
    first = {each.name: each for each in measure(benches, out, console, words)}
    assert {name for name, each in first.items() if each.failed} == {"fails", "silent"}
    assert first["fails"].said.endswith("ended with 1: Traceback MemoryError: no room")
    assert first["silent"].said == "failed: it has no ratio"
    assert first["apart"].said == "skipped: give --peer apart PYTHON, a Python that has openpi"
    assert {file.name for file in out.iterdir()} == {"plan.json", "recipe.json"}
    found = json.loads((out / "plan.json").read_text())
    assert found["fill"] > 0.9
    assert found["seconds"] == first["plan"].seconds > 0
    assert found["load_before"] >= 0
    assert json.loads((out / "recipe.json").read_text())["name"] == "recipe"

    (out / "plan.json").write_text("{}")
    second = {each.name: each for each in measure(benches, out, console, words)}
    assert second["plan"].said == second["recipe"].said == "already done, skipped"
    assert second["fails"].failed
    assert (out / "plan.json").read_text() == "{}"
    again = measure(benches[:2], out, console, words, again=True)
    assert [each.failed for each in again] == [False, True]
    assert json.loads((out / "plan.json").read_text())["ratio"] == 2.5

    shown = Console(width=120)
    with shown.capture() as told:
        shown.print(listed(benches, out), summary(again))
    assert "60 s" in told.get()
    assert "2.50 times" in told.get()


def test_a_name_without_another_side_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--peer names plan; expected benchmarks that compare"):
        main(out=tmp_path, peer=(("plan", tmp_path),))
