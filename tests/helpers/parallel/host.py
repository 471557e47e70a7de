"""`python -m tests.helpers.parallel.host INDEX COUNT PORT`: one of several processes of the toy's
run."""

import sys

import jax

from parallel.hosts.distributed import host_count, host_index, put_batch
from parallel.mesh import MeshConfig, make_mesh
from parallel.step import abstract_state, init_state, make_train_step
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batch


def main(index: int, count: int, port: int) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}"
    )
    mesh = make_mesh(MeshConfig(fsdp=2))
    abstract = abstract_state(Denoiser(), OPTIMIZER, RULES, mesh)
    state = init_state(Denoiser(), OPTIMIZER, abstract, 0)
    step = make_train_step(Denoiser(), OPTIMIZER, mesh, abstract)
    for i in range(5):
        whole = batch(i)
        rows = len(whole.state) // host_count()
        mine = slice(host_index() * rows, (host_index() + 1) * rows)
        state, metrics = step(
            state, put_batch(jax.tree.map(lambda x, m=mine: x[m], whole), mesh), 3
        )
        print("loss", float(metrics["loss"]), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
