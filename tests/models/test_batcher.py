"""Any schedule of the batcher loses nothing, runs nothing twice and keeps a caller's order."""

import random
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future, wait
from queue import Full

import numpy as np
import pytest

from models.batcher import Batcher

PATIENCE = 300
"""Seconds that a loaded machine may take for what should be immediate."""
FOREVER = 1e6


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A `run` that says what it got and waits to be let through."""

    def __init__(self):
        self.batches: list[list] = []
        self.entered, self.passes = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, items: list) -> list:
        self.batches.append(items)
        self.entered.release()
        assert self.passes.acquire(timeout=PATIENCE)
        return [-item for item in items]

    def wait_until_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)


class Outstanding:
    """Counts how often it was asked, so that a test knows when the batcher has looked."""

    def __init__(self, answer: int = 1):
        self.answer, self.asked = answer, threading.Semaphore(0)

    def __call__(self) -> int:
        self.asked.release()
        return self.answer

    def wait_until_asked(self) -> None:
        assert self.asked.acquire(timeout=PATIENCE)


def negative(items: list[int]) -> list[int]:
    return [-item for item in items]


def test_a_full_batch_is_run_at_once():
    with Batcher(negative, sizes=(2, 4), deadline=FOREVER, capacity=8) as batcher:
        futures = [batcher.submit(i) for i in range(4)]
        assert [f.result(PATIENCE) for f in futures] == [0, -1, -2, -3]
        assert batcher.statistics().batches == {4: 1}


def test_the_deadline_counts_from_the_first_arrival():
    clock, others = Clock(), Outstanding()
    batcher = Batcher(
        negative, sizes=(8,), deadline=2.0, capacity=8, outstanding=others, clock=clock
    )
    with batcher:
        first = batcher.submit(1)
        others.wait_until_asked()
        clock.now = 1.5
        second = batcher.submit(2)
        others.wait_until_asked()
        assert not first.done()
        clock.now = 2.0
        batcher.recheck()
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (-1, -2)
        assert batcher.statistics().waits == (2.0, 0.5)
        assert batcher.statistics().batches == {2: 1}


def test_the_deadline_passes_by_itself():
    with Batcher(negative, sizes=(8,), deadline=0.02, capacity=8) as batcher:
        assert batcher.submit(1).result(PATIENCE) == -1


def test_time_spent_behind_another_batch_counts():
    clock, gate, others = Clock(), Gate(), Outstanding(0)
    batcher = Batcher(gate, sizes=(2,), deadline=1.0, capacity=8, outstanding=others, clock=clock)
    with batcher:
        batcher.submit(1)
        gate.wait_until_entered()
        others.answer = 1
        late = batcher.submit(2)
        clock.now = 5.0
        gate.passes.release(2)
        assert late.result(PATIENCE) == -2
        assert batcher.statistics().waits == (0.0, 5.0)


def test_a_batch_is_run_early_when_nobody_else_can_come():
    others = Outstanding(3)
    with Batcher(negative, sizes=(8,), deadline=FOREVER, capacity=8, outstanding=others) as batcher:
        first = batcher.submit(1)
        others.wait_until_asked()
        second = batcher.submit(2)
        others.wait_until_asked()
        assert not first.done()
        others.answer = 0
        batcher.recheck()
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (-1, -2)
        assert batcher.statistics().batches == {2: 1}


def test_an_exception_is_its_own_batchs_alone():
    def odd_only(items):
        if 2 in items:
            raise OSError("no even numbers")
        return items

    with Batcher(odd_only, sizes=(1,), deadline=0, capacity=8) as batcher:
        futures = [batcher.submit(i) for i in (1, 2, 3)]
        assert futures[0].result(PATIENCE) == 1
        with pytest.raises(OSError, match="no even numbers"):
            futures[1].result(PATIENCE)
        assert futures[2].result(PATIENCE) == 3
        assert batcher.statistics().failed == 1


def test_a_run_that_forgets_an_item_fails_its_batch():
    with Batcher(lambda items: items[1:], sizes=(2,), deadline=0, capacity=2) as batcher:
        error = batcher.submit(1).exception(PATIENCE)
    assert str(error) == "`run` returned 0 results for 1 items."


def test_an_outstanding_that_raises_fails_what_waits_and_nothing_else():
    def broken():
        if broken.whole:
            return 0
        raise KeyError("callers")

    broken.whole = False
    with Batcher(negative, sizes=(4,), deadline=FOREVER, capacity=4, outstanding=broken) as batcher:
        with pytest.raises(KeyError, match="callers"):
            batcher.submit(1).result(PATIENCE)
        broken.whole = True
        assert batcher.submit(2).result(PATIENCE) == -2


def test_a_full_queue_refuses_or_waits_as_the_caller_wishes():
    gate = Gate()
    batcher = Batcher(gate, sizes=(1,), deadline=0, capacity=2)
    running = batcher.submit(0)
    gate.wait_until_entered()
    waiting = [batcher.submit(i) for i in (1, 2)]
    for timeout in (0, 0.01):
        with pytest.raises(Full, match=r"was full \(2 items\) for"):
            batcher.submit(3, timeout=timeout)
    patient: list[Future] = []
    thread = threading.Thread(target=lambda: patient.append(batcher.submit(4)))
    thread.start()
    gate.passes.release(9)
    thread.join(PATIENCE)
    assert [f.result(PATIENCE) for f in (running, *waiting, *patient)] == [0, -1, -2, -4]
    batcher.close()
    assert batcher.statistics().refused == 2
    assert batcher.statistics().deepest == 2


def test_cancelled_items_are_not_run_and_make_place():
    gate = Gate()
    with Batcher(gate, sizes=(2,), deadline=0, capacity=2) as batcher:
        batcher.submit(0)
        gate.wait_until_entered()
        given_up, kept = batcher.submit(1), batcher.submit(2)
        assert given_up.cancel()
        placed = batcher.submit(3, timeout=0)
        assert wait([given_up], timeout=PATIENCE).done == {given_up}
        gate.passes.release(2)
        assert (kept.result(PATIENCE), placed.result(PATIENCE)) == (-2, -3)
    assert gate.batches == [[0], [2, 3]]
    assert batcher.statistics().cancelled == 1


def test_a_batch_given_up_whole_is_not_run():
    others = Outstanding()
    with Batcher(negative, sizes=(4,), deadline=FOREVER, capacity=4, outstanding=others) as batcher:
        for _ in range(3):
            future = batcher.submit(1)
            others.wait_until_asked()
            future.cancel()
        others.answer = 0
        assert batcher.submit(2).result(PATIENCE) == -2
        assert batcher.statistics().batches == {1: 1}


def test_closing_answers_all_that_was_taken():
    gate = Gate()
    gate.passes.release(9)
    batcher = Batcher(gate, sizes=(2,), deadline=FOREVER, capacity=8)
    futures = [batcher.submit(i) for i in range(5)]
    batcher.close()
    assert [f.result(0) for f in futures] == [0, -1, -2, -3, -4]
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(6)
    batcher.close()


def test_closing_without_draining_finishes_the_running_batch_and_cancels_the_rest():
    gate = Gate()
    batcher = Batcher(gate, sizes=(1,), deadline=0, capacity=2)
    running = batcher.submit(1)
    gate.wait_until_entered()
    waiting = [batcher.submit(i) for i in (2, 3)]
    refused = []

    def blocked():
        try:
            batcher.submit(4)
        except RuntimeError as error:
            refused.append(str(error))

    threads = [
        threading.Thread(target=blocked),
        threading.Thread(target=batcher.close, kwargs={"drain": False}),
    ]
    for thread in threads:
        thread.start()
    threads[0].join(PATIENCE)
    gate.passes.release()
    threads[1].join(PATIENCE)
    assert running.result(0) == -1
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(0)
    assert refused == ["The batcher is closed and takes no more items."]
    assert gate.batches == [[1]]


def test_statistics_add_up():
    with Batcher(negative, sizes=(2, 4), deadline=FOREVER, capacity=8) as batcher:
        futures = [batcher.submit(i) for i in range(7)]
        batcher.close()
        assert all(f.done() for f in futures)
    seen = batcher.statistics()
    assert seen.batches == {3: 1, 4: 1}
    assert (seen.items, seen.rows, seen.depth) == (7, 8, 0)
    assert seen.fill == 7 / 8
    assert len(seen.waits) == 7
    assert seen.waited == pytest.approx(sum(seen.waits))


@pytest.mark.parametrize(
    ("sizes", "deadline", "capacity"),
    [((), 1, 4), ((0, 2), 1, 4), ((8,), 1, 4), ((4,), -1, 4), ((4,), float("nan"), 4)],
)
def test_settings_out_of_range_are_refused(sizes, deadline, capacity):
    with pytest.raises(ValueError, match="A batcher needs sizes of at least 1"):
        Batcher(negative, sizes=sizes, deadline=deadline, capacity=capacity)


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_loses_nothing_repeats_nothing_and_keeps_each_callers_order(seed):
    """Callers that submit, cancel and go away at random, on a `run` that fails at random."""
    draw = random.Random(seed)
    size, callers = draw.choice([1, 3, 8]), 6
    fails = {draw.randrange(300) for _ in range(20)}
    ran: list[tuple[int, int]] = []

    def run(items):
        ran.extend(items)
        assert 1 <= len(items) <= size
        if any(caller * 50 + i in fails for caller, i in items):
            raise OSError(str(items))
        return [(caller, -i) for caller, i in items]

    left = [callers]
    outcomes: list[list[tuple[int, Future | None]]] = [[] for _ in range(callers)]
    batcher = Batcher(
        run,
        sizes=(size,),
        deadline=draw.choice([0, 1e-4, 1e-3]),
        capacity=size + draw.randrange(4),
        outstanding=draw.choice([None, lambda: left[0]]),
    )

    def call(caller: int) -> None:
        own = random.Random(100 * seed + caller)
        for i in range(50):
            try:
                future = batcher.submit((caller, i), timeout=own.choice([None, None, 0]))
            except Full:
                outcomes[caller].append((i, None))
                continue
            outcomes[caller].append((i, future))
            if own.random() < 0.1:
                future.cancel()
            elif own.random() < 0.3:
                future.exception(PATIENCE)
        left[0] -= 1
        batcher.recheck()

    threads = [threading.Thread(target=call, args=(caller,)) for caller in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    batcher.close()
    assert max(Counter(ran).values()) == 1
    answered = set()
    for caller, calls in enumerate(outcomes):
        assert [i for i, _ in calls] == list(range(50))
        for i, future in calls:
            if future is None:
                continue
            assert future.done()
            if future.cancelled():
                continue
            answered.add((caller, i))
            error = future.exception()
            assert (
                future.result() == (caller, -i) if error is None else str((caller, i)) in str(error)
            )
        own_order = [i for c, i in ran if c == caller]
        assert own_order == sorted(own_order)
    assert set(ran) == answered
    seen = batcher.statistics()
    assert seen.items == len(ran)
    assert seen.cancelled == sum(f is not None and f.cancelled() for c in outcomes for _, f in c)
    assert seen.refused == sum(f is None for c in outcomes for _, f in c)
    assert np.isfinite(seen.waits).all()
