"""A frame store whose writer chose every byte of it, sums included: read right, or refused by file
and field before anything is made of it."""

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import open_dataset
from data.errors import DatasetError
from data.files.folder import LocalFolder
from data.frames import ACTION
from data.store import convert
from data.store.store import open_store
from tests.helpers.data.little_memory import little_memory
from tests.helpers.data.recording import FRONT, LENGTHS
from tests.helpers.data.stores import SETTINGS, everything

DEEP = "[" * 10**5
ZEROS = "0" * 64


@pytest.fixture(scope="module")
def sound(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign") / "s"
    convert.convert(open_dataset(recorded), LocalFolder(root), SETTINGS["raw"])
    return root


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "s"))


def sealed(root: Path, fields: dict[str, Any] | None = None) -> None:
    """Rewrites the sums as whoever wrote the files would."""
    files = json.loads((root / "files.json").read_text())
    for name in ("episodes.npz", "prompts.json", "stats.json"):
        content = (root / name).read_bytes()
        files[name] = [len(content), hashlib.sha256(content).hexdigest()]
    (root / "files.json").write_text(json.dumps(files))
    described(root, fields or {})


def described(root: Path, fields: dict[str, Any]) -> None:
    digest = hashlib.sha256((root / "files.json").read_bytes()).hexdigest()
    told = json.loads((root / "store.json").read_text()) | {"files": digest} | fields
    told = {name: value for name, value in told.items() if value is not ...}
    (root / "store.json").write_text(json.dumps(told | {"sum": convert.checksum(told)}))


def refused(root: Path, match: str) -> None:
    with little_memory(), pytest.raises(DatasetError, match=match) as raised:
        everything(root)
    assert " again" in str(raised.value)
    assert len(str(raised.value)) < 2000


FIELDS = {
    "fps": (0, -20, 1e300, "20", True, None, [20], float("nan"), ...),
    "image_size": (0, -1, 10**6, 10**18, 16.0, "16", True, None, [16], [16, 0], [8, "8"], ...),
    "fits": (7, None, [FRONT], {FRONT: 3}, {FRONT: {"kind": "x"}}, {FRONT: {"kind": "bilinear"}}),
    "shard_frames": (0, -30, 2**70, 30.0, "30", None, ...),
    "encoding": ("png", "", ["raw"], {}, None, 3, ...),
    "columns": (
        [], {}, None, {ACTION: 0}, {ACTION: "3"}, {ACTION: 2**60}, {ACTION: [3]}, {"../x": 3}, ...,
    ),
    "cameras": ([], {}, "front", [[FRONT]], [3], [FRONT, FRONT], ["a/../b"], None, ...),
    "key": ("../../x", "", 7, None, "0" * 17, ...),
    "digest": (7, None, ["a"], "a" * 10**7, ...),
    "name": ("", "/etc", "a/../../b", "a\x1b[2J", 7, None, ...),
    "files": (7, None, "x" * 10**7, ...),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_type_or_range_is_refused_by_its_name(name: str, store: Path) -> None:
    for value in FIELDS[name]:
        described(store, {name: value})
        refused(store, rf"store\.json, {name}: is ")


def test_a_description_nested_deep_or_with_unknown_fields_is_no_crash(store: Path) -> None:
    described(store, {"extra": [1]})
    assert everything(store)
    (store / "store.json").write_text('{"format": 3, "sum": ' + DEEP)
    refused(store, r"store\.json, sum: ")
    (store / "store.json").write_text(json.dumps({"format": "x" * 10**7}))
    with pytest.raises(ValueError, match=r"format is 'xxx.*convert the dataset again") as raised:
        open_store(store)
    assert len(str(raised.value)) < 1000


FILES = (
    DEEP, "7", "[]", "{}", '{"a": null}', '{"a": 3}', '{"a": [1]}', '{"a": ["1", "x"]}',
    '{"a": [1, "zz"]}', f'{{"a": [-1, "{ZEROS}"]}}', f'{{"../a": [1, "{ZEROS}"]}}',
)  # fmt: skip


@pytest.mark.parametrize("content", FILES)
def test_a_list_of_files_that_is_none_is_refused(content: str, store: Path) -> None:
    (store / "files.json").write_text(content)
    described(store, {})
    refused(store, r"files\.json, files: .*(recursion|not |list)")


PROMPTS = (DEEP, "7", "{}", '["lift"]', "[[]]", "[[3]]", "[null]", "[[[]]]", "\xff", "[]")


@pytest.mark.parametrize("content", PROMPTS)
def test_prompts_that_are_none_are_refused(content: str, store: Path) -> None:
    (store / "prompts.json").write_bytes(content.encode("latin1"))
    sealed(store)
    refused(store, r"prompts\.json, (file|prompts|task \d): |episodes\.npz, run_task: ")


def changed(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda stats: stats[ACTION].update({key: value})


STATS: dict[str, Callable[[dict[str, Any]], object]] = {
    "column": lambda stats: stats.update({"torque": stats[ACTION]}),
    "no object": lambda stats: stats.update({ACTION: [1.0]}),
    "missing": lambda stats: stats[ACTION].pop("q99"),
    "scalar": changed("mean", 3.0),
    "short": changed("mean", [0.0]),
    "text": changed("mean", ["0", "0", "0"]),
    "ragged": changed("std", [[0.0], 0.0, 0.0]),
    "nan": changed("q01", [float("nan")] * 3),
    "huge": changed("min", [10**400, 0, 0]),
    "bool": changed("max", [True] * 3),
    "count": changed("count", {}),
}


@pytest.mark.parametrize("kind", STATS)
def test_statistics_that_are_none_are_refused(kind: str, store: Path) -> None:
    stats = json.loads((store / "stats.json").read_text())
    STATS[kind](stats)
    (store / "stats.json").write_text(json.dumps(stats))
    sealed(store)
    refused(store, r"stats\.json, '\w+'(, \w+)?: is ")


@pytest.mark.parametrize("content", [DEEP, "[]", "3", "{"])
def test_statistics_that_are_no_object_are_refused(content: str, store: Path) -> None:
    (store / "stats.json").write_text(content)
    sealed(store)
    refused(store, r"stats\.json, (file|stats): ")


E = len(LENGTHS)
ARRAYS: dict[str, Any] = {
    "lengths": (
        np.zeros(0, np.int64), np.full(E, -1), np.full(E, 2**62), np.full(E, 7.0), np.ones((E, 1)),
        np.array(LENGTHS) + 1, np.array(LENGTHS, np.int32), np.array(["7"] * E),
    ),
    "present": (np.ones((E, 3), bool), np.ones(E, bool), np.ones((E, 2), np.int64)),
    "alike": (np.full(E, -1), np.full(E, E), np.zeros(E - 1, np.int64)),
    "run_episode": (np.full(E, E), np.full(E, -1), np.zeros(E, np.int64), np.zeros(1, np.int64)),
    "run_first": (np.full(E, -1), np.full(E, 2**63 - 1), np.ones(E, np.int64)),
    "run_length": (np.full(E, 2**63 - 1), np.full(E, -3), np.zeros(E, np.int64)),
    "run_task": (np.full(E, 3), np.full(E, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_kind_or_range_is_refused_by_its_name(name: str, store: Path) -> None:
    with np.load(store / "episodes.npz") as file:
        whole = dict(file)
    for values in (*ARRAYS[name], None):
        arrays = whole | {name: values}
        kept = {n: v for n, v in arrays.items() if v is not None}
        np.savez(store / "episodes.npz", **kept)
        sealed(store)
        refused(store, r"episodes\.npz, (arrays|run_\w+|" + name + "): ")


def header(shape: str, kind: str = "<i8", size: int = 118) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"


BOMBS = {
    "gigabytes": header(f"({1 << 40},)") + bytes(64),
    "beyond int64": header(f"({10**40},)") + bytes(64),
    "negative": header("(-8,)") + bytes(64),
    "objects": header("(6,)", "|O") + bytes(48),
    "code": header("(__import__('os').abort(),)") + bytes(48),
    "nested": header("(" + "(" * 4000, size=5000) + bytes(48),
    "empty": b"",
    "cut": header("(6,)")[:40],
}


@pytest.mark.parametrize("kind", BOMBS)
def test_an_array_that_declares_what_does_not_follow_takes_no_memory(
    kind: str, store: Path
) -> None:
    with zipfile.ZipFile(store / "episodes.npz") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(store / "episodes.npz", "w") as archive:
        for name, of in (content | {"lengths.npy": BOMBS[kind]}).items():
            archive.writestr(name, of)
    sealed(store)
    refused(store, r"episodes\.npz, arrays: .*lengths")


def test_a_zip_bomb_or_no_zip_is_refused(store: Path) -> None:
    with zipfile.ZipFile(store / "episodes.npz") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in content.keys() - {"lengths.npy"}:
            archive.writestr(name, content[name])
        with archive.open("lengths.npy", "w", force_zip64=True) as entry:
            entry.write(header(f"({1 << 21},)"))
            for _ in range(16):
                entry.write(bytes(1 << 20))
    for bomb in (packed.getvalue(), packed.getvalue()[:-30], b"PK\x05\x06", b""):
        (store / "episodes.npz").write_bytes(bomb)
        sealed(store)
        refused(store, r"episodes\.npz, arrays: does not hold the arrays of a store")


def test_a_column_shorter_than_its_rows_is_refused(store: Path) -> None:
    file = store / f"columns/{ACTION}/c/0/0"
    index = file.read_bytes()[-(16 * 1024 + 4) :]
    file.write_bytes(index)
    files = json.loads((store / "files.json").read_text())
    name = f"columns/{ACTION}/c/0/0"
    files[name] = [len(index), hashlib.sha256(index).hexdigest()]
    (store / "files.json").write_text(json.dumps(files))
    sealed(store)
    refused(store, r"c/0/0, index: is damaged")


@pytest.mark.parametrize("content", [DEEP, '{"a": 3}', '{"/etc/x": [1, "a"]}', "[3]", "null"])
def test_a_strange_record_of_a_finished_part_is_refused_by_its_name(
    content: str, recorded: Path, store: Path
) -> None:
    (store / "store.json").unlink()
    part = min(store.glob("parts/*.json"))
    part.write_text(content)
    with pytest.raises(DatasetError, match=f"{part.name}, file: is damaged; delete it"):
        convert.convert(open_dataset(recorded), LocalFolder(store), SETTINGS["raw"])
