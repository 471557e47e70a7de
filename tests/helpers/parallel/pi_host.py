"""`python -m tests.helpers.parallel.pi_host INDEX COUNT PORT`: one of several processes of the
small π0.5's run on eight devices, half of them along "context" and half of those along "tensor"."""

import sys

import jax

from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.parallel.small_pi import losses


def main(index: int, count: int, port: int) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}"
    )
    for loss in losses(make_mesh(MeshConfig(context=2, tensor=2)), accumulation=2):
        print("loss", float(loss), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
