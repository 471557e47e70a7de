import threading
import time

import pytest

from parallel.prefetch import Prefetcher


def test_items_come_in_order_and_then_end():
    with Prefetcher(iter(range(20)), lambda x: 2 * x, depth=3) as items:
        assert list(items) == list(range(0, 40, 2))
        assert list(items) == []


def test_an_exception_of_the_source_is_raised_after_the_items_before_it():
    def source():
        yield 1
        raise OSError("truncated.mp4")

    with Prefetcher(source(), lambda x: x) as items:
        assert next(items) == 1
        for _ in range(2):
            with pytest.raises(OSError, match=r"truncated\.mp4"):
                next(items)


def test_an_exception_of_put_is_raised_too():
    with (
        Prefetcher(iter([1, 0]), lambda x: 1 // x) as items,
        pytest.raises(ZeroDivisionError),
    ):
        list(items)


def test_it_knows_how_many_items_were_ready():
    fetched = threading.Semaphore(0)

    def put(item):
        fetched.release()
        return item

    with Prefetcher(iter(range(3)), put, depth=5) as items:
        for _ in range(3):
            assert fetched.acquire(timeout=300)
        while items._queue.qsize() < 4:  # the last item and the end may be on their way
            time.sleep(0.01)
        ready = []
        for _ in items:
            ready.append(items.ready)
        assert ready == [4, 3, 2]


def test_at_most_depth_items_are_taken_ahead_and_closing_ends_thread_and_source():
    taken, closed, second = [], threading.Event(), threading.Event()

    def source():
        try:
            for i in range(100):
                taken.append(i)
                if i == 3:
                    second.set()
                yield i
        finally:
            closed.set()

    with Prefetcher(source(), lambda x: x, depth=2) as items:
        assert next(items) == 0
        assert second.wait(300)
        assert taken == [0, 1, 2, 3]  # one used, two waiting, one in the thread's hands
    assert closed.is_set()
    assert not any(t.name == "prefetch" for t in threading.enumerate())
