"""The hardware that a run is planned for: chips, links and prices, as frozen data that JSON can
hold.

Figures are the vendors' dense peaks and bandwidths in one direction (sources beside each chip). The
shares of them that programs reach are separate fields, so that measured shares can replace them.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from models.config import from_json
from models.files.bounds import check_positive, check_size
from models.files.foreign_json import loads
from parallel.planning.reliability import LLAMA3_FAILURES

GIGA = 1e9
_MOST_DEVICES = 2**20


@dataclass(frozen=True)
class Chip:
    """One device.

    `flops`: dense peak FLOP/s by the operands' dtype; a dtype that is not listed runs at the
    slowest listed. `memory`: bytes. `bandwidth`: bytes/s of its memory. `matmul_share` and
    `bandwidth_share`: shares of the peak FLOP/s and of the bandwidth that large products and
    streaming kernels reach. `memory_share`: share of the memory that arrays may fill (the rest is
    for the driver, collectives and fragmentation). `kernel_seconds`: time to start one kernel.
    `step_seconds`: other time of a step (host, dispatch).
    """

    name: str
    flops: dict[str, float]
    memory: float
    bandwidth: float
    matmul_share: float = 0.7
    bandwidth_share: float = 0.8
    memory_share: float = 0.92
    kernel_seconds: float = 2e-6
    step_seconds: float = 2e-3

    def __post_init__(self) -> None:
        if not self.flops:
            raise ValueError(
                "chip.flops is empty; give the dense peak FLOP/s of at least one dtype."
            )
        peaks = {f"chip.flops.{dtype}": peak for dtype, peak in self.flops.items()}
        names = ("memory", "bandwidth", "matmul_share", "bandwidth_share", "memory_share")
        check_positive(peaks | {f"chip.{name}": getattr(self, name) for name in names})

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of that dtype."""
        return self.flops.get(dtype, min(self.flops.values()))


@dataclass(frozen=True)
class Link:
    """A device's link to others: bytes/s in one direction, seconds for one hop, and the share of
    the bandwidth that collectives reach."""

    bandwidth: float
    latency: float
    share: float = 0.8

    def __post_init__(self) -> None:
        check_positive({"bandwidth": self.bandwidth, "share": self.share})

    @property
    def rate(self) -> float:
        """Bytes/s reached."""
        return self.bandwidth * self.share


@dataclass(frozen=True)
class Cluster:
    """`devices` chips in nodes of `node` each. `inside` is the link between the devices of a node;
    `across` is each device's own link out of the node (its NIC, or its share of the node's NICs).

    `jitter`: standard deviation of the logarithm of a device's step time, from step to step; all
    devices wait for the slowest (0: no jitter). `failures`: interruptions per device and hour.
    `price`: price of a device hour.
    """

    chip: Chip
    devices: int
    node: int = 8
    inside: Link = field(default_factory=lambda: Link(450 * GIGA, 3e-6))
    across: Link = field(default_factory=lambda: Link(50 * GIGA, 8e-6))
    jitter: float = 0.01
    failures: float = LLAMA3_FAILURES
    price: float | None = None

    def __post_init__(self) -> None:
        if self.devices < 1 or self.node < 1 or self.devices % min(self.node, self.devices):
            raise ValueError(
                f"cluster.devices is {self.devices} in nodes of {self.node} (cluster.node); "
                f"expected whole nodes: a multiple of {self.node}, or less than one node."
            )
        check_size("cluster.devices", self.devices, _MOST_DEVICES)
        priced = {} if self.price is None else {"price": self.price}
        check_positive({"cluster.failures": self.failures} | priced)
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"cluster.jitter is {self.jitter}; give 0 (none) or more.")


_TENSOR = {"float8_e4m3fn": 2.0, "float8_e5m2": 2.0, "bfloat16": 1.0, "float16": 1.0}


def _nvidia(bf16: float, tf32: float, fp8: bool) -> dict[str, float]:
    tensor = {k: v * bf16 for k, v in _TENSOR.items() if fp8 or "float8" not in k}
    return {**tensor, "float32": tf32}


CHIPS = {
    # NVIDIA A100 80 GB SXM data sheet
    "a100": Chip("a100", _nvidia(312e12, 156e12, False), 80 * 2**30, 2039e9),
    # NVIDIA H100 SXM data sheet; memory as XLA's target specification has it
    "h100": Chip("h100", _nvidia(989.4e12, 494.7e12, True), 84_942_979_072, 3352e9),
    # NVIDIA H200 SXM data sheet: an H100 with 141 GB of HBM3e
    "h200": Chip("h200", _nvidia(989.4e12, 494.7e12, True), 141e9, 4800e9),
    # NVIDIA HGX B200 data sheet: dense figures, 180 GB of 8 TB/s
    "b200": Chip("b200", _nvidia(2250e12, 1125e12, True), 180e9, 8000e9),
}
"""Chips by name."""

_KINDS = {
    "NVIDIA A100-SXM4-40GB": "a100",  # products as fast as on the 80 GB card
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
"""JAX's names of devices (`device_kind`, from the driver). Other cards of a family, such as H100
PCIe, have their own names and peaks."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip for JAX's `device_kind`, None if its figures are not known here."""
    return CHIPS.get(_KINDS.get(device_kind, ""))


NVLINK = {
    "a100": 300 * GIGA,  # NVLink 3: 600 GB/s both ways
    "h100": 450 * GIGA,  # NVLink 4: 900
    "h200": 450 * GIGA,
    "b200": 900 * GIGA,  # NVLink 5: 1800
}
"""Bytes/s in one direction between the devices of a node."""


def make_cluster(
    gpu: str, devices: int, node: int = 8, nic_gbps: float = 400, price: float | None = None
) -> Cluster:
    """Nodes of `node` chips of one kind, each chip with its own NIC of `nic_gbps` Gb/s.

    Raises:
      ValueError: the chip is unknown, or `devices` do not fill whole nodes.
    """
    if gpu not in CHIPS:
        raise ValueError(
            f"--gpu is {gpu!r}, expected one of {sorted(CHIPS)}; describe any other chip in a JSON "
            f"file (--cluster)."
        )
    if nic_gbps <= 0:
        raise ValueError(f"--nic-gbps is {nic_gbps}; give the Gb/s of one device's NIC, above 0.")
    inside, across = Link(NVLINK[gpu], 3e-6), Link(nic_gbps / 8 * GIGA, 8e-6)
    return Cluster(CHIPS[gpu], devices, node, inside, across, price=price)


def read_cluster(path: str | Path) -> Cluster:
    """A `Cluster` from JSON; "chip" may be the name of a known one.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON; a field is unknown, missing, of another type or makes no sense.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; --cluster takes a JSON file of a cluster.")
    try:
        value = loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); --cluster takes a JSON file of a cluster."
        ) from None
    if isinstance(value, dict) and isinstance(value.get("chip"), str):
        if value["chip"] not in CHIPS:
            raise ValueError(
                f"{path}: chip is {value['chip']!r}, expected one of {sorted(CHIPS)} or a "
                f"description of a chip."
            )
        return from_json(Cluster, value | {"chip": vars(CHIPS[value["chip"]])}, str(path))
    return from_json(Cluster, value, str(path))
