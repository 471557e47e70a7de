"""Communication of a training step: bytes of each collective by axis, and the seconds they take.

Bytes follow from the parameters' shardings and the sizes of the layer stacks. Seconds are an
alpha-beta model of rings (Thakur et al. 2005) as NCCL lays them: one through each member of a node,
so that what crosses to the next node leaves by all their NICs at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from models.model import Stack
from models.sharding import ROWS, axes_of
from parallel.mesh import AXES
from parallel.planning.cluster import Cluster

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "permute"]
Sizes = Mapping[str, int]
"""Devices along each axis of the mesh."""


class Collective(NamedTuple):
    """Collectives of one device in a step: `calls` of them along `axis`, `bytes` in all.

    Bytes are those of the arrays gathered (whole), reduced (whole) or sent on (permute).
    """

    kind: Kind
    axis: str
    bytes: float
    calls: float


@dataclass(frozen=True)
class StepShape:
    """Settings that decide a step's collectives besides the parameters.

    `rows`: of one micro-batch on one device. `itemsize`: bytes of an activation or gradient as
    sent, `gathered` of a weight. `recompute`: layers run again in backward.
    `microbatches`: that a pipeline splits those rows into.
    """

    sizes: Sizes
    rows: float
    accumulation: int = 1
    itemsize: int = 2
    gathered: int = 2
    recompute: bool = True
    microbatches: int = 1


def wire_bytes(kind: Kind, size: float, n: int) -> float:
    """Bytes that each of n devices sends, by a ring: an all-reduce of `size` bytes 2(n−1)/n of
    them."""
    if n == 1:
        return 0.0
    return {"all-reduce": 2 * (n - 1) / n, "permute": 1.0}.get(kind, (n - 1) / n) * size


def group(axis: str, sizes: Sizes, node: int) -> tuple[int, int]:
    """Number of devices along an axis that share a node, and of nodes that they lie on."""
    stride = math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])
    inside = max(1, min(sizes[axis], node // stride)) if stride <= node else 1
    return inside, math.ceil(sizes[axis] / inside)


class Busy(NamedTuple):
    """Seconds that a collective keeps a device's links inside the node and its NIC."""

    inside: float
    across: float


def busy(collective: Collective, sizes: Sizes, cluster: Cluster) -> Busy:
    """Load of a collective on each kind of link, both at once."""
    kind, axis, size, calls = collective
    members, nodes = group(axis, sizes, cluster.node)
    if members * nodes == 1:
        return Busy(0.0, 0.0)
    sent = wire_bytes(kind, size, members * nodes)
    if kind == "permute" and nodes > 1:
        members = 1
    rounds = 2 if kind == "all-reduce" else 1
    near, far = cluster.inside, cluster.across
    hops = 1 if kind == "permute" else members - 1
    inside = sent / near.rate + calls * rounds * hops * near.latency if members > 1 else 0.0
    doublings = 1.0 if kind == "permute" else math.log2(nodes)
    turns = calls * rounds * doublings
    across = sent / members / far.rate + turns * far.latency if nodes > 1 else 0.0
    return Busy(inside, across)


def seconds(collective: Collective, sizes: Sizes, cluster: Cluster) -> float:
    """Time of a collective with nothing else on its links."""
    return max(busy(collective, sizes, cluster))


def collectives(params: Any, stacks: Sequence[Stack], step: StepShape) -> list[Collective]:
    """All collectives of one step of `parallel.step.make_train_step`, for one device.

    Weights split over `fsdp` are gathered in forward and again in backward, and their gradients
    reduced and scattered, in every micro-batch; along `data` gradients are all-reduced in each too,
    as is over `fsdp` what is not split. A table of words (two dimensions, the first split) stays
    where it is; the few vectors looked up are not counted. Activations: two all-reduces a layer
    and pass along `tensor` (Megatron), a ring of keys and values along `context`, hand-overs along
    `stage`.

    Args:
      params: trained parameters as ShapeDtypeStructs with shardings (of any mesh).
    """
    sizes, times = step.sizes, step.accumulation
    depth = max((stack.depth for stack in stacks), default=1)
    split = whole = table = 0.0
    for leaf in jax.tree.leaves(params):
        axes = axes_of(*leaf.sharding.spec)
        over = math.prod(sizes[a] for a in axes if a not in ROWS)
        held = leaf.size / over
        if "fsdp" in axes and len(leaf.shape) == 2 and "fsdp" in axes_of(*leaf.sharding.spec[:1]):
            table += 4 * held  # f32
        elif "fsdp" in axes and sizes["fsdp"] > 1:
            split += held
        else:
            whole += held
    found = []
    if split:
        found += [
            Collective("all-gather", "fsdp", 2 * times * split * step.gathered, 2 * times * depth),
            Collective("reduce-scatter", "fsdp", times * split * step.itemsize, times * depth),
        ]
    if whole and sizes["fsdp"] > 1:
        found.append(Collective("all-reduce", "fsdp", times * whole * step.itemsize, times))
    if sizes["data"] > 1:
        reduced = (split / sizes["fsdp"] + whole) * step.itemsize + table / sizes["fsdp"]
        found.append(Collective("all-reduce", "data", times * reduced, times * depth))
    return found + [
        c for stack in stacks for c in _activations(stack, step) if c.bytes and sizes[c.axis] > 1
    ]


def _activations(stack: Stack, step: StepShape) -> list[Collective]:
    sizes, times = step.sizes, step.accumulation
    layers, again = stack.depth / sizes["stage"], int(step.recompute)
    tokens = times * step.rows * stack.places / sizes["context"]
    stream = tokens * stack.width * step.itemsize
    keys = tokens * stack.keys * step.itemsize / sizes["tensor"]
    ring = (sizes["context"] - 1) * layers
    passes, stages = 3 + again, step.microbatches + sizes["stage"] - 1
    return [
        Collective(
            "all-reduce", "tensor", 2 * (2 + again) * layers * stream, 2 * (2 + again) * layers
        ),
        Collective("permute", "context", passes * ring * keys, passes * times * ring),
        Collective("permute", "stage", 2 * stream * stages / step.microbatches, 2 * times * stages),
    ]
