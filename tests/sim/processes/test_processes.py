"""Simulators in processes of their own: what one of them does wrong concerns no other."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sim.evaluate import evaluate
from sim.processes import child, processes
from sim.processes.processes import Processes
from sim.protocol import Outcome, Start
from tests.helpers.sim import fragile

SIMULATOR = Path(fragile.__file__)
WRONG = {
    "crash": "SIGSEGV",
    "raise": "the physics exploded",
    "exit": "exit code 7",
    "hang": "hung",
    "hang in C": "hung",
    "garbage": "sent an invalid message",
    "wrong size": "its spec says",
}


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    scars = str(tmp_path_factory.mktemp("scars"))
    with Processes(SIMULATOR, 3, options={"scars": scars}) as slots:
        yield slots


def outcome_of(slots: Processes, slot: int) -> Outcome:
    [outcome] = slots.poll()
    assert outcome.slot == slot
    return outcome


def episode(slots: Processes, slot: int, start: Start, chunks=(4, 4, 4)) -> list[Outcome]:
    """Acts 0.02 along x at every step, and so never reaches anything."""
    slots.begin(slot, start)
    outcomes = [outcome_of(slots, slot)]
    for chunk in chunks:
        slots.send(slot, np.full((chunk, 2), (0.02, 0.0)))
        outcomes.append(outcome_of(slots, slot))
    return outcomes


def rewards(outcomes: list[Outcome]) -> np.ndarray:
    assert all(outcome.error is None for outcome in outcomes)
    return np.concatenate([outcome.reward for outcome in outcomes])


def children() -> list[int]:
    """Processes that run the simulator and are ours, zombies among them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(status[1]) == os.getpid():
                found.append(int(folder.name))
    return found


def test_an_episode_is_the_same_in_any_slot_however_it_is_cut_into_chunks(slots):
    whole = episode(slots, 0, Start("calm", 5), (12,))
    cut = episode(slots, 1, Start("calm", 5), (1, 5, 2, 4))
    other = episode(slots, 2, Start("calm", 6), (12,))
    np.testing.assert_array_equal(rewards(whole), rewards(cut))
    np.testing.assert_array_equal(whole[-1].observation.images, cut[-1].observation.images)
    np.testing.assert_array_equal(whole[-1].observation.state, cut[-1].observation.state)
    assert not np.array_equal(rewards(whole), rewards(other))
    assert [o.ended for o in cut] == [False, False, False, False, True]
    assert cut[-1].truncated
    assert not cut[-1].terminated


def test_acting_stops_where_the_episode_ends(slots):
    slots.begin(0, Start("calm", 1))
    first = outcome_of(slots, 0)
    slots.demonstrate(0, 12)
    last = outcome_of(slots, 0)
    assert first.reward.shape == (0,)
    assert last.terminated
    assert last.success
    assert not last.truncated
    assert len(last.reward) == len(last.actions) < 12
    assert last.achieved is None, "it knows of its own goal alone, which it reached"
    seen = first.observation.state + 0.3 * last.actions.sum(0)
    np.testing.assert_allclose(last.observation.state, seen, rtol=1e-5)


def test_film_shows_every_step_and_only_when_asked_for(slots):
    slots.begin(0, Start("calm", 1))
    outcome_of(slots, 0)
    slots.send(0, np.zeros((3, 2)), film=True)
    film = outcome_of(slots, 0).film
    assert film.shape == (3, child.FILM_SIZE, child.FILM_SIZE, 3)
    assert film[:, 0, 0, 0].tolist() == [1, 2, 3]
    slots.send(0, np.zeros((3, 2)))
    assert outcome_of(slots, 0).film is None


def test_a_disturbed_expert_is_disturbed_alike_by_the_same_seed_and_says_what_it_wanted(slots):
    def states(slot, chunks, noise):
        slots.begin(slot, Start("calm", 3))
        outcome_of(slots, slot)
        for chunk in chunks:
            slots.demonstrate(slot, chunk, noise)
            outcome = outcome_of(slots, slot)
        return outcome.observation.state, outcome.actions

    disturbed, wanted = states(0, (2,), 0.2)
    again, _ = states(1, (1, 1), 0.2)
    calm, undisturbed = states(2, (2,), 0.0)
    np.testing.assert_array_equal(disturbed, again)
    assert not np.array_equal(disturbed, calm)
    np.testing.assert_array_equal(wanted[0], undisturbed[0])


def test_a_simulator_may_say_that_its_expert_knows_none_of_its_tasks():
    class Ignorant(fragile.Simulator):
        def spec(self) -> dict:
            return super().spec() | {"expert": False}

    told = [child._Episode(simulator()).spec for simulator in (fragile.Simulator, Ignorant)]
    assert [spec["expert"] for spec in told] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_simulator_that_misbehaves_loses_its_own_episode_alone_and_begins_again(
    slots, wrong, monkeypatch
):
    before, count = slots.restarts.copy(), len(children())
    slots.begin(0, Start(wrong, 0))
    slots.begin(1, Start("calm", 7))
    begun = {outcome.slot: outcome for outcome in (*slots.poll(), *slots.poll())}
    actions = np.full((6, 2), (0.02, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(slots, "_patience", 5.0 if WRONG[wrong] == "hung" else slots._patience)
        slots.send(0, actions)
    slots.send(1, actions)
    told = []
    while len(told) < 2:
        told += slots.poll()
    ended = {outcome.slot: outcome for outcome in told}
    assert WRONG[wrong] in ended[0].error
    assert ended[0].ended
    assert not ended[0].success
    assert ended[0].goal == slots.spec.goals.index(wrong)

    undisturbed = episode(slots, 2, Start("calm", 7), (6,))
    np.testing.assert_array_equal(ended[1].reward, rewards(undisturbed))
    again = episode(slots, 0, Start(wrong, 0))
    np.testing.assert_array_equal(again[0].observation.state, begun[0].observation.state)
    np.testing.assert_array_equal(rewards(again), rewards(episode(slots, 1, Start(wrong, 0))))
    assert [now - was for now, was in zip(slots.restarts, before, strict=True)] == [1, 0, 0]
    assert len(children()) == count


def test_what_a_simulator_prints_disturbs_nothing(slots):
    before = slots.restarts.copy()
    rewards(episode(slots, 0, Start("chatty", 0)))
    assert slots.restarts == before


def test_a_simulator_killed_while_it_waits_is_told_of_when_next_asked(tmp_path):
    before = set(children())
    with Processes(SIMULATOR, 1, options={"scars": str(tmp_path)}) as slots:
        [first] = set(children()) - before
        slots.begin(0, Start("calm", 0))
        outcome_of(slots, 0)
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 300
        while first in children() and time.monotonic() < deadline:
            assert slots.poll() == []
        slots.send(0, np.zeros((1, 2)))
        assert "SIGKILL" in outcome_of(slots, 0).error
        assert len(rewards(episode(slots, 0, Start("calm", 0)))) == 12
        assert slots.restarts == [1]
        assert len(set(children()) - before - {first}) == 1


@pytest.mark.slow
def test_poll_waits_for_the_first_to_finish_and_no_longer_than_told():
    with Processes(SIMULATOR, 2, options={"slow": 1.0}) as slots:
        assert slots.poll() == []
        slots.begin(0, Start("calm", 0))
        slots.begin(1, Start("calm", 0))
        seen = []
        while len(seen) < 2:
            seen += slots.poll()
        slots.send(0, np.zeros((4, 2)))
        slots.send(1, np.zeros((1, 2)))
        assert slots.poll(timeout=0) == []
        assert [outcome.slot for outcome in slots.poll()] == [1]
        assert [outcome.slot for outcome in slots.poll()] == [0]
        assert slots.poll() == []


def test_wake_ends_the_poll_that_waits_or_else_the_next_and_loses_nothing(tmp_path):
    with Processes(SIMULATOR, 2, options={"scars": str(tmp_path)}) as slots:
        slots.begin(0, Start("hang", 0))
        outcome_of(slots, 0)
        slots.send(0, np.zeros((3, 2)))
        slots.wake()
        slots.wake()
        assert slots.poll() == []
        waker = threading.Timer(0.2, slots.wake)
        waker.start()
        assert slots.poll() == []
        waker.join()
        slots.begin(1, Start("calm", 0))
        assert outcome_of(slots, 1).error is None
    slots.wake()


def test_more_than_a_pipe_holds_is_sent_and_received(slots):
    slots.begin(0, Start("calm", 1))
    outcome_of(slots, 0)
    slots.send(0, np.zeros((20_000, 2)), film=True)
    assert outcome_of(slots, 0).film.nbytes > 500_000


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, ">f4"])
def test_actions_of_any_dtype_are_acted(slots, dtype):
    slots.begin(0, Start(slots.spec.tasks[0], 1))
    outcome_of(slots, 0)
    slots.send(0, np.zeros((1, 2), dtype))
    assert outcome_of(slots, 0).error is None


@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_refused(slots):
    fresh = Start("calm", 0)
    with pytest.raises(ValueError, match="cannot begin Start"):
        slots.begin(0, Start("storm", 0))
    with pytest.raises(ValueError, match="not negative"):
        slots.begin(0, Start("calm", -1))
    episode(slots, 0, fresh)
    with pytest.raises(ValueError, match="no running episode"):
        slots.send(0, np.zeros((1, 2)))
    slots.begin(0, fresh)
    with pytest.raises(ValueError, match="is busy"):
        slots.begin(0, fresh)
    outcome_of(slots, 0)
    for shape in ((2,), (0, 2), (4, 3)):
        with pytest.raises(ValueError, match=r"2 actions \(dx, dy\)"):
            slots.send(0, np.zeros(shape))
    with pytest.raises(ValueError, match="not finite"):
        slots.send(0, np.full((1, 2), np.nan))
    with pytest.raises(ValueError, match="cannot demonstrate 0 steps"):
        slots.demonstrate(0, 0)
    with pytest.raises(ValueError, match="at least one slot"):
        Processes(SIMULATOR, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "python", "says"),
    [
        ("import", sys.executable, "no module named bodies"),
        ("garbage", sys.executable, "sent an invalid message"),
        ("hang", sys.executable, "hung"),
        ("", "/no/such/python", "cannot be run"),
    ],
)
def test_one_that_does_not_start_says_why_and_leaves_nothing(monkeypatch, fault, python, says):
    monkeypatch.setattr(processes, "_STARTING", 3.0 if fault == "hang" else 300.0)
    gc.collect()
    before, open_files = children(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=f"(?s){python}; remedy: make fragile.*{says}"):
        Processes(SIMULATOR, 2, python=python, options={"fault": fault}, remedy="make fragile")
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_one_that_cannot_start_again_says_so_once(tmp_path):
    options = {"scars": str(tmp_path), "fault": "once"}
    with Processes(SIMULATOR, 2, options=options) as slots:
        slots.begin(0, Start("crash", 0))
        outcome_of(slots, 0)
        slots.send(0, np.zeros((3, 2)))
        assert "SIGSEGV" in outcome_of(slots, 0).error
        slots.begin(0, Start("crash", 0))
        with pytest.raises(ValueError, match=r"(?s)did not start.*no module named bodies"):
            slots.poll()
        assert slots.poll() == []
        assert len(rewards(episode(slots, 1, Start("calm", 0)))) == 12


def test_no_process_and_no_file_is_left_when_closed_or_forgotten():
    gc.collect()  # what other tests left open
    before, open_files = children(), len(os.listdir("/proc/self/fd"))
    closed = Processes(SIMULATOR, 2)
    assert len(children()) == len(before) + 2
    closed.begin(0, Start("calm", 0))
    closed.close()
    closed.close()
    assert children() == before
    forgotten = Processes(SIMULATOR, 1)
    del forgotten
    gc.collect()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("task", ["calm", "hang in C"])
def test_simulators_end_with_a_parent_that_is_killed(tmp_path, task):
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT.format(task=task)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SCARS": str(tmp_path)},
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        while task != "calm" and not list(tmp_path.iterdir()):
            time.sleep(0.05)
        parent.kill()
    deadline = time.monotonic() + 300
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    """True for a process, but not for a zombie that nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_evaluation_reruns_what_a_simulator_failed_in_and_any_number_of_slots_agree(tmp_path):
    starts = [Start(task, seed) for task in ("calm", "crash", "raise") for seed in range(3)]

    def homewards(observation, prompts, keys):
        towards = np.clip(0.1 - observation.state, -1, 1)
        return np.repeat(towards[:, None], 4, 1)

    def evaluated(count, scars):
        scars.mkdir(exist_ok=True)
        with Processes(SIMULATOR, count, options={"scars": str(scars)}) as slots:
            found = evaluate(slots, homewards, starts, replan_steps=2, clips=1)
            return found, sum(slots.restarts)

    (several, _), (alone, crashes) = (
        evaluated(3, tmp_path / "several"),
        evaluated(1, tmp_path / "alone"),
    )
    assert several == alone
    assert not several.failures
    reruns = {episode.start: episode.reruns for episode in several.episodes}
    assert reruns == {start: int(start.task != "calm") for start in starts}
    assert crashes == 6
    assert several.clips


_PARENT = """
import os, time
import numpy as np
from sim.processes.processes import Processes
from sim.protocol import Start
from tests.sim.processes.test_processes import SIMULATOR, children
slots = Processes(SIMULATOR, 2, options={{"scars": os.environ["SCARS"]}})
slots.begin(0, Start("{task}", 0))
slots.poll()
slots.send(0, np.zeros((6, 2)))
print(*children(), flush=True)
time.sleep(1000)
"""


def test_a_message_comes_back_as_it_was_and_a_damaged_one_is_an_error():
    message = {
        "text": "1,5 Nm · π",
        "images": np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3),
        "empty": np.zeros((0, 7), np.float32),
        "flags": np.array([True, False]),
        "number": 0.1,
    }
    data = child.pack(message)
    assert child.missing(data) == 0
    back = child.unpack(data)
    assert list(back) == ["text", "number", "images", "empty", "flags"]
    for name, value in message.items():
        np.testing.assert_array_equal(back[name], value)
        assert getattr(back[name], "dtype", None) == getattr(value, "dtype", None)

    rng = np.random.default_rng(0)
    damaged = 0
    for _ in range(500):
        wrong = bytearray(data)
        wrong[rng.integers(len(wrong) - 30)] ^= 1 << rng.integers(8)
        try:
            if child.missing(wrong) == 0:
                child.unpack(wrong)
        except ValueError:
            damaged += 1
    assert damaged > 200
