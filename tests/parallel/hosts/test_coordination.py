"""The coordination service, with two of its clients in this process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from jax._src.lib import _jax

from parallel.hosts import coordination
from tests.helpers.parallel.toy import free_port


@pytest.fixture(scope="module")
def clients():
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, 2)
    both = [_jax.get_distributed_runtime_client(address, rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.connect(), both))
        yield [coordination.Client(client) for client in both]
        list(pool.map(lambda client: client.shutdown(), both))
    service.shutdown()


def test_a_process_alone_has_no_client():
    assert coordination.client() is None


def test_what_one_puts_the_other_gets_and_lists(clients):
    first, second = clients
    assert second.get("told/a") is None
    assert second.list("told") == {}
    first.put("told/a", "1")
    first.put("told/a", "2")
    second.put("told/b", "3")
    assert second.get("told/a") == "2"
    assert first.list("told") == {"a": "2", "b": "3"}


def test_the_first_to_put_is_believed(clients):
    first, second = clients
    assert first.put_first("verdict", "mine") == "mine"
    assert second.put_first("verdict", "yours") == "mine"


def test_a_barrier_lets_all_go_or_names_who_is_late(clients):
    first, second = clients
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.barrier, "both", 60)
        first.barrier("both", 60)
        other.result()
    with pytest.raises(TimeoutError, match=r"'alone' within 0.5 seconds; ranks \[1\] are late"):
        first.barrier("alone", 0.5)
