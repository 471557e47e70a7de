"""Every module is imported where only the project's own dependencies are installed."""

import subprocess
import sys
from importlib import import_module
from pkgutil import walk_packages

import pytest

import data
import models
import parallel
import rl
import sim
import tools

_ELSEWHERE = {
    f"sim.simulators.{name}"
    for name in ("gym", "libero", "libero_expert", "libero_grasps", "metaworld")
}
"""Imported where a simulator's process starts, some by the Python of an environment of its own."""
_EXTRAS = {"tools.export.onnx_rules": "onnx", "tools.export.onnx_writer": "onnx"}
"""Imported where the package of an extra is installed."""
MODULES = sorted(
    found.name
    for package in (models, data, parallel, sim, rl, tools)
    for found in walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.endswith("__main__") and found.name not in _ELSEWHERE
)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_imported(name):
    if name in _EXTRAS:
        pytest.importorskip(_EXTRAS[name])
    import_module(name)


def test_training_imports_no_simulator_and_no_server():
    """Both cost every run's start, on every host; they are imported by what uses them."""
    program = "import sys, tools.train; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    imported = ran.stdout.split()
    assert "tools.recipes.training" in imported, ran.stderr
    strangers = ("sim.", "rl.", "tools.serving", "websockets", "mujoco", "ray.")
    assert not [name for name in imported if name.startswith(strangers)]
