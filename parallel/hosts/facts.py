"""Facts that hosts exchange once a step, through the step itself, and how the step uses them.

Every host passes in a row of facts. The step gathers them, and every host reads the same table at
the same point of its loop. All hosts therefore stop, skip or go back together, without a clock or
further messages.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from parallel.hosts.agreement import agree

State = TypeVar("State")


class HostFacts(NamedTuple):
    """A host's row, f32.

    `stop_signal` is the number of the signal that told this host to stop, 0 if none did; a step
    that any host enters with a signal changes nothing. An update whose gradient norm is above
    `limit` (the smallest of all hosts') is not made. `busy` is the seconds from when this host
    begins to prepare the step until it enters it, and `data_wait` the part of them spent waiting
    for data. `halts_at` is the step's number if a bad step is to halt the run and keep the state
    before it for good, else -1.
    """

    stop_signal: float
    limit: float
    busy: float
    data_wait: float
    halts_at: float = -1


def facts_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of facts [devices, 5]: a row per device, in the order of `mesh.devices`."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def put_facts(facts: HostFacts, mesh: Mesh) -> Float[Array, "d 5"]:
    """This host's facts on each of its devices, as one array over all devices of the mesh."""
    row = np.array([facts], np.float32)
    shape = (mesh.size, len(facts))
    return jax.make_array_from_callback(shape, facts_sharding(mesh), lambda _: row)


def by_host(table: Float[np.ndarray, "d 5"], mesh: Mesh) -> dict[int, HostFacts]:
    """The facts of every host, by its index."""
    owners = [device.process_index for device in mesh.devices.flat]
    return {host: HostFacts(*map(float, row)) for host, row in zip(owners, table, strict=True)}


def stop_signal(hosts: dict[int, HostFacts]) -> tuple[int, int] | None:
    """The first host that was told to stop and the signal's number, None if none was."""
    return next(
        ((host, int(f.stop_signal)) for host, f in sorted(hosts.items()) if f.stop_signal), None
    )


@jax.named_scope("update")
def settle(
    old: State,
    new: State,
    at: Int[Array, ""],
    sound: Bool[Array, ""],
    norm: Float[Array, ""],
    facts: Any,
) -> tuple[State, Bool[Array, ""]]:
    """The state that step `at` leaves (in a traced program), and whether it was a good step.

    A step that a host enters after it was told to stop leaves `old`. One that is not `sound`, or
    whose gradient `norm` is above the limit, leaves `old` except for its counts (scalar integers),
    which advance, as the schedule and the data do. If the step halts the run, the counts stay too;
    steps already under way recognise by them that they must change nothing.
    """
    table = jax.lax.with_sharding_constraint(facts, PartitionSpec())
    told: Any = HostFacts(*table.T)
    good = sound & (norm <= told.limit.min())
    due = told.halts_at.max()
    halted = (due >= 0) & ~(good & (due == at))
    goes_on = (told.stop_signal.max() == 0) & ~halted

    def choose(after: Array, before: Array) -> Array:
        count = after.ndim == 0 and jnp.issubdtype(after.dtype, jnp.integer)
        return jnp.where(goes_on if count else goes_on & good, after, before)

    return jax.tree.map(choose, new, old), good


def any_host(number: int) -> tuple[int, int] | None:
    """The first host that gives a signal's `number` other than 0, and the number; None if none
    does.

    It does not use the devices, so hosts may call it minutes apart, as they do after compiling. All
    hosts must call it at the same point of the program, and each waits for the others.
    """

    def first(numbers: list[str]) -> str:
        return next((f"{host} {n}" for host, n in enumerate(numbers) if n != "0"), "")

    found = agree("stop_signal", str(int(number)), first).split()
    return (int(found[0]), int(found[1])) if found else None
