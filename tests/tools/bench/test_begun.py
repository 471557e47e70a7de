"""Every benchmark starts at its real size as its page says, until its first figure or the second of
its timed steps (tests/helpers/tools/begun.py). One that lacks a package, an environment, a GPU, a
policy or a peer says what to install or run before any work; one that a signal ends says so."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.files.terminal import Console
from parallel.planning import deviceless
from tests.helpers.guides.pages import RESULTS, ROOT, commands
from tests.helpers.tools import peer
from tools import plan
from tools.bench import __main__, learn
from tools.bench.__main__ import BENCHMARKS, COMMANDS, main
from tools.bench.all import BENCHES
from tools.recipes import training

PUBLISHED = {each.name: (*(each.of or (each.name,)), "--json") for each in BENCHES}
DRILLS = {
    "colocated", "learn_door", "learn_lift", "learn_reach", "packing_real", "predict", "qlora",
    "rl", "serve_real",
}  # fmt: skip
"""Benchmarks that take more than two minutes or 8 GB until then."""
BESIDE_OTHERS = 36
"""GB of a machine on which the largest benchmarks leave room for another test."""
WHOLE = {"recipe", "libero"}
"""Benchmarks without a figure before the last."""
WANTING = {
    **dict.fromkeys(
        ("data", "cameras", "stats", "pi05", "families"), "needs --peer PYTHON, the Python of an"
    ),
    "pi05_real": "needs --peer PYTHON, the Python of an",
    "act": "needs a GPU, or --peer PYTHON",
    **dict.fromkeys(("fp8", "products", "step"), "needs a GPU"),
    "qlora": r"needs it: pip install -e '\.\[plan\]'",
    "libero": "install it .make libero.",
    "learn_door": "install it .make metaworld.",
}
"""Parts of what a benchmark says that lacks something, and does not begin."""
PEERS = {each.name for each in BENCHES if each.peer}


def environment(home: Path) -> dict[str, str]:
    """A user's environment on one device, whose caches are in `home`."""
    flags = "--xla_backend_optimization_level=0"
    return os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def trained(home):
    """A folder with the run of a demo that has learnt nothing."""
    for command in (
        "record --suite tabletop-lift --episodes 8 --out runs/demo/dataset",
        "train --data runs/demo/dataset --preset tiny --trainer.train-steps 2 "
        "--optimizer.warmup-steps 1 --out runs/demo",
    ):
        words = [sys.executable, "-m", *f"tools.{command}".split()]
        subprocess.run(words, cwd=home, env=environment(home), check=True)
    (home / "runs/push").mkdir()
    return home


def begins(words, home, folder=ROOT):
    command = [sys.executable, "-m", "tests.helpers.tools.begun", *words]
    ran = subprocess.run(
        command, cwd=folder, env=environment(home), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.drill if name in DRILLS else pytest.mark.slow)
        for name in PUBLISHED
        if name not in PEERS
    ],
)
def test_a_benchmark_begins_at_its_real_size(name, home):
    if name == "libero" and not (ROOT / ".venv-libero").is_dir():
        pytest.skip("needs `make libero`")
    if name == "learn_door" and not (ROOT / ".venv-metaworld").is_dir():
        pytest.skip("needs `make metaworld`")
    if name == "serve_real":
        skip_without_memory()
    found = begins(PUBLISHED[name], home)
    assert (found["after"] == "the end") == (name in WHOLE)
    assert found["gb"] < 8 or name in DRILLS


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PEERS - {"pi05", "pi05_real"}))
def test_our_half_of_a_benchmark_begins_beside_a_stand_in(name, home):
    """Our halves of pi05 first compare results with openpi's, which a stand-in does not have."""
    python = peer.executable(home / "python")
    found = begins((name, "--peer", str(python), "--json"), home)
    assert found["after"] == "2 timed steps"
    assert found["gb"] < 8


def skip_without_memory():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if memory < BESIDE_OTHERS:
        pytest.skip(f"holds 24 GB, beside other tests on a machine of {memory:.0f}")


@pytest.mark.drill
def test_processes_begin_at_their_real_size_without_a_gpu(home):
    skip_without_memory()
    assert begins(("processes", "--json"), home)["after"] == "the first figure"


@pytest.mark.parametrize("name", WANTING)
def test_what_lacks_something_says_what_to_install_before_any_work(name, monkeypatch, tmp_path):
    def absent(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(deviceless, "version", absent)
    monkeypatch.delenv("CHILIAD_LIBERO_PYTHON", raising=False)
    monkeypatch.delenv("CHILIAD_METAWORLD_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    said, (benchmark, *options, _) = StringIO(), PUBLISHED.get(name, (name, "--json"))
    run = import_module(BENCHMARKS[benchmark]).run
    given = {option.removeprefix("--"): options[k + 1] for k, option in enumerate(options[::2])}
    with pytest.raises((ValueError, FileNotFoundError, ImportError), match=WANTING[name]):
        run(Console(file=said), **given)
    assert not said.getvalue()
    assert not list(tmp_path.iterdir())


def test_a_plan_that_is_to_be_compiled_needs_the_compiler_before_any_work(monkeypatch):
    def absent(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(deviceless, "version", absent)
    monkeypatch.setattr(plan, "make_task", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(ImportError, match=WANTING["qlora"]):
        plan.main(plan.PlannedRun(), plan.Machines(), compile_best=True)


@pytest.mark.parametrize("name", __main__._WITH_PEER)
def test_a_peer_that_is_not_there_is_refused_before_any_work(name, tmp_path, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, name, "it would be imported")
    with pytest.raises(FileNotFoundError, match="is not a Python; give an environment's"):
        main(name, peer=(tmp_path / "bin/python",))


def test_every_benchmark_begins_or_says_what_it_lacks():
    begun = {PUBLISHED.get(name, (name,))[0] for name in (*PUBLISHED, *WANTING, "processes")}
    assert begun == BENCHMARKS.keys()


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_every_benchmark_on_a_results_page_is_one_that_begins(page):
    begun = {" ".join(words[:-1]) for words in PUBLISHED.values()} | BENCHMARKS.keys()
    for command in commands(page):
        if " tools.bench " in command:
            said = command.partition(" tools.bench ")[2]
            bare = re.sub(r" --(json|list|keep|peer \S+)", "", said)
            assert bare in begun | COMMANDS.keys(), command
    for name in re.findall(r"(?:tools\.bench|`bench) (\w+)", page.read_text()):
        assert name in BENCHMARKS.keys() | COMMANDS.keys() | {"NAME"}


@pytest.mark.slow
def test_a_benchmark_that_a_signal_ends_says_so_and_has_no_result(home):
    command = [sys.executable, "-m", "tools.bench", "attention", "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(home), stdout=-1, stderr=-1, text=True
    ) as process:
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert said == "Stopped by a signal; nothing was measured to the end.\n"


def test_learn_is_interrupted_where_its_run_was_stopped(monkeypatch, tmp_path):
    task = learn.LearntTask(suite="tabletop-reach", episodes=1, steps=1)
    monkeypatch.setattr(training, "run", lambda *_: SimpleNamespace(finished=False))
    monkeypatch.setattr(learn.LearntTask, "recorded", lambda *_: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn.run(Console(quiet=True), "tabletop-reach", tmp_path, learn.LearnSizes(tasks=(task,)))
    assert not list(tmp_path.rglob("result.json"))
