"""Choice of the Python that runs a simulator: benchmark suites pin versions that conflict with ours
and with each other, so each may have its own environment."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def interpreter(suite: str, package: str, install: str) -> Path:
    """The Python in which `package` can be imported: the one in the variable
    CHILIAD_<SUITE>_PYTHON, else `.venv-<suite>/bin/python` in the current folder, else our own.

    Args:
      suite: "metaworld", "libero", …
      package: the package that must be importable for the suite to run in our own environment.
      install: the command that installs the suite, for the error: "make metaworld".

    Raises:
      FileNotFoundError: the variable names no file, or none of the three exists.
    """
    variable = f"CHILIAD_{suite.upper()}_PYTHON"
    if variable in os.environ:
        named = Path(os.environ[variable])
        if not named.is_file():
            raise FileNotFoundError(
                f"{variable} = {named} is not a file; expected a Python that has {package}. "
                f"Correct or unset the variable, or install one: {install}"
            )
        return named.absolute()
    beside = Path(f".venv-{suite}/bin/python")
    if beside.is_file():
        return beside.absolute()
    if find_spec(package) is not None:
        return Path(sys.executable)
    raise FileNotFoundError(
        f"Suite '{suite}' needs the package {package}, which is neither here nor in "
        f".venv-{suite}; install it ({install}), or name a Python that has it in {variable}."
    )
