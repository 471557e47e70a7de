"""Checkpoints that strangers made: whatever their files hold, reading ends in one sentence that
names the file, reads nothing outside its folder and allocates nothing that no file holds."""

import io
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import textwrap

import google_crc32c
import numpy as np
import orbax.checkpoint as ocp
import pyarrow as pa
import pytest
import sentencepiece
from safetensors.numpy import save

from models.checkpoints import digests
from models.checkpoints.safetensors_format import map_file
from models.checkpoints.sources import open_orbax, open_safetensors
from models.families.groot import checkpoint as groot
from models.families.pi import lerobot
from models.families.pi.lerobot_statistics import read_normalizers
from models.files.foreign_json import LARGEST_BYTES, read_json
from models.inputs.fast import Fast
from models.inputs.tokenizer import SentencePiece

A = np.arange(12, dtype=np.float32).reshape(3, 4)
ENTRY = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}


def short(value):
    return repr(value)[:40]


def safetensors(path, header, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + A.tobytes()
    )
    return path


@pytest.mark.parametrize(
    "header",
    [
        {"a": ENTRY | {"data_offsets": [-48, 0]}},
        {"a": ENTRY | {"data_offsets": [48, 0]}},
        {"a": ENTRY | {"data_offsets": [0, 44]}},
        {"a": ENTRY | {"data_offsets": [-(2**63), 2**63]}},
        {"a": ENTRY | {"data_offsets": [0, 48, 96]}},
        {"a": ENTRY | {"data_offsets": "0:48"}},
        {"a": ENTRY | {"data_offsets": [0.0, 48.0]}},
        {"a": ENTRY | {"data_offsets": [0, True]}},
        {"a": {"dtype": "F32", "shape": [3, 4]}},
        {"a": ENTRY | {"shape": [-3, -4]}},
        {"a": ENTRY | {"shape": [3, 5]}},
        {"a": ENTRY | {"shape": [2**40, 2**40, 2**40]}},
        {"a": ENTRY | {"shape": [0, 10**30], "data_offsets": [0, 0]}},
        {"a": ENTRY | {"shape": [1] * 70 + [3, 4]}},
        {"a": ENTRY | {"shape": None}},
        {"a": ENTRY | {"shape": [[3], 4]}},
        {"a": ENTRY | {"dtype": "object"}},
        {"a": ENTRY | {"dtype": ["F32"]}},
        {"a": ENTRY | {"dtype": None}},
        {"a": [0, 48]},
        {"a": None},
        {"a": ENTRY, "b": ENTRY},
        {"a": ENTRY | {"shape": [2, 4], "data_offsets": [16, 48]}},
        {"a": ENTRY | {"shape": [2, 4], "data_offsets": [0, 32]}},
        {"__metadata__": [1], "a": ENTRY},
        {"__metadata__": {"kv_heads": 1}, "a": ENTRY},
        {},
        [],
        b"null",
        b"",
        b"{",
        b"\xff\xfe{}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a": {}, "a": {}}',
    ],
    ids=short,
)
def test_a_header_that_breaks_the_specification_is_refused_by_its_file(header, tmp_path):
    file = safetensors(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=str(file)) as refused:
        open_safetensors(file)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**6, 7, 0])
def test_a_header_length_that_does_not_fit_is_refused(length, tmp_path):
    file = safetensors(tmp_path / "model.safetensors", {"a": ENTRY}, length=length)
    with pytest.raises(ValueError, match=str(file)):
        map_file(file)


def fuzz_headers(folder, count, seed):
    """Mutates headers by bytes and by values; returns how many were refused and how many loaded."""
    rng, outcomes = random.Random(seed), {"refused": 0, "loaded": 0, "nameless": 0}
    arrays = {"a": A, "b": np.ones(3, np.float16), "c": np.zeros((2, 0), np.int8)}
    whole = save(arrays, {"format": "pt"})
    begin = 8 + int.from_bytes(whole[:8], "little")
    numbers = (-1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, None, "x", [], {}, True)
    for _ in range(count):
        damaged = bytearray(whole)
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(begin)] = rng.randrange(256)
        else:
            header = json.loads(whole[8:begin])
            entry = header[rng.choice("abc")]
            key = rng.choice(sorted(entry))
            if isinstance(entry[key], list) and rng.random() < 0.7:
                entry[key][rng.randrange(len(entry[key]))] = rng.choice(numbers)
            else:
                entry[key] = rng.choice(numbers)
            text = json.dumps(header).encode()
            damaged = len(text).to_bytes(8, "little") + text + whole[begin:]
        file = folder / "model.safetensors"
        file.write_bytes(damaged)
        try:
            found, _ = map_file(file)
        except ValueError as error:
            outcomes["refused" if str(file) in str(error) else "nameless"] += 1
        else:
            assert sum(x.nbytes for x in found.values()) == len(whole) - begin
            outcomes["loaded"] += 1
    return outcomes


def test_mutated_headers_are_refused_or_cover_the_file_exactly(tmp_path):
    outcomes = fuzz_headers(tmp_path, 1500, seed=0)
    assert outcomes["refused"] > 1000
    assert not outcomes["nameless"]
    assert outcomes["loaded"] > 10


@pytest.mark.fuzz
def test_many_mutated_headers_are_refused_or_cover_the_file_exactly(tmp_path):
    assert fuzz_headers(tmp_path, 100_000, seed=1)["refused"] > 50_000


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b", 5, None, ["x"]]
)
def test_an_index_that_names_files_elsewhere_is_refused(shard, tmp_path):
    folder = tmp_path / "it"
    folder.mkdir()
    safetensors(tmp_path / "x.safetensors", {"a": ENTRY})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match=rf"{index}.* weight_map "):
        open_safetensors(folder)


def test_two_shards_with_the_same_array_are_refused(tmp_path):
    for name in ("x", "y"):
        safetensors(tmp_path / name, {"a": ENTRY})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}}))
    with pytest.raises(ValueError, match="holds 'a', which another file"):
        open_safetensors(index)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "[" * 200_000, '{"a":' * 200_000, '{"a": 1, "a": 2}', "{\0}", "\udcff"],
    ids=short,
)
def test_json_of_others_is_an_object_or_refused_by_its_file(text, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    for read in (read_json, lerobot.read_config, groot.read_values):
        with pytest.raises(ValueError, match=str(file)):
            read(file)


def test_a_bomb_of_json_is_not_parsed(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"[" + b"[]," * (LARGEST_BYTES // 3) + b"[]]")
    with pytest.raises(ValueError, match="more than 33554432 bytes of JSON"):
        read_json(file)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 0},
        {"chunk_size": "50"},
        {"chunk_size": -1},
        {"chunk_size": True},
        {"tokenizer_max_length": None},
        {"max_state_dim": 0.5},
        {"type": ["pi0"]},
        {"input_features": []},
        {"input_features": {"observation.state": 5}},
        {"input_features": {"observation.state": {"shape": []}}},
        {"output_features": {"action": {"shape": ["x"]}}},
    ],
    ids=short,
)
def test_a_lerobot_config_of_nonsense_is_refused_by_its_file(change, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"type": "pi05", "chunk_size": 50} | change))
    with pytest.raises(ValueError, match=str(file)):
        lerobot.read_config(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"state_file": "../stats.safetensors"},
        {"state_file": "/etc/passwd"},
        {"state_file": {"a": 1}},
        {"config": []},
        {"config": {"norm_map": 3}},
        {"config": {"eps": float("nan")}},
        {"config": {"eps": "x"}},
        {"config": {"norm_map": {"ACTION": ["MEAN_STD"]}}},
    ],
    ids=short,
)
def test_statistics_of_nonsense_are_refused_by_their_file(change, tmp_path):
    step = {
        "registry_name": "unnormalizer_processor",
        "state_file": "stats.safetensors",
        "config": {
            "features": {"action": {"type": "ACTION", "shape": [2]}},
            "norm_map": {"ACTION": "MEAN_STD"},
            "eps": 1e-8,
        },
    }
    zero, file = np.zeros(2, np.float32), tmp_path / "policy_postprocessor.json"
    told = {
        "type": "pi0",
        "chunk_size": 2,
        "normalization_mapping": {"ACTION": "MEAN_STD"},
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "stats.safetensors").write_bytes(save({"action.mean": zero, "action.std": zero}))
    file.write_text(json.dumps({"steps": [step]}))
    assert read_normalizers(tmp_path)["action"].scale == (1e-8, 1e-8)
    for key, value in change.items():
        merged = step[key] | value if isinstance(value, dict) and key == "config" else value
        step[key] = merged
    file.write_text(json.dumps({"steps": [step]}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_normalizers(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("orbax")
    for name, ocdbt in (("ocdbt", True), ("folders", False)):
        with ocp.PyTreeCheckpointer(use_ocdbt=ocdbt) as checkpointer:
            checkpointer.save(out / name / "params", {"params": {"a": A}})
    return out


ZARRAY = "params/params.a/.zarray"
HUGE = [10**6, 10**6]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": HUGE},
        {"chunks": HUGE},
        {"shape": HUGE, "chunks": HUGE},
        {"shape": [2**62, 4], "chunks": [1, 4]},
        {"shape": [1] * 40, "chunks": [1] * 40},
        {"shape": [-3, 4]},
        {"chunks": [0, 0]},
        {"dtype": "|O"},
        {"dtype": "|S1000000000"},
        {"dtype": "|S4"},
        {"dtype": [["x", "<f4"], ["y", "<f4"]]},
        {"compressor": {"id": "nonsense"}},
        {"zarr_format": 9},
        {"shape": "3,4"},
    ],
    ids=short,
)
def test_arrays_that_declare_what_no_file_holds_are_refused_unread(change, saved, tmp_path):
    path = shutil.copytree(saved / "folders", tmp_path / "it")
    file = path / ZARRAY
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=str(path)):
        open_orbax(path)


@pytest.mark.parametrize("name", [ZARRAY, "params/_METADATA"])
@pytest.mark.parametrize("text", ["", "[]", "[" * 200_000, '{"a":' * 200_000, "\0"], ids=short)
def test_metadata_that_is_no_json_is_refused(name, text, saved, tmp_path):
    path = shutil.copytree(saved / "folders", tmp_path / "it")
    (path / name).write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        open_orbax(path)


@pytest.mark.parametrize("name", [ZARRAY, "params/params.a/0.0"])
def test_a_pipe_or_device_in_a_checkpoint_is_refused_and_not_waited_for(name, saved, tmp_path):
    for make in (os.mkfifo, lambda file: os.symlink("/dev/zero", file)):
        path = shutil.copytree(saved / "folders", tmp_path / f"it{len(list(tmp_path.iterdir()))}")
        (path / name).unlink()
        make(path / name)
        with pytest.raises(ValueError, match="is not a regular file"):
            open_orbax(path)
        with pytest.raises(ValueError, match="is not a regular file"):
            digests.digest_files(path, digests.names(path))
        digests.write_digests(path, dict.fromkeys(digests.names(path), (0, "0" * 16)))
        assert f"{path / name} cannot be read: it is not a regular file." in digests.damage(path)


def test_a_manifest_of_damaged_bytes_is_refused_by_its_folder(saved, tmp_path):
    path = shutil.copytree(saved / "ocdbt", tmp_path / "it")
    manifest = path / "params" / "manifest.ocdbt"
    whole, rng = manifest.read_bytes(), random.Random(0)
    damaged = [b"", whole[:20], whole[:-1], whole + b"\0", rng.randbytes(len(whole))]
    for _ in range(100):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    for content in damaged:
        manifest.unlink()
        manifest.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            open_orbax(path)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_manifest_that_points_outside_its_folder_reads_nothing_there(absolute, saved, tmp_path):
    """Its checksum fits; the file that it names is a whole node of the tree."""
    path = shutil.copytree(saved / "ocdbt", tmp_path / "it")
    (node,) = (path / "params" / "d").iterdir()
    name = f"d/{node.name}"
    target = (tmp_path / "it" if not absolute else tmp_path) / ("v" * (len(name) - 3))
    shutil.copy(node, target)
    other = f"../{target.name}" if not absolute else f"/tmp{'/v' * 40}"[: len(name)]
    manifest = path / "params" / "manifest.ocdbt"
    content = manifest.read_bytes()
    body = pa.CompressedInputStream(pa.BufferReader(content[14:-4]), "zstd").read()
    assert name.encode() in body
    for written, whole in ((name, True), (other, False)):
        packed = pa.Codec("zstd").compress(body.replace(name.encode(), written.encode()), asbytes=1)
        head = content[:4] + struct.pack("<Q", 18 + len(packed)) + content[12:14] + packed
        manifest.unlink()
        manifest.write_bytes(head + struct.pack("<I", google_crc32c.value(head)))
        if whole:
            np.testing.assert_array_equal(open_orbax(path).read("a", ()), A)
            continue
        with pytest.raises(ValueError, match="Invalid key"):
            open_orbax(path)


def test_a_compressed_bomb_takes_no_more_than_its_chunk(saved, tmp_path):
    """A gigabyte of zeros in 33 kB where 48 bytes belong."""
    path = shutil.copytree(saved / "folders", tmp_path / "it")
    chunk = path / "params" / "params.a" / "0.0"
    chunk.unlink()
    with pa.CompressedOutputStream(str(chunk), "zstd") as out:
        for _ in range(16):
            out.write(bytes(64 * 2**20))
    source, before = open_orbax(path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"params\.a/0\.0"):
        source.read("a", ())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


@pytest.fixture(scope="module")
def pieces():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["push the red block", "pull the green one"] * 20),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"\0" * 1000, b"\x0a\xff\xff\xff\xff"], ids=short
)
def test_a_tokenizer_that_is_none_is_refused_by_its_file(content, tmp_path):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file}: This"):
        SentencePiece.read(file)


@pytest.mark.slow
def test_mutated_tokenizers_end_no_process(pieces, tmp_path):
    """Runs in a process of its own, as the library is C++: 300 mutations are read or refused."""
    (tmp_path / "pieces").write_bytes(pieces)
    code = """
        import base64, random, sys
        from models.inputs.tokenizer import SentencePiece
        whole, rng, refused = open(sys.argv[1], "rb").read(), random.Random(0), 0
        for _ in range(300):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            found = SentencePiece(base64.b64encode(damaged).decode())
            try:
                ids = found.encode("push the red block")
                assert (ids >= 0).all() and (ids < found.size).all()
            except ValueError:
                refused += 1
        print(refused)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "pieces")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0


FAST = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}


@pytest.mark.parametrize(
    ("bpe", "config"),
    [
        ({"model": {}}, {}),
        ({"model": None}, {}),
        ({"model": {"type": "Pickle"}}, {}),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, {}),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}, {}),
        ({}, {"scale": 0}),
        ({}, {"scale": float("nan")}),
        ({}, {"scale": 10**400}),
        ({}, {"scale": None}),
        ({}, {"min_token": 10**30}),
        ({}, {"min_token": "x"}),
    ],
    ids=short,
)
def test_fast_files_of_nonsense_are_refused_by_their_folder(bpe, config, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(FAST | bpe))
    values = {"scale": 10, "min_token": -5} | config
    (tmp_path / "processor_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=str(tmp_path)):
        Fast.load(tmp_path)


def test_a_pickle_under_any_name_is_never_run(tmp_path, saved):
    """Puts one in place of every file that a reader opens."""
    ran = tmp_path / "ran"
    bomb = f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(bomb)
        reader = lerobot.read_config if name == "config.json" else open_safetensors
        with pytest.raises(ValueError, match=str(folder)):
            reader(folder)
    path = shutil.copytree(saved / "ocdbt", tmp_path / "it")
    for file in [one for one in path.rglob("*") if one.is_file()]:
        file.unlink()
        file.write_bytes(bomb)
    with pytest.raises(ValueError, match=str(path)):
        open_orbax(path)
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        SentencePiece.read(path / "params" / "manifest.ocdbt")
    assert not ran.exists()
