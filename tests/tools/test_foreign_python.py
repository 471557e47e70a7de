"""Files of others (checkpoints, datasets, runs, mixtures) name no Python that would run."""

import ast
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from data import open_dataset
from models import Embodiment, Normalizer, Pi, load_policy
from models.checkpoints import digests
from models.config import to_json
from parallel.checkpoint import CheckpointWriter
from tests.helpers.models.processors import word_processor
from tests.helpers.tools.small_run import MODEL

ROOT = Path(__file__).parents[2]
RUNS = {
    "models/files/own_file.py": "--preset, --suite, --data-format and optimizer.name "
    "path/to/file.py:NAME, --family, and a transform, by its digest (data/mixture/trust.py)",
    "models/model.py": "modules of the shipped families, by a table of their names",
    "data/dataset.py": "modules of the shipped formats, by a table of their names",
    "data/lerobot/importing/recording.py": "libraries of other formats, by names of ours",
    "models/files/built_in.py": "families, by the folders of ours",
    "models/formats.py": "formats of built-in families, by a table",
    "models/inputs/parts.py": "parts of built-in families, by a table",
    "tools/recipes/presets.py": "presets of built-in families, by their folders",
    "tools/__main__.py": "commands, by the names of their files",
    "tools/bench/__main__.py": "benchmarks, by a table of their modules",
    "tools/export/run.py": "pictures.py, which we write beside it in an exported policy's folder",
    "parallel/trackers/tracker.py": "trackers of ours, by a table; others by path/to/file.py:NAME",
    "sim/processes/child.py": "a simulator's script of ours or of the user's suite",
    "data/files/job.py": "pickles of this process, for its threads",
    "data/lake/on_ray.py": "pickles of this job, in its own Ray",
    "rl/remote/slots.py": "pickles of this job, in its own Ray",
    "rl/remote/actor.py": "pickles of this job, in its own Ray",
}
"""All files that can run what they read, and why they do."""
_MODULES = {"runpy", "importlib.util", "pickle", "marshal", "dill", "cloudpickle", "joblib"}
_CALLS = {"exec", "eval", "__import__", "import_module", "run_path", "run_module", "exec_module"}
_OPTIONS = {"allow_pickle", "trust_remote_code"}


def runs_python(node):
    """True if this may run what was read."""
    if isinstance(node, ast.Import):
        return not _MODULES.isdisjoint(alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in _MODULES - {"importlib.util"}
    if not isinstance(node, ast.Call):
        return False
    _, _, name = ast.unparse(node.func).rpartition(".")
    return name in _CALLS or not _OPTIONS.isdisjoint(k.arg for k in node.keywords)


@pytest.mark.slow
def test_few_files_can_run_what_they_read():
    """Simulators and peers run in the environments of other packages, and are left out."""
    found = set()
    for package in ("models", "data", "parallel", "sim", "rl", "tools"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("sim/simulators/", "tools/bench/peers/")):
                continue
            if any(map(runs_python, ast.walk(ast.parse(path.read_text())))):
                found.add(name)
    assert found == set(RUNS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    scale = Normalizer((0.0,) * 2, (1.0,) * 2)
    processor = word_processor(
        image_size=16,
        state_dim=8,
        action_dim=8,
        horizon=4,
        state_input="token",
        words=("go",),
        embodiments=(Embodiment("pointer", ("top",), scale, scale),),
        text_limit=32,
    )
    params = jax.jit(Pi(MODEL).init)(jax.random.key(0))
    assets = {"processor": to_json(processor)}
    with CheckpointWriter(folder / "checkpoints", {"model": to_json(MODEL)}, assets) as writer:
        writer.save(1, {"ema": params}, {})
    return folder / "checkpoints" / "1"


def texts(value, path=()):
    """Paths of the texts in a JSON value."""
    if isinstance(value, str):
        yield path
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from texts(item, (*path, key))


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("_CHECKPOINT_METADATA", marks=pytest.mark.slow),
        "config/data.json",
        "state/_METADATA",
    ],
)
def test_a_sealed_checkpoint_that_names_python_imports_none(
    checkpoint, tmp_path, monkeypatch, file
):
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap/chiliad_trap.py").write_text("class Handler: ...\n")
    monkeypatch.syspath_prepend(tmp_path / "trap")
    content = json.loads((checkpoint / file).read_text())
    (first, *_, last) = texts(content)
    for number, where in enumerate((first, last)):
        changed = json.loads(json.dumps(content))
        at = changed
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = "chiliad_trap.Handler"
        path = Path(shutil.copytree(checkpoint, tmp_path / str(number) / "1"))
        (path / file).write_text(json.dumps(changed))
        (path / digests.NAME).unlink()
        digests.write_digests(path, digests.digest_files(path, digests.names(path)))
        with suppress(ValueError, TypeError):
            load_policy(path)
        assert "chiliad_trap" not in sys.modules


@pytest.mark.parametrize("url", ["reference://::memory://refs.json", "simplecache::memory://set"])
def test_a_dataset_is_no_chain_of_file_systems(url):
    """fsspec's `reference` fills templates from a file that others wrote."""
    with pytest.raises(ValueError, match=r"not supported; give the URL of one folder"):
        open_dataset(url)
