"""All benchmarks of a CPU by one command: each is one of `tools.bench`, what fails stops no other,
what is there is skipped, and committed results are replaced only where that is asked for."""

import json
import sys
from io import StringIO
from pathlib import Path

import pytest

from models.files.terminal import Console
from tools.bench import all as every
from tools.bench import pages
from tools.bench.__main__ import _WITH_PEER, _WITH_WIDTH, BENCHMARKS
from tools.bench.all import BENCHES, DATA, OUT, QUICK, CpuBench, command, main, measure, summary
from tools.bench.learn import LearnSizes
from tools.command_line import versions

GPU_ALONE = {"fp8", "processes", "products", "step"}
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
    assert {*given.values()} == BENCHMARKS.keys() - GPU_ALONE
    assert {each.of[0] for each in BENCHES if "--width" in each.of} == set(_WITH_WIDTH)
    tasks = {task.name for task in LearnSizes().tasks}
    assert {each.of[2] for each in BENCHES if "--task" in each.of} == tasks
    with_peer = {given[each.name] for each in BENCHES if each.peer}
    assert with_peer == set(_WITH_PEER)
    assert sum(each.minutes <= QUICK for each in BENCHES) > 5


def test_the_command_of_one_with_another_side(tmp_path: Path) -> None:
    by_name = {each.name: each for each in BENCHES}
    python = tmp_path / "python"
    assert command(by_name["pi05"], {}) == []
    assert command(by_name["plan"], {})[2:] == ["tools.bench", "plan", "--json"]
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
    console = Console(width=300, file=StringIO())
    first = {each.name: each for each in measure(benches, out, console, words)}
    assert {name for name, each in first.items() if each.failed} == {"fails", "silent"}
    assert first["fails"].said.endswith("ended with 1: Traceback MemoryError: no room")
    assert first["silent"].said == "failed: it has no ratio"
    assert first["apart"].said == "skipped: give --peer apart PYTHON, a Python that has openpi"
    assert {file.name for file in out.iterdir()} == {"plan.json", "recipe.json"}
    found = json.loads((out / "plan.json").read_text())
    assert found["fill"] > 0.9
    assert found["took"] == first["plan"].seconds > 0
    assert found["load_before"] >= 0
    assert found["commit"] == versions.commit()
    began, *_ = console.file.getvalue().splitlines()
    assert began == f"Measuring 4 benchmarks into {out}; in total about 4 min."
    assert json.loads((out / "recipe.json").read_text())["name"] == "recipe"

    (out / "plan.json").write_text('{"ratio": 3}')
    second = {each.name: each for each in measure(benches, out, console, words)}
    assert second["plan"].said == "earlier: 3.00 times: None, None"
    assert second["recipe"].said.startswith("earlier: ")
    assert second["fails"].failed
    assert (out / "plan.json").read_text() == '{"ratio": 3}'
    again = measure(benches[:2], out, console, words, again=True)
    assert [each.failed for each in again] == [False, True]
    assert json.loads((out / "plan.json").read_text())["ratio"] == 2.5

    shown = Console(width=300, file=StringIO())
    shown.print(summary(again))
    (row,) = (line for line in shown.file.getvalue().splitlines() if "plan" in line)
    assert "2.50 times" in row
    assert "samples/s at 99.91% fill" in row  # as committed


def test_the_list_says_how_long_each_takes_or_took(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "packing.json").write_text('{"seconds": {"packed": 1.0}, "took": 21.0}')
    (tmp_path / "recipe.json").write_text('{"seconds": {"packed": 1.0}}')
    main(listing=True, out=tmp_path)
    said = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert said.keys() >= {each.name for each in BENCHES}
    assert "21 s" in said["packing"]
    main(listing=True, quick=True, out=tmp_path)
    minutes = sum(each.minutes for each in BENCHES if each.minutes <= QUICK)
    assert f"In total about {minutes:.0f} min" in capsys.readouterr().out


def test_measuring_everything_is_said_to_take_21_hours(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(every, "command", lambda bench, peers: ["true"])
    monkeypatch.setattr(every, "_measured", lambda bench, *_: every.BenchOutcome(bench.name, "no"))
    main(out=tmp_path)
    began = " ".join(capsys.readouterr().out.split())
    assert began.startswith(f"Measuring {len(BENCHES)} benchmarks into {tmp_path}; in total about")
    assert "in total about 21 h." in began


@pytest.mark.parametrize("keep", [False, True])
def test_committed_results_and_pages_change_only_if_they_are_to(keep, monkeypatch, tmp_path):
    out, committed, rewritten = tmp_path / "out", tmp_path / "committed", []
    for folder in (out, committed):
        folder.mkdir()
    (out / "packing.json").write_text('{"ratio": 2}')
    for name in ("packing", "plan"):
        (committed / f"{name}.json").write_text('{"ratio": 1}')
    monkeypatch.setattr(every, "DATA", committed)
    monkeypatch.setattr(every, "measure", lambda *_: [])
    monkeypatch.setattr(pages, "main", lambda: rewritten.append(True))
    main(keep=keep, out=out)
    found = {file.stem: json.loads(file.read_text())["ratio"] for file in committed.iterdir()}
    assert found == {"packing": 2 if keep else 1, "plan": 1}
    assert bool(rewritten) == keep


def test_results_are_measured_beside_the_committed_ones():
    assert OUT != DATA
    assert str(OUT.relative_to(pages.ROOT)) == "runs/bench"


def test_a_name_without_another_side_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--peer names plan; expected benchmarks that compare"):
        main(out=tmp_path, peer=(("plan", tmp_path),))
