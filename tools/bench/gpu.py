"""Measure everything that needs an NVIDIA GPU with one command (`make gpu`): the gpu-marked tests,
attention, training steps and float8, openpi beside ours, acting, simulation, RL, processes.

    python -m tools.bench.gpu                        # all parts, within 10 minutes
    python -m tools.bench.gpu --part attention step  # some of them
    python -m tools.bench.gpu --again --part step    # even if it is finished
    python -m tools.bench.gpu --page                 # writes the page of results
    python -m tools.bench.gpu --tiny                 # the same code shrunk, on a CPU

The command first says what it will do, how long that takes, and which packages this Python lacks.
Each measurement is a process with a time limit. Its result is written to
docs/results/gpu/NAME.json as soon as it is there, and the next call skips the measurement. If time
is too short for some, the command asks to be called again. This file imports only the standard
library, so that it can report packages that are lacking.
"""

import argparse
import ast
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools.bench.gpu_page import page
from tools.bench.process import TAIL, ended, last_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gpu"
PAGE = ROOT / "docs" / "results" / "gpu.md"
_OURS = ("models", "data", "parallel", "sim", "rl", "tools", "tests", "chiliad_client")
_MARGIN = 1.5
"""Share of its usual time that must be left for a measurement to begin; what is stopped begins anew
in the next call."""
_PATIENCE = 1800
"""Seconds after which a shrunk measurement is stopped, for machines that are otherwise busy."""


@dataclass(frozen=True)
class Measurement:
    """A benchmark of `tools.bench` (or the gpu tests, without `module`), in a process of its own.

    `seconds`: about how long it takes on an H100; `limit`: after how long it is stopped. `wants`:
    packages without which there is nothing to measure; their absence is reported and is no failure.
    """

    name: str
    part: str
    about: str
    seconds: int
    limit: int
    module: str = ""
    options: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Packages besides those that its modules import at their top."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    """Smallest number of GPUs with which there is something to measure."""


_WHOLE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
_HALF = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
_SOME = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}

MEASUREMENTS = (
    Measurement(
        "tests", "tests", "the tests marked gpu", 60, 240, needs=("pytest", "beartype"),
        environment={"XLA_FLAGS": "--xla_backend_optimization_level=3"},
    ),
    Measurement(
        "attention", "attention", "every kernel on the released models' heads", 120, 300,
        "tools.bench.models.attention",
    ),
    Measurement(
        "step", "step", "training steps of π0.5 and GR00T, bf16 and float8, MFU", 200, 540,
        "tools.bench.models.step", environment=_WHOLE,
    ),
    Measurement(
        "unrolled", "step", "the same in bf16, layers as a loop and one after the other", 240, 540,
        "tools.bench.models.unrolled", environment=_WHOLE,
    ),
    Measurement(
        "pi05", "step", "openpi's training step and sampler beside ours", 120, 300,
        "tools.bench.models.pi05", options=("--peer", sys.executable), wants=("openpi",),
        environment=_HALF,
    ),
    Measurement(
        "fp8", "fp8", "loss and gradient of π0.5 in float8 against bf16", 150, 360,
        "tools.bench.models.fp8", environment=_WHOLE,
    ),
    Measurement(
        "products", "fp8", "products of π0.5's layers, float8 by recipe against bf16", 90, 300,
        "tools.bench.models.products", environment=_WHOLE,
    ),
    Measurement(
        "act", "act", "latency of π0.5 and GR00T, batches of 1, 8 and 32", 150, 360,
        "tools.bench.models.act", environment=_WHOLE,
    ),
    Measurement(
        "act_openpi", "act", "latency of π0.5 and of openpi's in turn", 150, 360,
        "tools.bench.models.act", options=("--peer", sys.executable), wants=("openpi",),
        environment=_HALF,
    ),
    Measurement(
        "sim", "sim", "MJX (and Warp's) control steps, images of ours and through EGL", 150, 360,
        "tools.bench.sim.sim", needs=("mujoco.mjx",), environment=_SOME,
    ),
    Measurement(
        "colocated", "rl", "RL with environments, policy and learner on the GPU", 90, 300,
        "tools.bench.rl.colocated", needs=("mujoco.mjx",),
    ),
    Measurement(
        "processes", "multi", "a process for each GPU beside one with all", 100, 300,
        "tools.bench.parallel.processes", environment=_WHOLE, gpus=2,
    ),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(each.part for each in MEASUREMENTS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; returns the exit status, 1 if something failed."""
    began, options = time.monotonic(), _parser().parse_args(arguments)
    out = options.out or (ROOT / "runs" / "gpu-tiny" if options.tiny else RESULTS)
    if options.tiny and out.resolve() == RESULTS:
        _say(
            f"error: --out is {out}, which is for measured results, and those of --tiny mean "
            "nothing; give another --out."
        )
        return 1
    failed = 0
    if not options.page:
        machine = describe()
        if "error" in machine or not (options.tiny or machine["platform"] == "gpu"):
            why = machine.get("error", f"JAX sees only {machine.get('device')}.")
            _say(f"error: there is no NVIDIA GPU that JAX can use: {why}\n--tiny tries a CPU.")
            return 1
        failed = measure(options.part or PARTS, out, options, machine, began)
    file = PAGE if out == RESULTS else out / "gpu.md"
    file.write_text(page(out, MEASUREMENTS), encoding="utf-8")
    _say(f"Wrote {file} from the results in {out}.")
    return failed


def measure(
    parts: Sequence[str],
    out: Path,
    options: argparse.Namespace,
    machine: Mapping[str, str],
    began: float,
) -> int:
    """Runs the parts' measurements one after another, beginning with those that were never tried;
    returns 1 if some failed. If a measurement fails with fewer results than an earlier call, the
    earlier results are kept. `began`: start of the command, by `time.monotonic`."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = sorted(
        (each for each in MEASUREMENTS if each.part in parts),
        key=lambda each: (out / f"{each.name}.json").is_file(),
    )
    gpus = math.inf if options.tiny else int(machine["device"].split()[0])
    _say(f"{machine['device']}; Python {machine['python']}, {machine['packages']}")
    for each in wanted:
        _say(f"  {each.name:10} {_prospect(each, out, options, gpus)}")
    until = began + 60 * options.minutes
    failed, left = list[str](), list[Measurement]()
    for each in wanted:
        if _finished(each, out, options):
            continue
        room = until - time.monotonic()
        if room < _MARGIN * each.seconds and not options.tiny:
            left.append(each)
            continue
        limit = _PATIENCE if options.tiny else min(each.limit, room)
        result = run(each, limit, options.tiny, gpus) | {"machine": dict(machine)}
        problems, file = list(errors(result)), out / f"{each.name}.json"
        if not (problems and file.is_file() and _sound(_read(file)) > _sound(result)):
            text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=True) + "\n"
            file.write_text(text, encoding="utf-8")
        failed += [each.name] * bool(problems)
        _say(f"{each.name}: {_verdict(result, problems)}")
    if left:
        names, least = ", ".join(e.name for e in left), max(_MARGIN * e.seconds for e in left) / 60
        more = f", with --minutes {math.ceil(least)}" if least > options.minutes else ""
        _say(f"No time left for {names}; run the same command again to continue with them{more}.")
    if failed:
        _say(f"Failed: {', '.join(failed)}; the errors are in {out}.")
    return 1 if failed else 0


def run(
    each: Measurement, limit: float, tiny: bool = False, gpus: float = math.inf
) -> dict[str, Any]:
    """Measures in a process of its own; returns the result, or the reason as `error`."""
    began, since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    about = {"name": each.name, "part": each.part, "began": began}
    if why := _useless(each, gpus):
        return about | {"left_out": why}
    if absent := lacking(each):
        return about | {"error": f"This Python lacks {', '.join(absent)}."}
    environment = os.environ | dict(each.environment)
    if each.module:
        command = [sys.executable, "-m", "tools.bench", each.name, *each.options, "--json"]
        found = ended([*command, *["--tiny"] * tiny], environment, limit, last_json)
    else:
        found = _tested(environment, limit, tiny)
    return about | {"seconds": round(time.monotonic() - since, 1)} | found


def errors(result: Any) -> Iterator[str]:
    """Every `error` in a result, at any depth."""
    if isinstance(result, dict):
        if isinstance(result.get("error"), str):
            yield result["error"]
        for value in result.values():
            yield from errors(value)
    elif isinstance(result, list):
        for value in result:
            yield from errors(value)


def lacking(each: Measurement) -> list[str]:
    """Packages that a measurement imports and this Python does not have."""
    return _absent(needed(each))


def incomplete(each: Measurement) -> list[str]:
    """Packages that are required by the packages that a measurement imports, and that this Python
    does not have."""
    waiting = [one for name in needed(each) for one in _owners().get(name.partition(".")[0], ())]
    seen, found = set(waiting), set[str]()
    while waiting:
        for text in requires(waiting.pop()) or ():
            name = re.split(r"[^\w.-]", text)[0]
            if name in seen or not _applies(text.partition(";")[2]):
                continue
            seen.add(name)
            try:
                waiting.append(distribution(name).name)
            except PackageNotFoundError:
                found.add(name)
    return sorted(found)


@cache
def _owners() -> Mapping[str, list[str]]:
    return packages_distributions()


def _applies(marker: str) -> bool:
    """True if a requirement with that marker applies here; those of extras do not."""
    if not marker or "extra" in marker:
        return not marker
    try:
        from packaging.markers import Marker
    except ImportError:
        return False
    return Marker(marker).evaluate()


def needed(each: Measurement) -> list[str]:
    """Foreign packages that a measurement imports."""
    if each.module:
        files = [ROOT / "tools/bench/__main__.py", _file(each.module)]
    else:
        files = [ROOT / "tests/conftest.py", *gpu_tests()]
    return sorted({name for file in files if file for name in imported(file)} | set(each.needs))


def gpu_tests() -> list[Path]:
    """The files that have tests marked gpu."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if "@pytest.mark.gpu" in file.read_text(encoding="utf-8")]


@cache
def imported(file: Path) -> frozenset[str]:
    """Foreign packages that a file of ours imports at its top, by itself and through others."""
    found, waiting, seen = set[str](), [file], {file}
    while waiting:
        for name in _names(waiting.pop()):
            if name.partition(".")[0] not in _OURS:
                found.add(name.partition(".")[0])
            elif (path := _file(name)) is not None and path not in seen:
                seen.add(path)
                waiting.append(path)
    return frozenset(found - sys.stdlib_module_names)


def describe() -> dict[str, str]:
    """The first device, and the versions of JAX and its plugins; `error` if JAX does not start."""
    script = (
        "import json, sys, jax; from importlib.metadata import distributions; d = jax.devices()[0];"
        "names = {p.metadata['Name']: p.version for p in distributions()};"
        "shown = [f'{n} {v}' for n, v in sorted(names.items()) if n.startswith(('jax', 'flax'))"
        " or n in ('numpy', 'mujoco', 'mujoco-mjx', 'warp-lang') or 'cudnn' in n];"
        "print(json.dumps({'platform': d.platform, 'device': f'{len(jax.devices())} × '"
        " + d.device_kind, 'python': sys.version.split()[0], 'packages': ', '.join(shown)}))"
    )
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return ended([sys.executable, "-c", script], environment, 120, last_json)


def _say(text: str) -> None:
    """Prints as `models.terminal` does, without its packages, which may be missing here."""
    plain = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    print("".join(plain), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, help="only these parts; all, if none is named")
    add("--again", action="store_true", help="also what is finished")
    add("--minutes", type=float, default=9, help="begin nothing that would take longer (9)")
    add("--tiny", action="store_true", help="shrunk to seconds each, also without a GPU")
    add("--out", type=Path, help="folder of the results (docs/results/gpu)")
    add("--page", action="store_true", help="measure nothing, write the page")
    return parser


def _prospect(each: Measurement, out: Path, options: argparse.Namespace, gpus: float) -> str:
    if _finished(each, out, options):
        return f"{each.about}: finished, skipped"
    if why := _useless(each, gpus):
        return f"{each.about}: left out, {why}"
    if absent := lacking(each):
        return f"{each.about}: will fail, this Python lacks {', '.join(absent)}"
    if absent := incomplete(each):
        return f"{each.about}: may fail, packages that it needs lack {', '.join(absent)}"
    return f"{each.about}: about {each.seconds} s, at most {each.limit}"


def _finished(each: Measurement, out: Path, options: argparse.Namespace) -> bool:
    """True if there is a result without an error."""
    file = out / f"{each.name}.json"
    if options.again or not file.is_file():
        return False
    result = _read(file)
    return "left_out" not in result and not any(errors(result))


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        return {"error": f"{file.name} is damaged: {error}"}


def _sound(result: Any) -> int:
    """Number of figures, without those of what has an error of its own."""
    if isinstance(result, dict | list):
        parts = result.values() if isinstance(result, dict) else result
        return sum(_sound(x) for x in parts if not (isinstance(x, dict) and "error" in x))
    return int(type(result) in (int, float))


def _verdict(result: Mapping[str, Any], problems: Sequence[str]) -> str:
    if "left_out" in result:
        return f"left out, {result['left_out']}"
    done = f"done in {result.get('seconds', 0)} s"
    return f"{len(problems)} failed: {problems[0]}" if problems else done


def _tested(environment: Mapping[str, str], limit: float, tiny: bool) -> dict[str, Any]:
    """Outcomes of the gpu tests; `tiny` only collects them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        command += [*["--collect-only"] * tiny, *(str(f.relative_to(ROOT)) for f in gpu_tests())]
        found = ended(command, environment, limit, lambda said: {"said": said[-TAIL:]})
        if tiny or not report.is_file():
            return found
        tests = [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]
    if not tests:
        return found
    failures = {"error": f"{sum('error' in t for t in tests)} tests failed."}
    return {"rows": tests} | (failures if any("error" in t for t in tests) else {})


def _outcome(case: ElementTree.Element) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.get("name"), "seconds": float(case.get("time") or 0)}
    for child in case:
        said = (child.get("message") or child.text or "")[:TAIL]
        row |= {"left_out": said} if child.tag == "skipped" else {"error": said}
    return row


def _useless(each: Measurement, gpus: float) -> str:
    """Reason why there is nothing to measure on this machine, "" if there is something."""
    if absent := _absent(each.wants):
        return f"not installed here: {', '.join(absent)}"
    return f"it needs {each.gpus} GPUs or more" if gpus < each.gpus else ""


def _absent(names: Sequence[str]) -> list[str]:
    return [name for name in names if not _is_here(name)]


def _is_here(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _file(module: str) -> Path | None:
    """The file of a module of ours."""
    at = ROOT.joinpath(*module.split("."))
    return next((f for f in (at.with_suffix(".py"), at / "__init__.py") if f.is_file()), None)


def _names(file: Path) -> Iterator[str]:
    """Modules that a file imports at its top; for ours, also the packages that contain them."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
