"""Commands run in the process of a test."""

import runpy
import sys


def run_command(module: str) -> None:
    """Runs `module` as `python -m` does, with `sys.argv` as it is. Its bytecode, which holds the
    checks of tests/shapes.py, is not kept: the command itself would find it under its own name."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.dont_write_bytecode = before
