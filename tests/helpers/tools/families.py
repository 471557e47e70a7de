"""The families of policies by all commands (docs/families.md): which cell is run by which test, and
why a cell that is not makes no sense.

    python -m tests.helpers.tools.families            # all rows: the page and its JSON
    python -m tests.helpers.tools.families act        # one row

A row is a family's tests in tests/tools/test_families.py, and those of its files. They are drills;
CI takes a row whose folder has changed, and another in turn (tests/helpers/rotation.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree.ElementTree import parse

import pytest

from tests.helpers.rotation import ROOT, head
from tools.bench import pages

RECORD = ROOT / "docs" / "results" / "data" / "family_cells.json"
TESTS = "tests/tools/test_families.py"
CELLS = {
    "read released files": "",
    "write them": "",
    "train": "test_training_makes_steps_and_leaves_a_policy_that_is_rebuilt_from_its_checkpoint",
    "LoRA": "test_adapters_alone_learn",
    "QLoRA": "test_adapters_learn_on_a_base_in_four_bits",
    "FP8": "test_a_step_in_float8_is_near_that_in_f32",
    "packed = alone": "test_a_samples_loss_does_not_depend_on_what_it_is_packed_with",
    "8 devices = 1": "test_eight_devices_learn_as_one_does",
    "evaluate": "test_a_trained_policy_acts_in_a_suite",
    "serve": "test_a_trained_policy_answers_a_robot",
    "RL": "test_grpo_improves_what_draws_chunks_and_leaves_what_reads_observations",
    "quantise": "test_a_policy_is_quantised",
    "plan": "test_a_family_is_planned",
    "StableHLO": "test_an_exported_program_acts_as_its_policy[stablehlo]",
    "ONNX": "test_an_exported_program_acts_as_its_policy[onnx]",
    "history": "test_what_was_seen_before_changes_what_is_done",
}
"""Cells of the page in its order, each with its test; a family names those of the first two."""
REFUSED = ("RL", "plan")
"""Cells whose test sees the command refuse a family for which they make no sense."""


@dataclass(frozen=True)
class Family:
    """A row. `row`: its name in tests and JSON; `name`: the family's in configs. `file`: a user's.
    `folder`: where a change makes CI run the row. `options`: of `tools.train`, for a model that
    trains in seconds. `reads`, `writes`: tests of its files, by their whole names. `without`: cells
    that make no sense, each with the reason. `kept`: a parameter that RL's presets leave as it is.
    `quantised`: a kernel that tools.quantize takes. `slow`: parameters with half the rate.
    `answered`: steps of a chunk that its policy answers."""

    row: str
    name: str
    preset: str
    folder: str
    options: tuple[str, ...]
    quantised: str = ""
    reads: str = ""
    writes: str = ""
    kept: str = ""
    file: Path | None = None
    slow: str = "@vision"
    answered: int = 4
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def flows(self) -> bool:
        """True if it has a velocity field, and so Euler steps and RL."""
        return "RL" not in self.without

    @property
    def remembers(self) -> bool:
        """True if it reads the past, step by step."""
        return "history" not in self.without

    def test(self, cell: str) -> str:
        """The whole name of a cell's test, "" for a cell that makes no sense."""
        if cell in self.without:
            return ""
        own = {"read released files": self.reads, "write them": self.writes}.get(cell)
        if own is not None:
            return own
        name, _, form = CELLS[cell].partition("[")
        return f"{TESTS}::{name}[{self.row}{'-' + form if form else ']'}"


def sizes(stack: str, *values: str) -> tuple[str, ...]:
    """Options of `tools.train` for fields of a part of the model."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return tuple(x for name, value in pairs for x in (f"--model.{stack}{name}", value))


OWN, SMOL, ACT = (Path(__file__).parents[2] / f"own_{name}.py" for name in ("model", "smol", "act"))
_TOWER = sizes("vision.", "width", "16", "depth", "1", "hidden", "16", "heads", "2")
_TEXT = ("width", "16", "depth", "2", "hidden", "16", "head-dim", "8")
_PI = (
    *_TOWER,
    *sizes("language.", *_TEXT),
    *sizes("expert.", *_TEXT),
    *sizes("", "chunks", "1", "vocabulary", "800"),
)
_NOW = {"history": "reads the present alone"}
_NO_FIELD = {"RL": "no velocity field"}
_NO_FILES = {"read released files": "has no other files", "write them": "has no other files"}
_NO_ADAPTERS = {"LoRA": "its layers take none", "QLoRA": "its layers take none"}
_PAST = "one program has no past"
_PI_TESTS, _GROOT = "tests/models/families/pi", "tests/models/families/groot"
_SMOLVLA = "tests/models/families/smolvla/test_lerobot.py"
_SAME_FILE = "test_a_policy_that_is_written_is_the_file_that_was_read"
_CONVERT = "tests/tools/test_convert_checkpoint.py"
_LOADED = "test_lerobots_own_loader_ran_the_files_that_are_exported_and_acts_alike"
_READS_GROOT = "test_a_raw_observation_is_answered_as_by_lerobots_port_run_whole"

FAMILIES = (
    Family(
        "pi0",
        "pi",
        "tiny",
        "models/families/pi",
        (*_PI, "--model.state-input", "suffix", "--model.time", "input", "--model.no-film"),
        "language/layers/mlp/up/kernel",
        reads=f"{_PI_TESTS}/test_openpi_parity.py::test_sampled_actions_are_openpis[pi0]",
        writes=f"{_CONVERT}::{_LOADED}[pi0]",
        kept="embedding",
        without=_NOW,
    ),
    Family(
        "pi05",
        "pi",
        "tiny",
        "models/families/pi",
        (*_PI, "--model.state-input", "text", "--model.no-film"),
        "language/layers/mlp/up/kernel",
        reads=f"{_PI_TESTS}/test_openpi_parity.py::test_sampled_actions_are_openpis[pi05]",
        writes=f"{_CONVERT}::{_LOADED}[pi05]",
        kept="embedding",
        without=_NOW,
    ),
    Family(
        "pi0_fast",
        "pi0_fast",
        "pi0-fast-tiny",
        "models/families/pi",
        (
            *_TOWER,
            *sizes("language.", *_TEXT),
            *sizes("", "vocabulary", "800", "max-decoding-steps", "16"),
        ),
        "language/layers/mlp/up/kernel",
        reads=f"{_PI_TESTS}/fast/test_openpi_parity.py::test_actions_are_openpis[pi0_fast_base]",
        writes=f"{_CONVERT}::test_adapters_of_any_alpha_compute_the_same_in_openpis_files[pi0_fast]",
        without=_NOW | _NO_FIELD | {"ONNX": "loop of no fixed length"},
    ),
    Family(
        "groot",
        "groot",
        "groot-tiny",
        "models/families/groot",
        (
            *_TOWER,
            *sizes("language.", "width", "16", "depth", "1", "hidden", "16", "head-dim", "8"),
            *sizes("adapter.", "head-dim", "8"),
            *sizes("dit.", "depth", "2", "head-dim", "8"),
            *sizes("", "hidden", "16", "chunks", "1"),
        ),
        "dit/cross_blocks/k/kernel",
        reads=f"{_GROOT}/test_whole.py::{_READS_GROOT}[0]",
        writes=f"{_GROOT}/test_whole.py::test_a_policy_survives_the_road_to_nvidias_files",
        kept="embedding",
        without=_NOW,
    ),
    Family(
        "groot17",
        "groot17",
        "groot17-tiny",
        "models/families/groot",
        (
            *sizes("vision.", "width", "16", "hidden", "16", "heads", "2"),
            *sizes("language.", "width", "16", "depth", "1", "hidden", "16", "head-dim", "8"),
            *("--model.language.sections", "2", "1", "1"),
            *sizes("adapter.", "head-dim", "8"),
            *sizes("dit.", "depth", "2", "head-dim", "8"),
            *sizes("", "hidden", "16", "chunks", "1"),
        ),
        "vision/blocks/qkv/kernel",
        reads=f"{_GROOT}/n17/test_released.py::test_an_observation_becomes_the_ports_actions[nvidia/libero_sim]",
        writes=f"{_GROOT}/n17/test_released.py::test_a_policy_written_and_read_again_is_the_same[groot-nvidia/libero_sim]",
        kept="embedding",
        without=_NOW,
    ),
    Family(
        "smolvla",
        "smolvla",
        "smolvla-tiny",
        "models/families/smolvla",
        (
            *_TOWER,
            *sizes("language.", *_TEXT),
            *sizes("expert.", *_TEXT),
            *sizes("", "shuffle", "1", "chunks", "1"),
        ),
        "expert/layers/1/attention/k/kernel",
        reads=f"{_SMOLVLA}::test_raw_observations_become_lerobots_actions[two_cameras]",
        writes=f"{_SMOLVLA}::test_files_written_again_act_the_same[two_cameras]",
        kept="embedding",
        without=_NOW,
    ),
    Family(
        "act",
        "act",
        "act-tiny",
        "models/families/act",
        sizes("", "width", "16", "heads", "2", "hidden", "24", "encoder-depth", "2"),
        "decoder/up/kernel",
        reads="tests/models/families/act/test_format.py::"
        "test_raw_observations_give_the_robots_actions[act_two_cameras]",
        writes=f"tests/models/families/act/test_format.py::{_SAME_FILE}[act_two_cameras]",
        without=_NOW | _NO_FIELD | _NO_ADAPTERS,
    ),
    Family(
        "diffusion",
        "diffusion",
        "diffusion-tiny",
        "models/families/diffusion",
        (
            *("--model.unet.widths", "8", "16", "--model.unet.time-width", "8"),
            *sizes("", "chunks", "1", "keypoints", "4", "action-steps", "3"),
        ),
        reads="tests/models/families/diffusion/test_format.py::"
        "test_raw_observations_give_the_robots_actions[diffusion_ddpm]",
        writes=f"tests/models/families/diffusion/test_format.py::{_SAME_FILE}[diffusion_ddpm]",
        answered=3,
        without=_NO_FIELD
        | _NO_ADAPTERS
        | {
            "quantise": "its layers are not stacked",
            "FP8": "its layers are convolutions",
            "StableHLO": _PAST,
            "ONNX": _PAST,
        },
    ),
    Family(
        "own flow",
        "sight",
        f"{OWN}:SIGHT",
        "tests/own_model.py",
        (
            *_TOWER,
            *sizes("", "width", "16", "depth", "2", "heads", "2", "chunks", "1"),
        ),
        "blocks/up/kernel",
        kept="camera",
        file=OWN,
        without=_NOW | _NO_FILES,
    ),
    Family(
        "own memory",
        "smol",
        f"{SMOL}:SMOL",
        "tests/own_smol.py",
        (*_TOWER, *sizes("", "width", "16", "depth", "1", "heads", "2")),
        "action_blocks/up/kernel",
        kept="words",
        file=SMOL,
        without=_NO_FILES
        | {"plan": "does not count its layers", "StableHLO": _PAST, "ONNX": _PAST},
    ),
    Family(
        "own ACT",
        "small-act",
        f"{ACT}:ACT",
        "tests/own_act.py",
        (*sizes("", "width", "16", "depth", "2", "heads", "2"), "--model.widths", "4", "8"),
        "decoder/up/kernel",
        file=ACT,
        slow="^tower",
        without=_NOW
        | _NO_FIELD
        | _NO_FILES
        | _NO_ADAPTERS
        | {"packed = alone": "true batch statistics", "FP8": "too noisy at this size"},
    ),
)
"""Rows in the page's order."""


def record(names: tuple[str, ...] = (), root: Path = ROOT) -> bool:
    """Runs the tests of these rows, or of all, and writes what came of each cell, and when, into
    the JSON; true if none failed."""
    rows = [family for family in FAMILIES if not names or family.row in names]
    tests = {(f.row, cell): f.test(cell) for f in rows for cell in CELLS if f.test(cell)}
    outcomes = _outcomes(sorted(set(tests.values())), root)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    told = {key: today if outcomes.get(test) else "failed" for key, test in tests.items()}
    write(told)
    return "failed" not in told.values()


def write(told: Mapping[tuple[str, str], str]) -> None:
    """Writes the JSON anew, with what these cells of a row came to, and of others what it says."""
    before: dict[str, Any] = {"cells": []}
    if RECORD.is_file():
        before = json.loads(RECORD.read_text(encoding="utf-8"))
    known = {row["cell"]: row for row in before["cells"]}
    cells = [{"cell": cell, **_row(cell, told, known.get(cell, {}))} for cell in CELLS]
    found = {"commit": head(), "load_before": round(os.getloadavg()[0], 1), "cells": cells}
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    RECORD.write_text(text, encoding="utf-8")


def _row(
    cell: str, told: Mapping[tuple[str, str], str], before: Mapping[str, Any]
) -> dict[str, str]:
    """The page's words in a cell of every family: a date, "failed", or why there is no test."""
    return {
        family.row: family.without.get(cell)
        or told.get((family.row, cell), before.get(family.row, "not run"))
        for family in FAMILIES
    }


def _outcomes(tests: list[str], root: Path) -> dict[str, bool]:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "", "-n2", "--dist", "loadgroup", f"--junitxml={report}", *tests]
        status = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root).returncode
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise ValueError(f"pytest ended with {status}, so its outcomes are not of all tests.")
        cases = list(parse(report).iter("testcase"))
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": not list(case)
        for case in cases
    }


if __name__ == "__main__":
    done = record(tuple(sys.argv[1:]))
    pages.main()
    sys.exit(not done)
