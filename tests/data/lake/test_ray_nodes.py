"""Jobs on a Ray cluster of several nodes with addresses of their own, through what befalls one: a
node lost, one that joins, one that is slow, object stores that are full. Takes some minutes, needs
root and Linux's namespaces; prints what became of the work."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit
from data.files.folder import LocalFolder
from data.store import convert
from data.store.convert import Settings
from data.video.encoding import VideoEncoding
from tests.helpers.data.ray_nodes import RayNodes, ray_nodes
from tests.helpers.data.recording import make_episode, write
from tests.helpers.data.stores import contents
from tests.helpers.namespaces import available

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not available(), reason="needs root, ip, unshare and nsenter"),
]

EPISODES, LENGTH = 16, 60
SETTINGS = Settings(1344, "jpeg", shard_frames=LENGTH)
CONVERT = """
import sys, time
import ray
from data import open_dataset
from data.files.folder import LocalFolder
from data.files.job import running
from data.lake.on_ray import on_ray
from data.store.convert import Path, Settings, convert

address, path, out, side, frames, held_node = sys.argv[1:]

def held(work):
    def do(unit, done):
        if ray.util.get_node_ip_address() == held_node:
            Path(out + ".held").touch()
            time.sleep(10000)
        return work(unit, done)
    return do

with on_ray(address) as (run, tally), running(lambda work, *rest: run(held(work), *rest)):
    settings = Settings(int(side), "jpeg", shard_frames=int(frames))
    convert(open_dataset(path), LocalFolder(Path(out)), settings)
print(tally)
"""
FILL = """
import sys, time
import numpy as np
import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
class Filler:
    def __init__(self):
        self.held = [ray.put(np.ones(16 << 20, np.uint8)) for _ in range(12)]
    def there(self):
        return len(self.held)

fillers = [Filler.remote() for _ in range(3)]
print(ray.get([filler.there.remote() for filler in fillers]), flush=True)
time.sleep(10000)
"""
TALLY = re.compile(r"(\d+) units of work on (\d+) nodes \((.*)\); (\d+) restarted.*?(\d+) retried")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    episodes = [make_episode(number, LENGTH) for number in range(EPISODES)]
    return write(tmp_path_factory.mktemp("lake") / "dataset", episodes, video_megabytes=0.3)


@pytest.fixture(scope="module")
def store(dataset, tmp_path_factory) -> dict[str, bytes]:
    folder = LocalFolder(tmp_path_factory.mktemp("alone") / "store")
    convert.convert(open_dataset(dataset), folder, SETTINGS)
    return contents(folder.root)


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(3) as cluster:
        yield cluster


def converting(
    nodes: RayNodes, dataset: Path, out: Path, held: str = ""
) -> "subprocess.Popen[str]":
    """The command at work; units on the node with the address `held` never end, and OUT.held tells
    that one has begun."""
    numbers = str(SETTINGS.image_size), str(SETTINGS.shard_frames)
    words = [sys.executable, "-c", CONVERT, nodes.address, str(dataset), str(out), *numbers, held]
    return subprocess.Popen(
        nodes.inside(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: "subprocess.Popen[str]", began: float, what: str) -> tuple[int, ...]:
    """Units, nodes, units begun again and tried again, as the command says them."""
    said, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-4000:]
    found = TALLY.search(" ".join(said.split()))
    assert found is not None, said
    print(f"\n{what}: {time.monotonic() - began:.0f} s; {found[0]}")
    return int(found[1]), int(found[2]), int(found[4]), int(found[5])


def finished(out: Path) -> int:
    return len(list(out.glob("parts/*.json")))


def until_finished(process: "subprocess.Popen[str]", out: Path, count: int) -> None:
    while finished(out) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def test_three_nodes_write_the_bytes_of_one_process(nodes, dataset, store, tmp_path):
    began = time.monotonic()
    process = converting(nodes, dataset, tmp_path / "s")
    units, count, redone, _ = ended(process, began, "convert on three nodes")
    assert (units, count, redone) == (EPISODES + 1, 3, 0)
    assert contents(tmp_path / "s") == store


def test_whoever_has_no_token_is_told_of_it(nodes, dataset):
    words = ["env", "-u", "RAY_AUTH_MODE", "-u", "RAY_AUTH_TOKEN", sys.executable, "-m"]
    words += ["tools.data", "validate", str(dataset), "--ray-address", nodes.address]
    done = subprocess.run(nodes.inside(words), capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{nodes.address} requires a token; set RAY_AUTH_MODE=token" in done.stderr


def test_a_slow_node_changes_no_byte(nodes, dataset, store, tmp_path):
    began = time.monotonic()
    with nodes.nodes[2].slow():
        process = converting(nodes, dataset, tmp_path / "s")
        units, *_ = ended(process, began, "convert with a slow node")
    assert units == EPISODES + 1
    assert contents(tmp_path / "s") == store


def test_an_edit_with_full_object_stores_writes_the_same_bytes(nodes, dataset, tmp_path):
    filling = subprocess.Popen(
        nodes.inside([sys.executable, "-c", FILL, nodes.address]),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert filling.stdout is not None
        assert filling.stdout.readline() == "[12, 12, 12]\n"  # 192 MiB in each of 100
        began = time.monotonic()
        out = tmp_path / "edited"
        words = ["-m", "tools.data", "edit", str(dataset), "--out", str(out), "--delete", "3"]
        words += ["--codec", "h264", "--ray-address", nodes.address]
        process = subprocess.Popen(
            nodes.inside([sys.executable, *words]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        units, *_ = ended(process, began, "edit with full object stores")
    finally:
        filling.kill()
        filling.wait()
    assert units > 2 * (EPISODES - 1)
    edit = Edit(delete=(3,), encoding=VideoEncoding("h264"))
    edit_dataset([dataset], tmp_path / "alone", edit)
    assert contents(out) == contents(tmp_path / "alone")


def test_a_node_is_lost_and_another_joins_in_the_middle(nodes, dataset, store, tmp_path):
    out, began, lost = tmp_path / "s", time.monotonic(), nodes.nodes[2]
    process = converting(nodes, dataset, out, lost.address)
    until_finished(process, out, 3)
    while not out.with_name("s.held").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    time.sleep(1)  # the count of units begun is on its way
    nodes.lose(lost)
    joined = nodes.join()
    units, count, redone, _ = ended(process, began, f"convert, {lost.address} lost, one joins")
    assert units == EPISODES + 1
    assert redone >= 1
    assert contents(out) == store
    print(f"{joined.address} joined; {count} nodes did units")
