"""The wheel: all packages and their files, usable outside the repository."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "parallel", "sim", "rl", "tools")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel's files in a folder of their own."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check"
    subprocess.run([sys.executable, *command.split(), "-w", out, source], check=True)
    (wheel,) = out.glob("chiliad-*.whl")
    ZipFile(wheel).extractall(out / "unpacked")
    return out / "unpacked"


def test_a_wheel_has_every_module_and_no_other_package(unpacked):
    ours = {str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*.py")}
    packed = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*.py")}
    assert packed == ours
    assert (unpacked / "parallel/planning/targets/h100.textproto").exists()


@pytest.mark.slow
def test_a_wheels_commands_work_outside_the_repository(unpacked, tmp_path):
    script = (
        "import runpy, sys, tools.__main__ as main; "
        f"assert main.__file__.startswith({str(unpacked)!r}), main.__file__; "
        "sys.argv = ['chiliad', 'plan', '--preset', 'tiny', '--gpus', '1', '--gpu', 'h100']; "
        "main.main(); import parallel; print(parallel.__file__)"
    )
    env = os.environ | {"PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith(str(unpacked))
    assert "h100" in ran.stdout.lower()


def test_a_wheels_help_is_made_without_jax(unpacked, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "tools.data", "edit", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
    )
    assert "--delete" in ran.stdout, ran.stderr
    assert "jax.version" not in ran.stderr


def test_the_citation_and_the_changes_name_the_version():
    number = version("chiliad")
    assert f"\nversion: {number}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {number}" in (ROOT / "CHANGELOG.md").read_text()
