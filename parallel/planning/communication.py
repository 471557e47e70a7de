"""Communication of a training step: bytes of each collective by axis, and the seconds they take.

Seconds follow from an alpha-beta model of rings (Thakur et al. 2005) as NCCL builds them: one ring
through each member of a node, so that traffic to the next node leaves by all their NICs at once.
Bandwidths and latencies are given in cluster.py.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    """Collectives of one device in a step: `calls` of them along `axis`, with `bytes` in total.

    Bytes are those of the arrays that are gathered (whole), reduced (whole) or sent on (permute).
    """

    kind: Kind
    axis: str
    bytes: float
    calls: float


@dataclass(frozen=True)
class StepShape:
    """Settings that decide a step's collectives besides the parameters.

    `rows`: rows of one micro-batch on one device. `itemsize`: bytes of an activation or gradient as
    sent; `gathered`: bytes of a weight as sent. `recompute`: layers run again in the backward pass.
    `microbatches`: number that a pipeline splits those rows into.
    """

    sizes: Sizes
    rows: float
    accumulation: int = 1
    itemsize: int = 2
    gathered: int = 2
    recompute: bool = True
    microbatches: int = 1


def wire_bytes(kind: Kind, size: float, n: int) -> float:
    """Bytes that each of n devices sends in a ring; for an all-reduce of `size` bytes, 2(n−1)/n of
    them."""
    if n == 1:
        return 0.0
    return {"all-reduce": 2 * (n - 1) / n, "permute": 1.0}.get(kind, (n - 1) / n) * size


def group(axis: str, sizes: Sizes, node: int) -> tuple[int, int]:
    """Number of devices of a group along an axis that share a node, and number of nodes that the
    group lies on. If nodes cut groups unevenly, it is the fewest devices that share a node, and the
    most nodes."""
    stride = math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])
    return _spread(sizes[axis], stride, math.prod(sizes.values()), node)


@cache
def _spread(n: int, stride: int, devices: int, node: int) -> tuple[int, int]:
    """`group` for groups of n devices, every `stride`-th of `devices`."""
    if stride % node == 0:
        return 1, n
    span = n * stride
    firsts = (
        i + j for i in range(0, min(devices, math.lcm(span, node)), span) for j in range(stride)
    )
    held = [Counter(k // node for k in range(i, i + span, stride)) for i in firsts]
    cut = [nodes for nodes in held if len(nodes) > 1] or held
    return min(min(nodes.values()) for nodes in cut), max(map(len, cut))


class Busy(NamedTuple):
    """Seconds that a collective keeps a device's links inside the node and its NIC."""

    inside: float
    across: float


def busy(collective: Collective, sizes: Sizes, cluster: Cluster) -> Busy:
    """Load of a collective on each kind of link; both are busy at once."""
    kind, axis, size, calls = collective
    if sizes[axis] == 1:
        return Busy(0.0, 0.0)
    members, nodes = group(axis, sizes, cluster.node)
    sent = wire_bytes(kind, size, sizes[axis])
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
    """Time of a collective that has its links to itself."""
    return max(busy(collective, sizes, cluster))


def collectives(
    params: Any, stacks: Sequence[Stack], step: StepShape, frozen: Any = ()
) -> list[Collective]:
    """All collectives of one step of `parallel.step.make_train_step`, for one device.

    In every micro-batch, weights split over `fsdp` are gathered in the forward and again in the
    backward pass, and their gradients are reduced and scattered; for weights held by stages, this
    happens in every micro-batch of the pipeline. Gradients are also all-reduced along `data` in
    every micro-batch, and along `fsdp` if their parameter is not split. An embedding table (two
    dimensions, the first split) stays in place; the few vectors looked up are not counted.
    Activations: two all-reduces per layer and pass along `tensor` (Megatron), a ring of keys and
    values along `context`, and transfers between the stages of staged stacks along `stage`.

    Args:
      params: trained parameters as ShapeDtypeStructs with shardings (of any mesh).
      frozen: frozen parameters, which are only gathered, in their own dtype if it is narrower.
    """
    sizes, times = step.sizes, step.accumulation
    depth = max((stack.depth for stack in stacks), default=1)
    split = whole = table = gathered = scattered = 0.0
    for leaf in jax.tree.leaves(params):
        held = leaf.size / _apart(leaf, sizes)
        if _is_table(leaf):
            table += 4 * held  # f32
        elif _is_gathered(leaf, sizes):
            split += held
            scattered += held * _turns(leaf, step)
        else:
            whole += held
    for leaf in jax.tree.leaves(frozen):
        if _is_gathered(leaf, sizes):
            wide = min(step.gathered, leaf.dtype.itemsize)
            gathered += leaf.size / _apart(leaf, sizes) * wide * _turns(leaf, step)
    gathered += scattered * step.gathered
    found = []
    if gathered:
        found.append(Collective("all-gather", "fsdp", 2 * times * gathered, 2 * times * depth))
    if split:
        found.append(
            Collective("reduce-scatter", "fsdp", times * scattered * step.itemsize, times * depth)
        )
    if whole and sizes["fsdp"] > 1:
        found.append(Collective("all-reduce", "fsdp", times * whole * step.itemsize, times))
    reduced = (split / sizes["fsdp"] + whole) * step.itemsize + table / sizes["fsdp"]
    if reduced and sizes["data"] > 1:
        found.append(Collective("all-reduce", "data", times * reduced, times * depth))
    return found + [
        c for stack in stacks for c in _activations(stack, step) if c.bytes and sizes[c.axis] > 1
    ]


def _apart(leaf: Any, sizes: Sizes) -> int:
    """Number of parts into which the devices that work on the same rows split a parameter."""
    return math.prod(sizes[a] for a in axes_of(*leaf.sharding.spec) if a not in ROWS)


def _turns(leaf: Any, step: StepShape) -> int:
    """Passes through a parameter for one accumulation; on stages, one per micro-batch."""
    return step.microbatches if "stage" in axes_of(*leaf.sharding.spec) else 1


def _is_table(leaf: Any) -> bool:
    return len(leaf.shape) == 2 and "fsdp" in axes_of(*leaf.sharding.spec[:1])


def _is_gathered(leaf: Any, sizes: Sizes) -> bool:
    split = sizes["fsdp"] > 1 and "fsdp" in axes_of(*leaf.sharding.spec)
    return split and not _is_table(leaf)


def _activations(stack: Stack, step: StepShape) -> list[Collective]:
    sizes, times = step.sizes, step.accumulation
    layers, again = stack.depth / sizes["stage"], int(step.recompute)
    tokens = times * step.rows * stack.places / sizes["context"]
    stream = tokens * stack.width * step.itemsize
    keys = tokens * stack.keys * step.itemsize / sizes["tensor"]
    ring = (sizes["context"] - 1) * layers
    passes, stages = 3 + again, step.microbatches + sizes["stage"] - 1
    sums, handed = 2 * (2 + again) * layers, 2 * stream * stack.staged
    return [
        Collective("all-reduce", "tensor", sums * stream, times * sums),
        Collective("permute", "context", passes * ring * keys, passes * times * ring),
        Collective("permute", "stage", handed * stages / step.microbatches, 2 * times * stages),
    ]
