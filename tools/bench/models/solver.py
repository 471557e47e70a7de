"""Error of actions and success of trained policies by number of evaluations of their action expert
and by the solver of the flow (docs/results/solver.md).

The error of a chunk is its distance from 256 steps of "ab2"; the prefix is read once and does not
change it. Two methods that are not offered as solvers are measured too, although neither is better
at any number of evaluations: the midpoint method, and Heun's with an Euler step at the end, as in
EDM (arXiv 2206.00364). Success is measured on validation starts and then, for a few settings named
beforehand, on held-out starts. The policies are the demo's; finished episodes are kept in their
folders.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from data.lerobot.dataset import LeRobotDataset
from models import Policy, load_policy
from models.flow import flow
from models.flow.flow import Solver
from models.flow.realtime_chunking import Velocity
from models.inputs.packed_batch import PackedBatch
from models.robot_policy import processor_of
from models.terminal import Console, track
from sim.journal import Journal
from sim.suite import Suite
from sim.suites import load_suite
from tools.bench.attempt import tell
from tools.bench.learn import VALIDATION
from tools.recipes.conditions import Condition, evaluate_all

_REFERENCE = 256


@dataclass(frozen=True)
class SolverSizes:
    """Policies, each a run in `runs` that has its dataset beside it and acts in a suite, and how
    much is measured. `judged`: solvers and numbers of evaluations that also act on held-out
    starts."""

    policies: Mapping[str, str]
    runs: Path = Path("runs")
    evaluations: tuple[int, ...] = (1, 2, 3, 4, 5, 8, 10)
    observations: int = 512
    starts: int = 128
    held_out: int = 256
    judged: tuple[tuple[Solver, int], ...] = (
        ("euler", 10),
        ("ab2", 5),
        ("euler", 5),
        ("euler", 1),
    )


SIZES = SolverSizes({"demo": "tabletop-lift", "push": "tabletop-push"})


def run(console: Console, sizes: SolverSizes = SIZES) -> dict[str, Any]:
    """Errors and success by policy, solver and evaluations; `ratio` is the first policy's error
    with Euler steps over that with as many ab2 steps, half of the largest number of evaluations.

    Raises:
      FileNotFoundError: a policy is not there.
    """
    check_trained(sizes.runs, sizes.policies)
    found = {name: _measured(sizes.runs / name, sizes, console) for name in sizes.policies}
    first, half = next(iter(found.values()))["errors"], str(max(sizes.evaluations) // 2)
    euler, ab2 = (first[solver][half] for solver in ("euler", "ab2"))
    return {
        "ratio": euler / ab2,
        "ours": f"an error of {ab2:.1%} in {half} evaluations by ab2",
        "other": f"{euler:.1%} by Euler's steps",
        "unit": "of the actions' standard deviation",
        "observations": sizes.observations,
        "policies": found,
    }


def check_trained(runs: Path, policies: Mapping[str, str]) -> None:
    """Raises FileNotFoundError, with the command that trains it, for a policy that is not in
    `runs`; `policies` maps each run to the suite in which it acts."""
    for name, suite in policies.items():
        if not (runs / name).is_dir():
            raise FileNotFoundError(
                f"{runs / name} does not exist; train it by python -m tools.demo --task "
                f"{suite.rpartition('-')[2]} --out {runs / name}."
            )


def _measured(folder: Path, sizes: SolverSizes, console: Console) -> dict[str, Any]:
    suite = load_suite(sizes.policies[folder.name])
    every = [(solver, n) for solver in get_args(Solver) for n in sizes.evaluations]
    chosen = replace(suite, first_seed=VALIDATION)
    with console.status(f"{folder}: errors"):
        velocity, noise, dims = _velocity(load_policy(folder), folder, sizes.observations)
        found = errors(velocity, noise, sizes.evaluations, dims)
    tell(console, {"policies": {folder.name: {"errors": found}}})
    return {
        "suite": suite.name,
        "errors": found,
        "validation": _success(folder, chosen, every, sizes.starts, console),
        "held_out": _success(folder, suite, sizes.judged, sizes.held_out, console),
    }


def errors(
    velocity: Velocity, noise: Float[Array, "*b h a"], evaluations: Sequence[int], dims: int
) -> dict[str, dict[str, float | None]]:
    """Root mean square distance of each method's first `dims` numbers from the reference, divided
    by the reference's standard deviation; None if a method has no such number of evaluations."""
    reference = np.asarray(flow.integrate(velocity, noise, _REFERENCE, None, "ab2"))[..., :dims]

    def error(method: str, number: int) -> float | None:
        found = _solved(method, velocity, noise, number)
        if found is None:
            return None
        return float(np.sqrt(np.mean((found[..., :dims] - reference) ** 2)) / reference.std())

    return {
        method: {str(number): error(method, number) for number in evaluations}
        for method in _METHODS
    }


class Recorded(NamedTuple):
    """Recorded observations, a row each, the noise that their chunks begin with, and how many
    numbers of an action the robot has."""

    batch: PackedBatch
    noise: Float[Array, "r h a"]
    dims: int


def recorded(policy: Policy, folder: Path, count: int) -> Recorded:
    """`count` observations of the episodes beside a run, spread evenly."""
    dataset = LeRobotDataset(folder / "dataset")
    robot = processor_of(policy, str(folder)).embodiments[policy.embodiment]
    pictures, states, prompts = [], [], []
    for k in range(count):
        episode = dataset.episode(k * len(dataset.lengths) // count)
        at = k * 31 % len(episode["observation.state"])
        pictures.append(np.stack([episode[camera][at] for camera in robot.cameras]))
        states.append(episode["observation.state"][at])
        prompts.append(episode["task"])
    policy = policy.varied(sizes=(count,))
    keys = [(0, k) for k in range(count)]
    requests = policy.requests((np.stack(pictures), np.stack(states)), prompts, keys)
    batch: PackedBatch = policy.rows([request.sample for request in requests])
    keyed = jnp.asarray(np.stack([request.key for request in requests]))
    return Recorded(batch, flow.noise(keyed, batch.actions.shape[2:]), len(robot.actions.offset))


def midpoint(velocity: Velocity, x: Array, steps: int) -> Array:
    """Takes steps with the velocity in their middle, which half an Euler step reaches."""
    for t in flow.times(steps):
        middle = x - velocity(x, t) / (2 * steps)
        x = x - velocity(middle, t - np.float32(0.5 / steps)) / steps
    return x


def heun(velocity: Velocity, x: Array, steps: int) -> Array:
    """Takes steps with the mean of the velocities at their two ends. The last one is an Euler step,
    as the velocity was not trained for its end."""
    *first, last = flow.times(steps)
    for t in first:
        v = velocity(x, t)
        end = velocity(x - v / steps, t - np.float32(1 / steps))
        x = x - (v + end) / (2 * steps)
    return x - velocity(x, last) / steps


_METHODS: Mapping[str, tuple[Callable[[Velocity, Array, int], Array], int, int]] = {
    "euler": (partial(flow.integrate, solver="euler"), 1, 0),
    "ab2": (partial(flow.integrate, solver="ab2"), 1, 0),
    "midpoint": (midpoint, 2, 0),
    "heun": (heun, 2, 1),
}
"""Methods, each with its evaluations per step, and how many fewer it takes in all."""


def _solved(
    method: str, velocity: Velocity, noise: Array, evaluations: int
) -> Float[np.ndarray, "*b h a"] | None:
    solve, each, spared = _METHODS[method]
    steps, left = divmod(evaluations + spared, each)
    return None if left or not steps else np.asarray(solve(velocity, noise, steps))


def _velocity(policy: Policy, folder: Path, count: int) -> tuple[Velocity, Array, int]:
    """The velocity for `count` recorded observations, which are read once, the noise that their
    chunks begin with, and how many numbers of an action the robot has."""
    seen = recorded(policy, folder, count)
    model, params = policy.model, policy.params
    observed = jax.jit(model.observe)(params, seen.batch)

    @jax.jit
    def velocity(x: Array, t: Array) -> Array:
        time = jnp.full((count, 1, 1), t)
        return model.field(params, seen.batch, observed)(x[:, None, None], time).velocity[:, 0, 0]

    return velocity, seen.noise, seen.dims


def _success(
    folder: Path,
    suite: Suite,
    settings: Sequence[tuple[Solver, int]],
    starts: int,
    console: Console,
) -> dict[str, dict[str, Any]]:
    journal = Journal(folder / f"solver-{suite.first_seed}.jsonl")
    found: dict[str, dict[str, Any]] = {solver: {} for solver, _ in settings}
    for solver, steps in track(settings, f"{folder}: success", console=console):
        policy = load_policy(folder, steps=steps, solver=solver)
        name = f"{solver} {steps}"
        wanted = [Condition(name, policy, clips=0, checkpoint=str(folder.resolve()))]
        result = evaluate_all(suite, wanted, console, episodes=starts, journal=journal)
        rate = result[name].success
        found[solver][str(steps)] = {
            "successes": rate.successes,
            "episodes": rate.trials,
            "success": rate.value,
            "interval": list(rate.interval),
        }
    return found
