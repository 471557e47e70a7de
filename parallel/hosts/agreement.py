"""One decision for all hosts, which the first host makes from what each host found.

It uses the coordination service, not the devices, so a background thread may use it while the
devices train. If a host does not respond, the wait ends with an error that names it.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from parallel.hosts import coordination
from parallel.hosts.distributed import host_count, host_index

T = TypeVar("T")
_rounds: dict[str, Iterator[int]] = defaultdict(itertools.count)


def agree(name: str, mine: str, decide: Callable[[list[str]], str], seconds: float = 3600.0) -> str:
    """Decision that host 0 alone makes, by calling `decide` on the `mine` of all hosts, in their
    order.

    All hosts call it equally often with the same `name`, from one thread each. `decide` must not
    raise: the others would wait for it.

    Raises:
      TimeoutError: some hosts did not respond within `seconds`; names them.
    """
    client = coordination.client()
    if client is None or host_count() == 1:
        return decide([mine])
    folder, turn = f"agree/{name}", next(_rounds[name])
    client.put(f"{folder}/{host_index()}", mine)
    client.barrier(f"{folder}/brought/{turn}", seconds)
    if host_index() == 0:
        brought = client.list(folder)
        client.put(f"{folder}/answer", decide([brought[str(i)] for i in range(host_count())]))
    client.barrier(f"{folder}/decided/{turn}", seconds)
    answer = client.get(f"{folder}/answer")
    assert answer is not None
    return answer


def total(name: str, mine: T) -> T:
    """Sums over all hosts of the numbers in `mine`, JSON of the same shape on each; see `agree`."""
    if host_count() == 1:
        return mine

    def added(brought: list[str]) -> str:
        return json.dumps(jax.tree.map(lambda *numbers: sum(numbers), *map(json.loads, brought)))

    return json.loads(agree(name, json.dumps(mine), added))
