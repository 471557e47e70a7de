"""Every layout that Orbax and safetensors write is read by region, lazily and in its own dtype."""

import errno
import json
import resource
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

from models.checkpoints.safetensors_format import write_file
from models.checkpoints.sources import open_orbax, open_safetensors

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.asarray([1.5, -2.25, 3e30], ml_dtypes.bfloat16)
TREE = {"params": {"a": {"kernel": A}, "b": B}}


def save(kind, path, tree):
    if kind == "zarr3":
        v1.save(path, tree)
        return path / "state"
    options = {"use_ocdbt": kind == "ocdbt"}
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(path / "params", tree)
    return path


@pytest.mark.parametrize("kind", ["ocdbt", "folders", "zarr3"])
def test_orbax_arrays_are_found_by_name_and_read_by_region(kind, tmp_path):
    source = open_orbax(save(kind, tmp_path / "it", TREE))
    assert source.shapes == {"a/kernel": (3, 4), "b": (3,)}
    np.testing.assert_array_equal(source.read("a/kernel", (slice(1, 3), slice(0, 2))), A[1:3, :2])
    b = source.read("b", (slice(None),))
    assert b.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(b, B)


def test_a_checkpoint_and_its_params_directory_are_the_same(tmp_path):
    path = save("ocdbt", tmp_path / "it", TREE)
    assert open_orbax(path).shapes == open_orbax(path / "params").shapes


def test_a_trailing_value_is_dropped_only_where_every_path_has_it(tmp_path):
    every = {"params": {"a": {"value": A}, "b": {"value": B}}}
    some = {"params": {"a": {"value": A}, "b": B}}
    assert set(open_orbax(save("ocdbt", tmp_path / "every", every)).shapes) == {"a", "b"}
    assert set(open_orbax(save("ocdbt", tmp_path / "some", some)).shapes) == {"a/value", "b"}


def test_a_lost_chunk_is_an_error_and_not_zeros(tmp_path):
    path = save("folders", tmp_path / "it", TREE)
    (path / "params" / "params.b" / "0").unlink()
    with pytest.raises(ValueError, match=r"params\.b/0. is missing"):
        open_orbax(path).read("b", (slice(None),))


def test_what_is_no_orbax_directory_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        open_orbax(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no Orbax arrays"):
        open_orbax(tmp_path)


def spelt(path, header, data):
    """A file as the format's specification has it, without our writer."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_safetensors_file_is_read_as_specified(tmp_path):
    header = {
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [48, 54]},
        "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "__metadata__": {"format": "pt"},
    }
    file = spelt(tmp_path / "model.safetensors", header, A.tobytes() + B.tobytes())
    for source in (open_safetensors(file), open_safetensors(tmp_path)):
        assert source.shapes == {"a": (3, 4), "b": (3,)}
        assert source.metadata == {"format": "pt"}
        np.testing.assert_array_equal(source.read("a", (slice(1, 2), slice(2, 4))), A[1:2, 2:])
        np.testing.assert_array_equal(source.read("b", (slice(None),)), B)


def test_what_is_written_is_read_and_aligned(tmp_path):
    arrays = {"a": (A.T.shape, lambda: A.T), "zeros": ((5,), lambda: np.zeros(1, np.float32))}
    file = tmp_path / "model.safetensors"
    write_file(file, arrays, np.dtype(ml_dtypes.bfloat16), {"note": "x"})
    source = open_safetensors(file)
    np.testing.assert_array_equal(source.arrays["a"], A.T.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(source.arrays["zeros"], np.zeros(5))
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@contextmanager
def files_at_most(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_is_named_with_its_file_and_leaves_nothing(tmp_path):
    """Simulates `ulimit -f`: `ndarray.tofile` says only how many bytes were asked for."""
    large = np.zeros(100_000, np.float32)
    with files_at_most(65_536), pytest.raises(OSError, match="File too large") as error:
        write_file(tmp_path / "model", {"a": (large.shape, lambda: large)}, large.dtype, {})
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_shards_named_by_an_index_are_one_source(tmp_path):
    for shard, name in (("one", "a"), ("two", "b")):
        write_file(tmp_path / shard, {name: ((3, 4), lambda: A)}, np.dtype(np.float32), {})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    assert set(open_safetensors(tmp_path).shapes) == {"a", "b"}
    (tmp_path / "two").unlink()
    with pytest.raises(FileNotFoundError, match="two does not exist"):
        open_safetensors(index)


def test_damaged_files_are_refused_with_what_is_wrong(tmp_path):
    entry = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    file = spelt(tmp_path / "cut", {"a": entry}, A.tobytes()[:-4])
    with pytest.raises(ValueError, match="ends within its array a"):
        open_safetensors(file)
    with pytest.raises(ValueError, match="holds a as F4"):
        open_safetensors(spelt(tmp_path / "f4", {"a": entry | {"dtype": "F4"}}, A.tobytes()))
    (tmp_path / "short").write_bytes(b"\xff\xff\0\0\0\0\0\0{")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("short", "empty"):
        with pytest.raises(ValueError, match="ends within its header"):
            open_safetensors(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors\.index\.json nor"):
        open_safetensors(tmp_path)
