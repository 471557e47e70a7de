"""`tools.record` as a process that is killed, or sent Ctrl-C, at some moment: what is finished can
be read, and resumed it comes to the bytes of a recording that was not cut off."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.errors import MissingFileError
from parallel.hosts.exits import INTERRUPTED
from tests.helpers.parallel.toy import environment
from tests.helpers.sim.point_suite import TWO_TASKS
from tools.record import RecordConfig, record_dataset

EPISODES = 20
RECORD = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
runpy.run_module("tools.record", run_name="__main__", alter_sys=True)
"""


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def finished(path: Path) -> int:
    return len(list(path.glob("meta/episodes/chunk-*/file-*.parquet")))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.drill)])
def test_a_recording_cut_off_at_any_moment_is_resumed_to_the_same_bytes(kills, tmp_path):
    (tmp_path / "mine.py").write_text(TWO_TASKS)
    suite, rng, left, number = (
        f"{tmp_path / 'mine.py'}:MINE",
        np.random.default_rng(kills),
        kills,
        0,
    )
    whole = record_dataset(RecordConfig(tmp_path / "whole", suite, episodes=EPISODES, slots=3))
    while left:
        out, number = tmp_path / f"killed{number}", number + 1
        while (before := finished(out)) < 2 * EPISODES and left:
            command = [sys.executable, "-c", RECORD, "--suite", suite, "--out", str(out)]
            command += ["--episodes", str(EPISODES), "--slots", "3", "--resume"]
            with subprocess.Popen(
                command, env=environment(1), stdout=subprocess.DEVNULL
            ) as process:
                wanted = before + int(rng.integers(0, EPISODES))
                while finished(out) < wanted and process.poll() is None:
                    time.sleep(0.001)
                time.sleep(float(rng.uniform(0, 0.05)))
                process.send_signal((signal.SIGKILL, signal.SIGINT)[left % 2])
                if process.wait() not in (-signal.SIGKILL, -signal.SIGINT, INTERRUPTED):
                    break
            left -= 1
            assert_opens(out)
        config = RecordConfig(out, suite, episodes=EPISODES, slots=3, resume=True)
        assert record_dataset(config)["frames"] == whole["frames"]
        assert files(out) == files(tmp_path / "whole")
    again = record_dataset(config)
    assert (again["kept"], again["frames"]) == (2 * EPISODES, whole["frames"])
    with pytest.raises(
        ValueError, match=r"is a finished dataset of 40 episodes, but 44 were asked"
    ):
        record_dataset(RecordConfig(out, suite, episodes=22, slots=3, resume=True))


def assert_opens(path: Path) -> None:
    """Every finished episode is there, row by row and frame by frame."""
    count = finished(path)
    if not count:
        with pytest.raises(MissingFileError):
            open_dataset(path)
        return
    dataset = open_dataset(path)
    if (path / "meta/recording.jsonl").exists():
        assert dataset.num_episodes == count
    assert dataset.column("index").tolist() == list(range(dataset.num_frames))
    for i in range(dataset.num_episodes):
        (camera,) = dataset.cameras
        assert len(dataset.frames(i, camera)) == dataset.lengths[i]
