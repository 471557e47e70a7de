"""Measure all that needs an NVIDIA GPU (`make gpu`): kernels, training steps and acting; and, where
they are named, float8, simulation, RL, openpi beside ours, and several processes.

    python -m tools.bench.gpu                            # kernels, step, act: ten minutes
    python -m tools.bench.gpu --part step --out gpu.tar  # one part, its results in one file
    python -m tools.bench.gpu --unpack gpu.tar           # into docs/results/gpu, with their page
    python -m tools.bench.gpu --tiny                     # the same code shrunk, on a CPU

Each measurement is a process. Those of a part share its time (`--seconds`): one that ends early
leaves the rest of its share to the next, and one that is stopped keeps the rows that it had
measured, the most important first. Results go into the file as soon as they are there. This file
imports only the standard library, so that it starts where packages are missing.
"""

import argparse
import io
import json
import os
import re
import signal
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.gpu_page import page, section
from tools.bench.process import ended, last_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gpu"
PAGE = ROOT / "docs" / "results" / "gpu.md"
_LOG = 20_000
"""Characters of failed tests' output that are kept."""
_OUTCOME = re.compile(
    r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))? *(?:\[ *\d+%\])?$", re.MULTILINE
)
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?) - (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Measurement:
    """A benchmark of `tools.bench` by its arguments (by its name alone, if there are none), or, if
    `tests` names files, the tests in them that are marked gpu."""

    name: str
    part: str
    about: str
    arguments: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_WHOLE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
_HALF = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
_SOME = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}
_AS_USERS = {"XLA_FLAGS": "--xla_backend_optimization_level=3", "COLUMNS": "500"}
_PEER = ("--peer", sys.executable)
_KERNELS = (
    "tests/models/attention/test_attention.py",
    "tests/models/attention/test_cudnn.py",
    "tests/models/test_gpu.py",
)
_PHYSICS = ("tests/sim/environments/test_physics.py",)

MEASUREMENTS = (
    Measurement(
        "tests", "kernels", "kernels and a model against exact results", tests=_KERNELS,
        environment=_AS_USERS,
    ),
    Measurement("attention", "kernels", "every kernel on the released models' heads"),
    Measurement(
        "step", "step", "training steps of π0.5 and GR00T, predicted and measured",
        environment=_WHOLE,
    ),
    Measurement(
        "products", "act", "products of π0.5's layers, float8 by recipe against bf16",
        environment=_WHOLE,
    ),
    Measurement(
        "act", "act", "latency of π0.5 and GR00T, batches of 1, 8 and 32", environment=_WHOLE
    ),
    Measurement("fp8", "fp8", "gradient of π0.5 in float8 against bf16", environment=_WHOLE),
    Measurement(
        "physics", "sim", "Warp's physics against XLA's", tests=_PHYSICS, environment=_AS_USERS
    ),
    Measurement(
        "sim", "sim", "MJX (and Warp's) control steps, images of ours and through EGL",
        environment=_SOME,
    ),
    Measurement("colocated", "rl", "RL with environments, policy and learner on the GPU"),
    Measurement(
        "pi05", "openpi", "openpi's training step and sampler beside ours", ("pi05", *_PEER),
        environment=_HALF,
    ),
    Measurement(
        "act_openpi", "openpi", "latency of π0.5 and of openpi's in turn", ("act", *_PEER),
        environment=_HALF,
    ),
    Measurement(
        "processes", "multi", "a process for each GPU beside one with all", environment=_WHOLE
    ),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(each.part for each in MEASUREMENTS))
_FIRST = PARTS[:3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or unpacks; returns the exit status, 1 if something failed."""
    options = _parser().parse_args(arguments)
    try:
        if options.unpack is not None:
            unpack(options.unpack)
            return 0
        machine = describe()
        if "error" in machine or not (options.tiny or machine["platform"] == "gpu"):
            why = machine.get("error", f"JAX sees only {machine.get('device')}.")
            raise ValueError(f"JAX can use no NVIDIA GPU: {why}\n--tiny tries a CPU.")
        out = options.out or ROOT / "runs" / time.strftime("gpu-%Y%m%d-%H%M%S.tar", time.gmtime())
        failed = measure(options.part or _FIRST, options.seconds, out, machine, options.tiny)
        if not (options.out or options.tiny):
            unpack([out])
        return failed
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 1


def measure(
    parts: Sequence[str], seconds: float, out: Path, machine: Mapping[str, str], tiny: bool = False
) -> int:
    """Runs the parts' measurements one after another, each part in `seconds`, and adds their
    results to the file `out`; returns 1 if some failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _say(f"{machine['device']}; Python {machine['python']}, {machine['packages']}")
    failed = list[str]()
    for part in parts:
        until = time.monotonic() + seconds
        measurements = [each for each in MEASUREMENTS if each.part == part]
        for at, each in enumerate(measurements):
            limit = (until - time.monotonic()) / (len(measurements) - at)
            result = run(each, limit, tiny) | {"machine": dict(machine)}
            _add(result, out)
            _say(section(result, each.about))
            failed += [each.name] * any(errors(result))
    _say(f"The results are in {out}.")
    if failed:
        _say(f"Failed: {', '.join(failed)}. docs/gpu.md says where missing packages come from.")
    return 1 if failed else 0


def run(each: Measurement, limit: float, tiny: bool = False) -> dict[str, Any]:
    """Measures in a process of its own, for `limit` seconds at most; returns the result, with the
    seconds after which it was `stopped` if it was, or the reason why there is none as `error`."""
    began, since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    if each.tests:
        words = ["pytest", "-vv", "-m", "gpu", "-p", "no:cacheprovider", *each.tests]
    else:
        words = ["tools.bench", *(each.arguments or [each.name]), "--json", *["--tiny"] * tiny]
    environment = os.environ | dict(each.environment)
    read = outcomes if each.tests else last_json
    found = ended([sys.executable, "-m", *words], environment, limit, read)
    seconds = time.monotonic() - since
    if seconds >= limit and "error" in found and len(found) > 1:
        found = {key: found[key] for key in found if key != "error"} | {"stopped": round(limit)}
    about = {"name": each.name, "part": each.part, "began": began, "seconds": round(seconds, 1)}
    return found | about | ({"tiny": True} if tiny else {})


def outcomes(said: str) -> dict[str, Any]:
    """The tests' outcomes as pytest printed them, and all that it printed last if one failed."""
    reasons = dict(_REASON.findall(said))
    rows = [
        {"name": name, "outcome": outcome.lower()}
        | ({"why": why} if why else {})
        | ({"error": reasons.get(name, outcome)} if outcome in ("FAILED", "ERROR") else {})
        for name, outcome, why in _OUTCOME.findall(said)
    ]
    found: dict[str, Any] = {"rows": rows} if rows else {}
    return found | ({"said": said[-_LOG:]} if any(errors(rows)) else {})


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


def unpack(files: Sequence[Path], folder: Path = RESULTS, to: Path = PAGE) -> None:
    """Writes the results in files of `measure` to a folder, later ones over earlier ones, and the
    page of all that the folder has.

    Raises:
      ValueError: a file is not one of `measure`, or was measured with `tiny`.
      FileNotFoundError: there is no such file.
    """
    texts = {name: text for file in files for name, text in _results(file).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    to.write_text(page(folder, MEASUREMENTS), encoding="utf-8")
    _say(f"Wrote {to} from the results in {folder}.")


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


def _results(file: Path) -> dict[str, str]:
    """Texts of the results in a file of `measure`, by their files' names."""
    names, found = {f"{each.name}.json" for each in MEASUREMENTS}, dict[str, str]()
    try:
        with tarfile.open(file) as tar:
            for entry in tar:
                stream = tar.extractfile(entry) if entry.name in names else None
                text = stream.read().decode() if stream else ""
                if not text or "tiny" in json.loads(text):
                    raise ValueError(f"{file} holds {entry.name}, which no GPU has measured.")
                found[entry.name] = text
    except tarfile.ReadError as error:
        raise ValueError(f"{file}: {error}; give a file that --out named.") from None
    return found


def _add(result: Mapping[str, Any], file: Path) -> None:
    """Appends a result to a tar file."""
    text = (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode()
    entry = tarfile.TarInfo(f"{result['name']}.json")
    entry.size, entry.mtime = len(text), time.time()
    with tarfile.open(file, "a") as tar:
        tar.addfile(entry, io.BytesIO(text))


def _say(text: str) -> None:
    """Prints as `models.files.terminal` does, without its packages, which may be missing here."""
    plain = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    print("".join(plain), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, help=f"these parts ({' '.join(_FIRST)})")
    add("--seconds", type=float, default=200, help="time of each part (200)")
    add("--out", type=Path, help="put the results into this file alone, a tar")
    add("--unpack", nargs="*", type=Path, help="only put these files' results into docs/results")
    add("--tiny", action="store_true", help="shrunk, also without a GPU; nothing goes into docs")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
