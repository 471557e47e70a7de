"""Speed of a run's steps: percentiles of their times, FLOP/s, and MFU where the devices' peak
is known.

FLOPs are the model's own, counted in the jaxpr (`parallel.planning.flops.own_work`) without
recomputation or padding, as the planner does; XLA's cost analysis counts a loop's body only once.
MFU is defined as in PaLM (arXiv 2204.02311, appendix B).
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

from models.inputs.packed_batch import PackedBatch
from parallel.optimizer import OptimizerConfig
from parallel.planning.cluster import chip_of
from parallel.planning.flops import own_work
from parallel.step import Trainable

_KEYS = 64  # of a block that attention's kernels walk, as in the planner


def model_flops(
    model: Trainable, optimizer: OptimizerConfig, batch: PackedBatch
) -> dict[str, float]:
    """FLOPs of one step on a global batch, by the operands' dtype.

    Products over padded places count, since they are computed. Attention that walks blocks of keys
    skips those of other samples. It is counted for samples of the average length in this process's
    part of the batch, and includes the scores that its own backward pass recomputes.

    Args:
      batch: rows on devices, of which only shapes and this process's `prefix_segment` are read.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    rows = [np.asarray(shard.data) for shard in batch.prefix_segment.addressable_shards]
    samples = sum(int(part.max(-1, initial=0).sum()) for part in rows)
    places = sum(int((part > 0).sum()) for part in rows) / max(samples, 1)
    work = own_work(model, optimizer, shapes, math.ceil(places / _KEYS) + 1)
    return work.flops_by_dtype


class Speed:
    """Speed of the steps since the last report; `flops` are `model_flops`, empty until known.

    Args:
      devices: number of devices of the job, all of one kind.
      kind: JAX's name for that kind.
    """

    def __init__(self, devices: int, kind: str) -> None:
        self.flops: Mapping[str, float] = {}
        self._devices, self._chip = devices, chip_of(kind)
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """Records a step that took `seconds`."""
        self._seconds.append(seconds)

    def report(self) -> dict[str, float]:
        """Metrics of the steps since the last report; none if there were none.

        `step_seconds_p50` and `step_seconds_p95`; `tflops_per_device`, the model's own TFLOP/s; and
        `mfu`, that rate over the chip's dense peak, if `parallel.planning.cluster` knows it. The
        peak is float32's if most products are in float32, else bfloat16's.
        """
        if not self._seconds:
            return {}
        p50, p95 = np.percentile(self._seconds, [50, 95])
        found = {"step_seconds_p50": float(p50), "step_seconds_p95": float(p95)}
        if self.flops:
            most = max(self.flops, key=self.flops.__getitem__)
            usual = most if most == "float32" else "bfloat16"
            steps, seconds = len(self._seconds), sum(self._seconds)
            rate = sum(self.flops.values()) * steps / seconds / self._devices
            found["tflops_per_device"] = rate / 1e12
            if self._chip is not None:
                found["mfu"] = rate / self._chip.peak(usual)
        self._seconds.clear()
        return found
