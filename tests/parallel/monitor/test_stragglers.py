from parallel.hosts.facts import HostFacts
from parallel.monitor.stragglers import StragglerMonitor


def hosts(*busy, wait=0.0):
    return {i: HostFacts(0, 1e9, b, b * wait) for i, b in enumerate(busy)}


def test_a_host_that_is_persistently_slow_is_named_once():
    watch, said = StragglerMonitor(), []
    for step in range(200):
        metrics, line = watch.after(1.0, hosts(0.01, 0.01, 0.3, 0.02, wait=0.9))
        assert bool(metrics) == (step % 50 == 49)
        said += [line] if line else []
    assert said == [
        "Host 2 of 4 keeps the others waiting: in the last 50 steps it needed 0.3 s before each "
        "step, the others 0.01 s; 0.27 s of that was waiting for data."
    ]
    assert metrics["slowest_host"] == 2
    assert metrics["slowest_host_p50"] == metrics["host_max"] == metrics["host_p95"] == 0.3


def test_hosts_that_take_turns_or_little_of_the_step_are_not_named():
    turns, little = StragglerMonitor(), StragglerMonitor()
    for step in range(200):
        assert (
            turns.after(1.0, hosts(*(0.5 if step % 3 == i else 0.01 for i in range(3))))[1] is None
        )
        assert little.after(1.0, hosts(0.001, 0.04))[1] is None


def test_a_single_host_has_no_stragglers():
    watch = StragglerMonitor()
    assert all(watch.after(1.0, hosts(0.9)) == ({}, None) for _ in range(100))
