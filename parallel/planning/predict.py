"""Prediction of a training step's time and memory, and of the fastest mesh, before any machine is
rented.

A step is a roofline over the products and bytes of its jaxpr, plus the collectives that no compute
hides, the pipeline's bubble, the update, and the wait for the slowest device. What is taken as
given: `Chip`, `Link`, nodes and jitter in cluster.py, `OVERLAP` and `LEAST_EXPOSED` here, failures
and the times of a save and a restart in reliability.py, and a sample's sizes in tools/plan.py.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from models.attention.target import compiling_for
from models.files import html
from models.inputs.packed_batch import PackedBatch
from models.layers.layers import Remat
from models.model import Stack
from models.sharding import ROWS, Rules, axes_of
from parallel.mesh import AXES
from parallel.optimizer import OptimizerConfig, select
from parallel.planning.cluster import Chip, Cluster
from parallel.planning.communication import Collective, Sizes, StepShape, busy, collectives
from parallel.planning.flops import CallCost, gradient_work, own_work
from parallel.step import Trainable, TrainState, abstract_state

OVERLAP = 0.5
"""Share of a step's compute behind which collectives of weights, gradients and keys can hide."""
LEAST_EXPOSED = 0.1
"""Share of those collectives that nothing hides: the first layer's gather, the last layer's
gradients."""

Precision = Literal["bf16", "fp8", "f32"]
_PROBES = (8, 16)
_LEVEL = 1.01
_PIPELINE = 4


@dataclass(frozen=True)
class Choice:
    """One way to run a step."""

    mesh: tuple[int, ...]
    """Devices along each of `AXES`."""
    accumulation: int = 1
    remat: Remat = "full"
    precision: Precision = "bf16"
    microbatches: int = 1
    """Micro-batches in which stages process the rows of one accumulation
    (`model.compute.pipeline.microbatches`)."""

    @property
    def sizes(self) -> Sizes:
        """Devices by axis."""
        return dict(zip(AXES, self.mesh, strict=True))

    def __str__(self) -> str:
        axes = "×".join(f"{a}={n}" for a, n in self.sizes.items() if n > 1) or "one device"
        piped = f", {self.microbatches} micro-batches on stages" if self.microbatches > 1 else ""
        return (
            f"{axes}, accumulation {self.accumulation}, remat {self.remat}, {self.precision}{piped}"
        )


@dataclass(frozen=True)
class TrainingTask:
    """Training task: `model(remat, precision)`, `batch(rows)` as ShapeDtypeStructs, and their
    settings.

    `rows`: rows of the global batch. `samples`: average number of samples in a row. `trips`: how
    often a loop runs if its length depends on data (blocks of keys that a block of queries sees).
    `capability`: compute capability of the NVIDIA GPU whose kernels attention uses. `pipelined`:
    depths of the stacks that stages share.
    """

    model: Callable[[Remat, Precision], Trainable]
    batch: Callable[[int], PackedBatch]
    optimizer: OptimizerConfig
    rules: Rules
    stacks: tuple[Stack, ...]
    rows: int
    samples: float = 1.0
    trips: float = 1.0
    capability: float = 9.0
    pipelined: tuple[int, ...] = ()

    def of_rows(self, rows: int) -> "TrainingTask":
        """The same task with another number of rows, for which nothing is traced again."""
        other = replace(self, rows=rows)
        vars(other).update(own_flops=self.own_flops, state=self.state)
        return other

    @cached_property
    def own_flops(self) -> "Line":
        """The model's own FLOPs."""
        few, many = (
            own_work(self.model("none", "bf16"), self.optimizer, self.batch(rows), self.trips).flops
            for rows in _PROBES
        )
        return _line(few, many)

    @cached_property
    def state(self) -> TrainState:
        """Every array of the state with the spec that splits it, without real devices."""
        mesh: Any = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        return abstract_state(self.model("none", "f32"), self.optimizer, self.rules, mesh)

    @cached_property
    def trained(self) -> list[Any]:
        """The parameters that the optimizer moves."""
        return self._parameters(True)

    @cached_property
    def frozen(self) -> list[Any]:
        """The parameters that the optimizer does not move."""
        return self._parameters(False)

    def _parameters(self, moving: bool) -> list[Any]:
        moves = jax.tree.leaves(select(self.optimizer, self.state.params)[1])
        leaves = jax.tree.leaves(self.state.params)
        return [leaf for leaf, move in zip(leaves, moves, strict=True) if move == moving]

    @cached_property
    def staged(self) -> float:
        """Share of the layers' products that belongs to staged stacks: each kernel's size times the
        places of the stack that has its width."""
        work = dict.fromkeys((False, True), 0.0)
        for leaf in jax.tree.leaves(self.state.params):
            staged = "stage" in axes_of(*leaf.sharding.spec)
            found = [s.places for s in self.stacks if s.staged == staged and s.width in leaf.shape]
            if len(leaf.shape) > 2 and found:
                work[staged] += leaf.size * found[0]
        return work[True] / sum(work.values()) if work[True] else 1.0

    @property
    def split_axes(self) -> set[str]:
        """The axes that some parameter is split over."""
        return {a for leaf in jax.tree.leaves(self.state) for a in axes_of(*leaf.sharding.spec)}


@dataclass(frozen=True)
class Line:
    """A quantity that grows with rows: fixed + slope · rows."""

    fixed: float
    slope: float

    def at(self, rows: float) -> float:
        """Value at `rows` rows, not below 0."""
        return max(self.fixed + self.slope * rows, 0.0)


@dataclass(frozen=True)
class Profile:
    """Cost of loss and gradient on one device that holds all parameters, as lines over rows: FLOPs,
    seconds on a chip, and bytes alive at once."""

    flops: Line
    compute: Line
    peak: Line


Profiles = Callable[[Remat, Precision], Profile]


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a choice; bytes and FLOPs are one device's, in one step.

    `memory`: bytes by content. `parts`: seconds by use; their sum is `step`. `crossing`: seconds
    for which the device's NIC is busy. `mfu`: the model's own FLOPs (without recomputation or
    padding) over those that all chips could do in bf16 (f32 if the step computes in f32).
    """

    choice: Choice
    memory: dict[str, float]
    flops: float
    collectives: tuple[Collective, ...]
    parts: dict[str, float]
    crossing: float
    mfu: float
    samples_per_second: float

    def _repr_html_(self) -> str:
        def shares(parts: dict[str, float]) -> list[tuple[str, str]]:
            total = sum(parts.values())
            return [(what, f"{part / total:.1%}") for what, part in parts.items() if part]

        facts = {
            "step": f"{self.step:.3g} s",
            "samples a second": f"{self.samples_per_second:,.0f}",
            "MFU": f"{self.mfu:.1%}",
            "memory": f"{self.bytes / 2**30:.1f} GiB a device",
        }
        spent = html.table(("step is spent on", "share"), shares(self.parts))
        held = html.table(("memory holds", "share"), shares(self.memory))
        return html.card(f"Prediction: {self.choice}", facts, spent, held)

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> float:
        """Bytes held at once."""
        return sum(self.memory.values())


def profile(task: TrainingTask, remat: Remat, precision: Precision, chip: Chip) -> Profile:
    """Traces loss and gradient at two numbers of rows; the costs that depend on rows are linear in
    them."""
    model = task.model(remat, precision)
    with compiling_for("gpu", task.capability):
        few, many = (
            gradient_work(model, task.optimizer, task.batch(rows), task.trips) for rows in _PROBES
        )
    return Profile(
        flops=_line(few.flops, many.flops),
        compute=_line(compute_seconds(few, chip), compute_seconds(many, chip)),
        peak=_line(few.peak, many.peak),
    )


def profiler(task: TrainingTask, chip: Chip) -> Profiles:
    """`profile` of this task and chip as a function of (remat, precision), each made once."""
    return lru_cache(lambda remat, precision: profile(task, remat, precision, chip))


def compute_seconds(work: CallCost, chip: Chip) -> float:
    """Roofline of a chip: a product takes the time of its FLOPs or of its bytes, whichever is
    longer; all else takes the time of its bytes; every kernel adds its start."""
    rate = chip.bandwidth * chip.bandwidth_share
    products = sum(
        times * max(m.flops / (chip.peak(m.dtype) * chip.matmul_share), m.bytes / rate)
        for m, times in work.matmuls.items()
    )
    inner = sum(f / (chip.peak(d) * chip.matmul_share) for d, f in work.inner.items())
    return products + inner + work.bytes / rate + work.kernels * chip.kernel_seconds


def slowest(devices: int, jitter: float) -> float:
    """Time of the slowest of `devices` relative to the median. Times are lognormal with deviation
    `jitter`, so the result is exp(jitter · z), with z the expected largest of `devices` normals
    (Blom 1958)."""
    if devices == 1:
        return 1.0
    return math.exp(jitter * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25)))


def predict(task: TrainingTask, choice: Choice, cluster: Cluster, profiles: Profiles) -> Prediction:
    """Memory and time of one choice.

    Args:
      profiles: as `profiler` makes them.
    """
    chip, sizes = cluster.chip, choice.sizes
    own = profiles(choice.remat, choice.precision)
    width = 4 if choice.precision == "f32" else 2
    shards = math.prod(sizes[a] for a in ROWS)
    rows = task.rows / shards / choice.accumulation
    step = StepShape(
        sizes, rows, choice.accumulation, width, 1 if choice.precision == "fp8" else width,
        choice.remat != "none", choice.microbatches,
    )  # fmt: skip
    sent = collectives(task.trained, task.stacks, step, task.frozen)
    memory = _memory(task, choice, own, rows, width)
    weights = sizes["tensor"] * sizes["stage"]
    compute = choice.accumulation * own.compute.at(rows / sizes["context"]) / weights
    bubble = task.staged * compute * (sizes["stage"] - 1) / step.microbatches
    rate = chip.bandwidth * chip.bandwidth_share
    update = (2 * memory["state"] + 3 * memory["gradients"]) / rate
    hiding = [busy(c, sizes, cluster) for c in sent if _hides(c)]
    longest = max(sum(b.inside for b in hiding), sum(b.across for b in hiding))
    exposed = max(longest - OVERLAP * compute, LEAST_EXPOSED * longest)
    exposed += sum(max(busy(c, sizes, cluster)) for c in sent if not _hides(c))
    parts = {
        "compute": compute,
        "bubble": bubble,
        "exposed communication": exposed,
        "update": update,
        "host": chip.step_seconds,
    }
    parts["slowest device"] = sum(parts.values()) * (slowest(cluster.devices, cluster.jitter) - 1)
    total = sum(parts.values())
    dtype = "float32" if choice.precision == "f32" else "bfloat16"
    useful = shards * choice.accumulation * task.own_flops.at(rows)
    return Prediction(
        choice=choice,
        memory=memory,
        flops=choice.accumulation * own.flops.at(rows / sizes["context"]) / weights,
        collectives=tuple(sent),
        parts=parts,
        crossing=sum(busy(c, sizes, cluster).across for c in sent),
        mfu=useful / (total * cluster.devices * chip.peak(dtype)),
        samples_per_second=task.rows * task.samples / total,
    )


def search(
    task: TrainingTask,
    cluster: Cluster,
    remats: Sequence[Remat] = ("none", "dots", "full"),
    precisions: Sequence[Precision] = ("bf16",),
    profiles: Profiles | None = None,
) -> list[Prediction]:
    """All choices that fit, fastest first. A model of this kind cannot tell apart choices within a
    hundredth of the fastest; of those, the one that sends least between nodes comes first.

    Args:
      profiles: profiles of this task and chip, if they have been made before.

    Raises:
      ValueError: rows do not divide over any mesh of the cluster, or nothing fits its memory; the
        message says what would.
    """
    profiles = profiles or profiler(task, cluster.chip)
    ways = list(choices(task, cluster.devices, remats, precisions))
    if not ways:
        raise ValueError(
            f"A batch of {task.rows} rows does not divide over {cluster.devices} devices; use a "
            f"multiple of {cluster.devices} rows (--rows)."
        )
    made = [predict(task, way, cluster, profiles) for way in ways]
    limit = cluster.chip.memory * cluster.chip.memory_share
    fitting = [p for p in made if p.bytes <= limit]
    if not fitting:
        raise ValueError(_refusal(task, cluster, made, limit, profiles))
    level = _LEVEL * min(p.step for p in fitting)
    return sorted(fitting, key=lambda p: (max(p.step, level), p.crossing, p.step, p.bytes))


def choices(
    task: TrainingTask, devices: int, remats: Sequence[Remat], precisions: Sequence[Precision]
) -> Iterator[Choice]:
    """Every mesh and accumulation that divides rows, layers and parameters evenly."""
    free = task.split_axes
    for mesh in _meshes(devices):
        sizes = dict(zip(AXES, mesh, strict=True))
        if any(sizes[axis] > 1 and axis not in free for axis in ("fsdp", "tensor", "stage")):
            continue
        if sizes["stage"] > 1 and any(depth % sizes["stage"] for depth in task.pipelined or (1,)):
            continue
        if sizes["context"] > 1 and any(s.places % sizes["context"] for s in task.stacks if s.keys):
            continue
        if not all(_divides(leaf, sizes) for leaf in jax.tree.leaves(task.state.params)):
            continue
        each, left = divmod(task.rows, math.prod(sizes[a] for a in ROWS))
        if left or not each:
            continue
        parts = [n for n in range(1, each + 1) if each % (n * sizes["stage"]) == 0]
        for accumulation, remat, precision in itertools.product(parts, remats, precisions):
            microbatches = _microbatches(each // accumulation, sizes["stage"])
            yield Choice(mesh, accumulation, remat, precision, microbatches)


def _microbatches(rows: int, stages: int) -> int:
    """Most micro-batches that divide the rows, up to `_PIPELINE` per stage; 1 without stages."""
    most = _PIPELINE * stages if stages > 1 else 1
    return next(n for n in range(most, 0, -1) if rows % n == 0)


def _meshes(devices: int) -> Iterator[tuple[int, ...]]:
    """Sizes along AXES; the inner axes stay within a node's eight."""
    for inner in itertools.product((1, 2, 4, 8), repeat=3):
        rest, left = divmod(devices, math.prod(inner))
        if left or math.prod(inner) > 8 or not rest:
            continue
        for fsdp in (n for n in range(1, rest + 1) if rest % n == 0):
            yield (rest // fsdp, fsdp, *inner)


def _divides(leaf: Any, sizes: Sizes) -> bool:
    for size, entry in zip(leaf.shape, leaf.sharding.spec, strict=False):
        if size % math.prod(sizes[a] for a in axes_of(entry)):
            return False
    return True


def _line(few: float, many: float) -> Line:
    """The line through the values of two probes."""
    slope = (many - few) / (_PROBES[1] - _PROBES[0])
    return Line(few - slope * _PROBES[0], slope)


def _memory(
    task: TrainingTask, choice: Choice, own: Profile, rows: float, width: int
) -> dict[str, float]:
    """Bytes on one device. The state is exact. Gradients are f32, split like their parameters, and
    counted twice if they are accumulated over micro-batches. Weights in the compute dtype: a copy
    of f32 weights, split likewise, and two gathered layers. Activations follow the rows; the
    savings from `tensor` are not subtracted."""
    sizes = choice.sizes
    trained = sum(_held(leaf, sizes) * 4 / leaf.dtype.itemsize for leaf in task.trained)
    layers = max((stack.depth for stack in task.stacks), default=1)
    cast = sum(
        _held(leaf, sizes) * width / leaf.dtype.itemsize
        for leaf in jax.tree.leaves(task.state.params)
        if leaf.dtype == jnp.float32 and choice.precision != "f32"
    )
    gathered = sum(
        leaf.size * width / sizes["tensor"]
        for leaf in jax.tree.leaves(task.state.params)
        if len(leaf.shape) > 2
    )
    return {
        "state": sum(_held(leaf, sizes) for leaf in jax.tree.leaves(task.state)),
        "gradients": trained * (1 if choice.accumulation == 1 else 2),
        "weights": cast + 2 * gathered / layers * (sizes["fsdp"] > 1),
        "activations": own.peak.slope * rows / (sizes["context"] * sizes["stage"]),
    }


def _held(leaf: Any, sizes: Sizes) -> float:
    over = math.prod(sizes[a] for a in axes_of(*leaf.sharding.spec))
    return leaf.size * jnp.dtype(leaf.dtype).itemsize / over


def _hides(collective: Collective) -> bool:
    return collective.axis in (*ROWS, "context")


def _refusal(
    task: TrainingTask,
    cluster: Cluster,
    made: Sequence[Prediction],
    limit: float,
    profiles: Profiles,
) -> str:
    least = min(made, key=lambda p: p.bytes)
    held = ", ".join(f"{what} {size / 2**30:.1f}" for what, size in least.memory.items())
    sentence = (
        f"Nothing fits {cluster.devices} {cluster.chip.name} of {limit / 2**30:.1f} usable GiB: "
        f"the leanest choice ({least.choice}) needs {least.bytes / 2**30:.1f} GiB a device ({held})"
    )
    for times in (2, 4, 8, 16, 32, 64, 128):
        remats, precisions = ({getattr(p.choice, n) for p in made} for n in ("remat", "precision"))
        for way in choices(task, cluster.devices * times, sorted(remats), sorted(precisions)):
            if predict(task, way, cluster, profiles).bytes <= limit:
                return f"{sentence}; it fits {cluster.devices * times} devices as {way}."
    if least.memory["activations"] > least.bytes / 2:
        return f"{sentence}; shorten the rows (fewer --samples)."
    return (
        f"{sentence}; freeze parameters (optimizer.rate_factors, LoRA) or take chips with more "
        "memory."
    )
