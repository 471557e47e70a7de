"""Functions compiled for a GPU that is not present, see `parallel.planning.deviceless`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from parallel.mesh import MeshConfig, make_mesh


def compile_for(
    device: jax.Device,
    function: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`function` compiled for one device; `args` are trees of arrays or ShapeDtypeStructs.

    `options` are XLA flags without dashes, such as {"xla_gpu_enable_triton_gemm": False}. For
    several devices, lower a jitted function on ShapeDtypeStructs whose shardings name a mesh of
    `devices`.
    """
    alone = make_mesh(MeshConfig(), [device])
    place = NamedSharding(alone, PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(lambda: args),
    )
    with use_abstract_mesh(alone.abstract_mesh):
        lowered = jax.jit(function).lower(*shapes)
    return lowered.compile(compiler_options=dict(options or {}))
