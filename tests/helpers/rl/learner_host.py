"""`python -m tests.helpers.rl.learner_host INDEX COUNT PORT`: one of several processes that learn
together, each from tickets of its own, so that they have different numbers of micro-batches."""

import sys

import jax

from parallel.mesh import MeshConfig, make_mesh
from rl.config import LearnerConfig, ObjectiveConfig
from rl.host.experience import micro_batches
from rl.learner import FlowLearner
from rl.step import abstract_learner_state, learner_state
from tests.helpers.rl.gaussian import OPTIMIZER, RULES, log_prob, packed, params, ticket

CONFIG, STEPS, TICKETS = ObjectiveConfig(name="decoupled"), 2, 7


def main(index: int, count: int, port: int) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}"
    )
    mesh = make_mesh(MeshConfig(fsdp=2))
    abstract = abstract_learner_state(params(), OPTIMIZER, RULES, mesh)
    state = learner_state(params(), OPTIMIZER, abstract)
    learner = FlowLearner(log_prob, state, OPTIMIZER, CONFIG, LearnerConfig(epochs=2), mesh)
    for step in range(STEPS):
        mine = [ticket(TICKETS * step + i, version=step, moved=0.3) for i in range(TICKETS)]
        share = mine[:5] if index == 0 else mine[5:]
        for batch in micro_batches(share, packed, CONFIG, 4):
            learner.add(*batch)
        metrics = learner.update()
        print("learnt", metrics["loss"], metrics["count"], metrics["decisions"], flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
