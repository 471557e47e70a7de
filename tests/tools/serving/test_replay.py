"""A recorded episode is played back to each client from its beginning, action by action, and ends
with an error and not with an invented action; SIGTERM leaves a recording whole."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from data import open_dataset
from tests.helpers.data.recording import make_episode, write
from tests.helpers.tools.served import client, serving
from tools.serve import ServeConfig, run
from tools.serving.replay import open_replay


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "dataset"
    return write(path, [make_episode(number, 7) for number in range(3)])


def asked(**more):
    return {"anything": np.zeros(2), "prompt": "push", **more}


def test_chunks_put_end_to_end_are_the_recorded_actions(dataset):
    recorded = open_dataset(dataset).column("action", [1])
    with serving(open_replay(dataset, 1, 3)) as running, client(running.url) as robot:
        assert robot.metadata["actions"]["shape"] == [3, 3]
        chunks = [robot.infer(asked())["actions"] for _ in range(3)]
        assert [len(chunk) for chunk in chunks] == [3, 3, 1]
        np.testing.assert_array_equal(np.concatenate(chunks), recorded)
        with pytest.raises(ValueError, match="has ended after 7 actions"):
            robot.infer(asked())
        with client(running.url) as other:
            np.testing.assert_array_equal(other.infer(asked())["actions"], recorded[:3])


def test_a_client_that_says_how_much_it_acted_goes_on_from_there(dataset):
    recorded = open_dataset(dataset).column("action", [0])
    with serving(open_replay(dataset, 0, 4)) as running, client(running.url) as robot:
        robot.infer(asked())
        np.testing.assert_array_equal(robot.infer(asked(executed=1))["actions"], recorded[1:5])
        np.testing.assert_array_equal(robot.infer(asked(executed=0))["actions"], recorded[1:5])
        with pytest.raises(ValueError, match="'executed' is 5; the last chunk had 4 steps"):
            robot.infer(asked(executed=5))


@pytest.mark.parametrize(
    ("episode", "steps", "why"),
    [(3, 2, "no episode 3; give --episode 0 to 2"), (0, 0, "chunks have 0 steps")],
)
def test_what_cannot_be_played_back_is_refused(dataset, episode, steps, why):
    with pytest.raises(ValueError, match=why):
        open_replay(dataset, episode, steps)


def test_a_server_has_a_checkpoint_or_an_episode_and_not_both(dataset, tmp_path):
    for given in ({}, {"checkpoint": tmp_path, "replay": str(dataset)}):
        with pytest.raises(ValueError, match="Give either --checkpoint, or --replay"):
            run(ServeConfig(**given), None)


@pytest.mark.slow
def test_a_replay_that_is_recorded_gives_its_actions_back_after_sigterm(dataset, tmp_path):
    out = tmp_path / "recorded"
    command = [sys.executable, "-m", "tools.serve", "--port", "0", "--record", str(out)]
    command += ["--replay", str(dataset), "--episode", "2", "--replay-steps", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        for line in server.stdout:
            if line.startswith("Serving on"):
                break
        url = line.split()[2].rstrip(";")
        source = open_dataset(dataset)
        episode = source.episode(2)
        with client(url) as robot:
            for t in range(5):
                robot.infer(
                    {
                        "observation/front": episode["observation.images.front"][t],
                        "observation/wrist": episode["observation.images.wrist"][t],
                        "observation/state": episode["observation.state"][t],
                        "prompt": episode["task"],
                    }
                )
            server.send_signal(signal.SIGTERM)
            rest = server.stdout.read()
        assert server.wait(120) == 0
    assert "5 exchanges in 1 episode" in rest
    found = open_dataset(out)
    np.testing.assert_array_equal(found.column("action"), episode["action"][:5])
    np.testing.assert_array_equal(
        found.column("observation.state"), episode["observation.state"][:5]
    )
    assert found.episode(0)["task"] == episode["task"]
