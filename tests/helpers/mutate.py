"""`python -m tests.helpers.mutate SESSION FILE TEST …`, in a clone: makes the mutants of FILE that
SESSION, a database of cosmic-ray's, has no result for, and runs the tests on each.

Tests run in forks of this process, which has imported whatever they import, except for FILE and the
modules that import it. So they start in a second instead of six.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import unified_diff
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

import tests.conftest  # noqa: F401  it sets what must stand before JAX is imported

_SECONDS = 120.0
_TIMES = 5
"""Tests are killed after so many times as long as they take on the file as it is, or 30 s if that
is longer; before that is known, after `_SECONDS`."""
_CHOSEN = "not slow and not fuzz and not drill"
_BINARY = "core/ReplaceBinaryOperator_"
_OTHERS = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Mod_FloorDiv", "Pow_Mul")
_BITS = ("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd", "LShift_RShift", "RShift_LShift")


def main(session: Path, file: Path, names: Sequence[str]) -> None:
    """Tests every mutant without a result.

    Raises:
      ValueError: the tests fail on the file as it is.
    """
    if not session.exists():
        _begin(session, file)
    module = ".".join(file.with_suffix("").parts)
    _import_all(_needed(names), module)
    began = time.monotonic()
    if not _passes(names, _SECONDS):
        raise ValueError(f"{' '.join(names)} fail on {file} as it is; mend them first.")
    limit = max(30.0, _TIMES * (time.monotonic() - began))
    with use_db(session) as work:
        for item in work.pending_work_items:
            work.set_result(item.job_id, _result(item, names, limit))
            done = f"{work.num_results} of {work.num_work_items} mutants of {file}"
            print(f"\r{done}", end="", file=sys.stderr, flush=True)


def _begin(session: Path, file: Path) -> None:
    """Lists the mutants, with one for each binary operator."""
    new = session.with_suffix(".new")
    new.unlink(missing_ok=True)
    with use_db(new) as work:
        init([file], work, {})
        chosen = [item for item in work.work_items if _is_chosen(item.mutations[0].operator_name)]
        work.clear()
        work.add_work_items(chosen)
    new.rename(session)


def _is_chosen(operator: str) -> bool:
    return not operator.startswith(_BINARY) or operator.removeprefix(_BINARY) in _OTHERS + _BITS


def _result(item: WorkItem, names: Sequence[str], limit: float) -> WorkResult:
    (spec,) = item.mutations
    operator = get_operator(spec.operator_name)(**spec.operator_args)
    with use_mutation(spec.module_path, operator, spec.occurrence) as (before, after):
        outcome = TestOutcome.SURVIVED if _passes(names, limit) else TestOutcome.KILLED
    diff = "\n".join(unified_diff(before.split("\n"), after.split("\n"), lineterm=""))
    return WorkResult(WorkerOutcome.NORMAL, test_outcome=outcome, diff=diff)


def _passes(names: Sequence[str], limit: float) -> bool:
    arguments = ["-q", "-x", "-m", _CHOSEN, "-p", "no:cacheprovider", *names]
    return _forked(partial(pytest.main, arguments), limit) == 0


def _needed(names: Sequence[str]) -> list[str]:
    """Modules that are imported when the tests are collected, in this order."""
    with NamedTemporaryFile() as found:

        def collect() -> int:
            pytest.main(["-q", "--collect-only", *names])
            Path(found.name).write_text("\n".join(sys.modules))
            return 0

        _forked(collect, _SECONDS)
        return Path(found.name).read_text().split("\n")


def _import_all(needed: Sequence[str], without: str) -> None:
    """Imports these modules, except for one, those that import it, and the tests themselves."""
    refuse = _Refuse(without)
    sys.meta_path.insert(0, refuse)
    for name in needed:
        if not name.startswith("tests."):
            with suppress(Exception):
                importlib.import_module(name)
    sys.meta_path.remove(refuse)


class _Refuse:
    """A finder that refuses to import one module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self._name:
            raise ImportError(f"{name} is to be changed.")


def _forked(call: Callable[[], int], limit: float) -> int:
    """The exit status of a call in a fork, which prints nothing and is killed after `limit`
    seconds."""
    child = multiprocessing.get_context("fork").Process(target=_alone, args=(call,))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return int(child.exitcode)


def _alone(call: Callable[[], int]) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os._exit(call())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
