"""Checkpoints at URLs: what is fetched of a hub repository or a bucket, when again, and what is
said when it cannot be."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants
from safetensors.numpy import save_file

from models import Policy, load_policy
from models.checkpoints import own
from models.checkpoints.remote import local
from models.config import to_json
from models.families.pi.released import find_released
from models.files.bucket import Bucket
from parallel.checkpoint import CheckpointWriter
from tests.helpers.models.buckets import memory_bucket
from tests.helpers.models.hub import writable_hub
from tests.helpers.models.openpi_numbers import FIXTURES as OPENPI
from tests.helpers.models.openpi_numbers import TOLD
from tests.helpers.models.tiny_policy import tiny_policy

RUN = "memory://bucket/runs/mine"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with two checkpoints and what else runs leave."""
    folder, policy = tmp_path_factory.mktemp("run"), tiny_policy()
    content = {"model": to_json(policy.model.config)}
    assets = {"processor": to_json(policy.processor)}
    with CheckpointWriter(folder / "checkpoints", content, assets) as writer:
        writer.save(4, {"ema": policy.params}, {})
        writer.save(8, {"ema": policy.params}, {})
    (folder / "store").mkdir()
    (folder / "store/shard.bin").write_bytes(b"x" * 5000)
    return folder


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with memory_bucket() as files:
        yield files


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with writable_hub(tmp_path / "hub", monkeypatch) as served:
        yield served


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def shipped(monkeypatch):
    """Without formats that other tests have registered."""
    monkeypatch.setattr("models.formats._own", {})


def put(memory, folder: Path, root: str) -> None:
    for name, content in contents(folder).items():
        memory.pipe(f"{root}/{name}", content)


def is_tiny(loaded: Policy) -> None:
    """The policy of `run`: its config, processor and every weight."""
    mine = tiny_policy()
    assert loaded.model.config == mine.model.config
    assert loaded.processor == mine.processor
    for a, b in zip(jax.tree.leaves(mine.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_in_a_bucket_loads_as_it_does_here_and_only_its_newest_step_comes(
    run, memory, tmp_path
):
    put(memory, run, "/bucket/runs/mine")
    is_tiny(load_policy(RUN))
    names = [path.as_posix() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert any("/runs/mine/checkpoints/8/" in name for name in names)
    assert not any("/checkpoints/4/" in name or "store" in name for name in names)


def test_a_run_on_the_hub_loads_as_it_does_here(run, hub):
    commit = hub.add("models/org/mine", contents(run))
    is_tiny(load_policy("hf://org/mine"))
    fetched = [line for line in hub.requests if "/resolve/" in line]
    assert not any("checkpoints/4" in line or "store" in line for line in fetched)
    hub.add("models/org/mine", {"other.txt": b""})
    is_tiny(load_policy(f"hf://org/mine@{commit}"))
    is_tiny(load_policy(f"hf://org/mine@{commit}/checkpoints/4"))


def test_a_released_checkpoint_is_known_by_the_name_of_its_repository_or_folder(hub, memory):
    files = contents(OPENPI / "pi05") | {"train_state/big": b"x", "optimizer.pt": b"x"}
    hub.add("models/org/pi05_droid", files)
    memory.pipe({f"/assets/checkpoints/pi05_droid/{n}": x for n, x in files.items()})
    for url in ("hf://org/pi05_droid", "memory://assets/checkpoints/pi05_droid"):
        place = local(url)
        row = find_released(place, "openpi")
        assert row is not None
        assert row is find_released(Path("pi05_droid"), "openpi")
        assert not (place / "train_state").exists()
        assert not (place / "optimizer.pt").exists()
    hub.add("models/org/small", files)
    assert load_policy("hf://org/small", **TOLD["pi05"]).model.config.horizon == 6


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b'{"type": "vqbet"}'}, "policy of type 'vqbet', expected one of"),
        ({"config.json": b'{"model_type": "qwen2"}'}, "policy of type 'qwen2', expected one of"),
        ({"config.json": b"[" * 10_000}, "nested too deep"),
        ({"adapter_config.json": b"{}"}, "holds only an adapter of PEFT"),
    ],
)
def test_a_policy_that_is_not_read_is_told_before_its_weights_are_downloaded(
    hub, memory, shipped, files, message
):
    weights = "adapter_model" if "adapter_config.json" in files else "model"
    files = files | {f"{weights}.safetensors": b"x" * 1000}
    hub.add("models/org/other", files)
    memory.pipe({f"/bucket/other/{name}": content for name, content in files.items()})
    for url in ("hf://org/other", "memory://bucket/other"):
        with pytest.raises(ValueError, match=message) as refused:
            load_policy(url)
        assert url in str(refused.value) or "config.json" in str(refused.value)
    fetched = [line for line in hub.requests if "/resolve/" in line]
    assert not any("safetensors" in line for line in fetched)


@pytest.mark.parametrize("given", ["", "adapter_model.safetensors"])
def test_a_folder_that_holds_only_an_adapter_is_told_as_such(tmp_path, given):
    """As LeRobot leaves it after fine-tuning with PEFT, with the whole policy's processor."""
    (tmp_path / "config.json").write_text('{"type": "pi0", "chunk_size": 5, "use_peft": true}')
    for name in ("adapter_config.json", "policy_preprocessor.json"):
        (tmp_path / name).write_text("{}")
    for name in ("adapter_model", "policy_preprocessor_step_5_normalizer_processor"):
        save_file({"w": np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"only an adapter of PEFT .*merge_and_unload\(\)"):
        load_policy(tmp_path / given)


def test_a_type_that_is_not_read_is_told_where_weights_are_missing(tmp_path, shipped):
    (tmp_path / "config.json").write_text('{"type": "vqbet"}')
    with pytest.raises(ValueError, match="policy of type 'vqbet', expected one of"):
        load_policy(tmp_path)


def test_a_file_is_fetched_alone(memory, hub):
    memory.pipe("/bucket/tokenizer.model", b"words")
    hub.add("models/org/words", {"tokenizer.model": b"words", "other.bin": b"x"})
    for url in ("memory://bucket/tokenizer.model", "hf://org/words/tokenizer.model"):
        assert local(Path(url)).read_bytes() == b"words"
        assert local(url).name == "tokenizer.model"


def test_statistics_come_without_the_weights(memory):
    memory.pipe("/bucket/pi05/params/_METADATA", b"x")
    memory.pipe("/bucket/pi05/assets/droid/norm_stats.json", b"{}")
    place = local("memory://bucket/pi05", "statistics")
    assert list(contents(place)) == ["assets/droid/norm_stats.json"]


def test_what_was_fetched_is_not_fetched_again_until_it_changes(memory, monkeypatch):
    memory.pipe("/bucket/words/model.safetensors", b"first")
    got, get = [], MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda fs, *args: (got.append(args[0]), get(fs, *args))
    )
    with ThreadPoolExecutor(8) as pool:
        places = set(pool.map(local, ["memory://bucket/words"] * 8))
    assert len(places) == len(got) == 1
    memory.pipe("/bucket/words/model.safetensors", b"other")
    (place,) = places
    newer = local("memory://bucket/words")
    assert (newer / "model.safetensors").read_bytes() == b"other"
    assert (place / "model.safetensors").read_bytes() == b"first"


def test_a_download_that_breaks_off_is_no_checkpoint_and_goes_on(memory, tmp_path, monkeypatch):
    for name in "abc":
        memory.pipe(f"/bucket/run/{name}.safetensors", name.encode() * 100)
    get = MemoryFileSystem.get_file

    def cut(fs, remote, to):
        if remote.endswith("b.safetensors"):
            Path(to).write_bytes(b"b" * 10)
            return
        get(fs, remote, to)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", cut)
        with pytest.raises(OSError, match=r"run/b\.safetensors: .*10 bytes arrived, expected 100"):
            local("memory://bucket/run")
    assert not list((tmp_path / "cache").rglob("[!.]*b.safetensors"))
    asked = []
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda fs, *args: (asked.append(args[0]), get(fs, *args))
    )
    assert len(contents(local("memory://bucket/run"))) == 3
    assert "/bucket/run/a.safetensors" not in asked


def test_what_changes_while_it_is_fetched_is_refused(memory, monkeypatch):
    memory.pipe("/bucket/run/model.safetensors", b"first")
    get = MemoryFileSystem.get_file

    def change(fs, remote, to):
        get(fs, remote, to)
        fs.pipe(remote, b"other")

    monkeypatch.setattr(MemoryFileSystem, "get_file", change)
    with pytest.raises(OSError, match="changed during the download; try again"):
        local("memory://bucket/run")


def test_names_that_lead_out_of_the_folder_are_refused(memory, hub, monkeypatch):
    names = {"model.safetensors": b"", "../../.bashrc": b"evil"}
    hub.add("models/org/evil", names)
    with pytest.raises(ValueError, match=r"named '\.\./\.\./\.bashrc'"):
        local("hf://org/evil")
    listed = {f"/bucket/evil/{n}": {"size": 1, "type": "file"} for n in names}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda fs, root, detail: listed)
    with pytest.raises(ValueError, match=r"named '\.\./\.\./\.bashrc'"):
        Bucket("memory://bucket/evil").list()


def test_pickles_and_python_of_a_stranger_are_not_even_fetched(memory):
    for name in ("model.safetensors", "weights.pkl", "modeling.py", "a/optimizer.bin"):
        memory.pipe(f"/bucket/theirs/{name}", b"x")
    assert list(contents(local("memory://bucket/theirs"))) == ["model.safetensors"]


def test_a_run_that_is_still_on_its_way_is_no_checkpoint(run, memory):
    put(memory, run / "checkpoints/8/state", "/bucket/runs/mine/checkpoints/8/state")
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        load_policy(RUN)


def test_a_damaged_checkpoint_in_a_bucket_is_refused(run, memory, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    file = next((tmp_path / "run/checkpoints/8/state").rglob("d/*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    put(memory, tmp_path / "run", "/bucket/runs/mine")
    with pytest.raises(ValueError, match="is damaged and was not loaded"):
        own.restore_params(Path(RUN))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/none", "is empty or not there"),
        ("hf://org/none", "not on the hub, or is private; check the name"),
        ("hf://org/there@v9", "no such revision"),
        ("hf://org/there/none", "is empty or not there"),
        ("hf://org/there", "holds no checkpoint"),
        ("hf://datasets/org/set", "is a dataset repository; give a model"),
        ("hf://alone", "expected hf://organisation/name"),
        ("gdrive://bucket/set", "a Python package is missing"),
        ("nonsense://bucket/set", "nonsense"),
        ("simplecache::memory://bucket/x", "chained fsspec URLs"),
        ("reference://bucket/x", "chained fsspec URLs and reference:// are not supported"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_sentence(url, message, hub, memory):
    hub.add("models/org/there", {"README.md": b""})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_policy(url)


def test_a_refusal_and_a_lost_connection_tell_what_to_do(memory, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    with pytest.raises(OSError, match=r"memory://bucket/run: access was refused .*aws configure"):
        local("memory://bucket/run")

    def lose(*args, **kwargs):
        raise RuntimeError("EndpointConnectionError")

    monkeypatch.setattr(MemoryFileSystem, "find", lose)
    with pytest.raises(OSError, match=r"cannot be reached .*check the connection"):
        local("memory://bucket/run")


def test_a_hub_checkpoint_that_was_fetched_loads_offline_and_a_part_of_one_does_not(
    run, hub, monkeypatch
):
    hub.add("models/org/mine", contents(run))
    place = local("hf://org/mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local("hf://org/mine") == place
    next((place / "checkpoints/8").rglob("digests.json")).unlink()
    with pytest.raises(FileNotFoundError, match="not completely cached and the hub cannot be"):
        local("hf://org/mine")
    with pytest.raises(FileNotFoundError, match="nothing of it is cached"):
        local("hf://org/never")
