"""The package stands alone: Python 3.8's syntax, its own dependencies, nothing of ours, and
messages that our server reads."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import msgpack
import numpy as np
import pytest

import chiliad_client
from chiliad_client import wire
from models.inputs.observation import inputs_of
from tests.helpers.tools.served import OBSERVATION, ROBOT, serving
from tests.helpers.tools.visitor import NEEDS_CLIENT, PYTHON
from tools.serving import wire as servers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "client"
FILES = sorted((FOLDER / "chiliad_client").glob("*.py"))
NEEDED = {"numpy", "websockets", "msgpack"}
OPTIONAL = {"simplejpeg", "PIL"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_of_python_3_8_and_imports_what_is_declared(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 8))
    found = {
        (node.names[0].name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
    }
    assert found - set(sys.stdlib_module_names) <= NEEDED | OPTIONAL
    at_once = {
        alias.name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not at_once & OPTIONAL


def test_what_is_declared_is_what_is_imported():
    text = (FOLDER / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = (\[.*\])$", text, re.MULTILINE)[1]
    assert {re.match(r"\w+", name)[0] for name in json.loads(needed)} == NEEDED
    assert 'requires-python = ">=3.8"' in text


def test_nothing_of_ours_and_no_jax_is_loaded_with_it():
    program = "import sys, json, chiliad_client; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(FOLDER)},
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"jax", "jaxlib", "models", "tools", "data", "sim", "rl", "parallel"}


def test_every_public_name_is_there():
    assert [name for name in chiliad_client.__all__ if not hasattr(chiliad_client, name)] == []


def test_a_wheel_has_every_file_and_asks_for_nothing_else(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg*"))
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check"
    subprocess.run([sys.executable, *command.split(), "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("chiliad_client-*-py3-none-any.whl")
    with ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in content.namelist() if name.endswith("/METADATA"))
        told = content.read(about).decode()
    assert packed == {f"chiliad_client/{file.name}" for file in FILES} | {"chiliad_client/py.typed"}
    assert "Requires-Python: >=3.8" in told
    needed = re.findall(r"^Requires-Dist: (\w+)(?!.*extra)", told, re.MULTILINE)
    assert set(needed) == NEEDED


@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", ">i2", "<f2", "<f4", ">f8"])
def test_client_and_server_read_each_others_arrays(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    message = {"a": {"b": x}, "c": np.float32(0.5), "d": "grün", "e": [1, 2.5]}
    assert wire.unpack(wire.pack({"tokens": [*range(10_000)]})) == {"tokens": [*range(10_000)]}
    for pack, unpack in ((wire.pack, servers.unpack), (servers.pack, wire.unpack)):
        back = unpack(pack(message))
        assert back["a"]["b"].dtype == x.dtype
        np.testing.assert_array_equal(back["a"]["b"], x)
        assert (back["c"], back["d"], back["e"]) == (0.5, "grün", [1, 2.5])


def test_only_pictures_are_sent_as_jpeg():
    state, depth = np.arange(7, dtype=np.float32), np.zeros((4, 4, 3), np.float32)
    message = {"front": np.full((16, 24, 3), 9, np.uint8), "state": state, "depth": depth}
    packed = wire.pack(message, jpeg=90)
    back = servers.unpack(packed)
    assert len(packed) < len(wire.pack(message))
    assert back["front"].shape == (16, 24, 3)
    assert np.abs(back["front"].astype(int) - 9).max() <= 1
    np.testing.assert_array_equal(back["state"], state)
    np.testing.assert_array_equal(back["depth"], depth)


def test_pillow_encodes_where_simplejpeg_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    message = {"front": np.full((16, 24, 3), 200, np.uint8)}
    assert np.abs(servers.unpack(wire.pack(message, jpeg=95))["front"].astype(int) - 200).max() <= 1
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'chiliad-client\[jpeg\]'"):
        wire.pack(message, jpeg=95)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xc1", "not msgpack"),
        (servers.pack({"a": 1})[:-1], "not msgpack"),
        (b"\x93\x01\x02\x03", "a list, not a map"),
        (servers.pack({"a": np.zeros(4)}).replace(b"<f8", b"|O8"), "array"),
        (servers.pack({"a": np.zeros(4)}).replace(b"shape\x91\x04", b"shape\x91\xc3"), "malformed"),
        (msgpack.packb({"a": [0] * 10_001}), "exceeds max_array_len"),
        (b"\x81\xa1a\xdd\x00\x98\x96\x80" + b"\x90" * 10_000_000, "exceeds max_array_len"),
        (b"\x81\xa1a\xdc\x00\xff" + b"\x91\x90" * 255, "more than 256 maps and lists"),
        (b"\x81\xa1a\xdf\x00\x98\x96\x80", "exceeds max_map_len"),
        (b"\x81\xa1a" * 5 + b"\x01", "maps more than 4 deep"),
        (b"\x91" * 5000, "StackError"),
        (bytes(wire.LARGEST + 1), "16777217 bytes, more than 16777216"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"x")}), "exceeds max_ext_len"),
        (msgpack.packb({b"a": 1}), "key b'a', which is not printable"),
        (msgpack.packb({"\x1b]52;c;cm0=\x07": 1}), r"key '\\x1b\]52;c;cm0=\\x07', which is not"),
        (msgpack.packb({"a": {b"nd": True, b"type": "<f4", b"data": b""}}), "msgpack-numpy's"),
        (msgpack.packb({"a": {"__ndarray__": True, "data": b""}}), "their keys are text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_is_none_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        wire.unpack(data)


def test_foreign_text_is_shown_without_power_over_the_terminal():
    shown = r"\x1b]52;c;cm0=\x07 \r\u202e"
    assert wire.harmless("lift\n\tØ 日本 \x1b]52;c;cm0=\x07 \r\u202e") == f"lift\n\tØ 日本 {shown}"


@NEEDS_CLIENT
def test_it_works_with_numpy_1_in_an_environment_without_our_packages():
    program = """
import sys
import numpy as np
from chiliad_client import Connection
with Connection(sys.argv[1]) as server:
    picture = np.zeros((48, 48, 3), np.uint8)
    seen = {"front": picture, "wrist": picture, "state": np.full(3, 0.5), "prompt": "push"}
    print(np.__version__, server.infer(seen, 300)["actions"].tolist())
"""
    with serving() as running:
        done = subprocess.run(
            [PYTHON, "-c", program, running.url],
            env={"PYTHONPATH": str(FOLDER)},
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr
    version, _, answer = done.stdout.partition(" ")
    assert version.startswith("1.")
    assert json.loads(answer) == np.full((2, 2), 0.5).tolist()
    assert inputs_of(ROBOT, reads_state=True).read({**OBSERVATION}).rows[0].prompt
