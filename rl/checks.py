"""Checks that refuse settings, policies and suites that do not fit each other, before hours are
spent on them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

import jax

from models import Policy
from models.files.bounds import check_least
from models.layers.functional import Params
from models.model import FLOW, FlowModel, is_ours, require
from models.robot_policy import processor_of
from models.sharding import path_name
from parallel.monitor.step_trace import traced_steps
from parallel.optimizer import SCHEDULE_FREE, select
from rl.config import FlowConfig, LearnerConfig, RlConfig
from rl.objectives import check
from sim.suite import Suite

_OF_OTHERS = {
    "host": ("colocated", "disaggregated"),
    "disaggregated": ("colocated",),
    "colocated": ("disaggregated",),
}
"""Parts of the config that a placement does not read."""


def check_config(config: RlConfig) -> None:
    """Raises ValueError, with the field to change, unless the settings fit each other."""
    rollout, objective, learner = config.rollout, config.objective, config.learner
    spread = config.disaggregated
    least = {
        "steps": (config.steps, 1),
        "seed": (config.seed, 0),
        "flow.steps": (config.flow.steps, 1),
        "rollout.groups": (rollout.groups, 1),
        "rollout.group": (rollout.group, 1),
        "rollout.staleness": (rollout.staleness, 0),
        "rollout.slots": (1 if rollout.slots is None else rollout.slots, 1),
        "rollout.replan_steps": (rollout.replan_steps, 1),
        "learner.micro": (learner.micro, 1),
        "learner.epochs": (learner.epochs, 1),
        "learner.minibatches": (learner.minibatches, 1),
        "rollout.deadline": (rollout.deadline, 0),
        "objective.value_weight": (objective.value_weight, 0),
        "eval_every": (config.eval_every, 0),
        "eval_episodes": (config.eval_episodes, 1),
        "save_every": (config.save_every, 0),
        "colocated.envs": (config.colocated.envs, 1),
        "colocated.unroll": (config.colocated.unroll, 1),
        "colocated.warmup": (config.colocated.warmup, 0),
        "rollout.inference_devices": (rollout.inference_devices, 0),
        "disaggregated.simulators": (spread.simulators, 1),
        "disaggregated.inference": (spread.inference, 0),
        "disaggregated.simulator_cpus": (spread.simulator_cpus, 0),
        "disaggregated.simulator_gpus": (spread.simulator_gpus, 0),
        "disaggregated.inference_cpus": (spread.inference_cpus, 0),
        "disaggregated.inference_gpus": (spread.inference_gpus or 0, 0),
        "disaggregated.patience": (spread.patience, 1),
    }
    check_least(least)
    endless = {
        "rollout.deadline": rollout.deadline,
        "objective.value_weight": objective.value_weight,
        "objective.entropy_weight": objective.entropy_weight,
        "disaggregated.patience": spread.patience,
    }
    for name, value in endless.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be a finite number.")
    if config.flow.level == 0 and config.flow.noise != "learned":
        raise ValueError(
            f"flow.level is 0, so chunks are not random and the policy would learn nothing; raise "
            f"it, for example to {FlowConfig().level}, or set flow.noise to 'learned'."
        )
    if config.learner.optimizer.name == SCHEDULE_FREE:
        raise ValueError(
            f"learner.optimizer.name is '{SCHEDULE_FREE}', which keeps an average of the "
            f"parameters for acting, but RL must learn with the same parameters that act; choose "
            f"adamw or muon."
        )
    others = {
        part: [field.name for field in fields(getattr(config, part))]
        for part in _OF_OTHERS[config.placement]
    }
    if found := unread(config, others):
        raise ValueError(
            f"placement is '{config.placement}', which ignores {', '.join(found)}; leave these "
            f"options at their defaults, or set placement to {' or '.join(others)}."
        )
    if objective.advantage == "group" and rollout.group < 2:
        raise ValueError(
            f"rollout.group is {rollout.group}, but objective.advantage 'group' compares the "
            f"episodes of one start; set it to at least 2, such as 8, or use advantage 'gae'."
        )
    if config.placement == "disaggregated" and spread.inference and rollout.inference_devices:
        raise ValueError(
            f"rollout.inference_devices is {rollout.inference_devices}, but the policy acts in "
            f"disaggregated.inference = {spread.inference} workers; set one of them to 0."
        )
    check(objective)
    traced_steps(config.profile, config.steps, "profile")


def unread(config: RlConfig, names: Mapping[str, Sequence[str]]) -> list[str]:
    """The named fields of each part that differ from the default, with their values."""
    usual = RlConfig()
    return [
        f"{part}.{name} = {value}"
        for part, among in names.items()
        for name in among
        if (value := getattr(getattr(config, part), name)) != getattr(getattr(usual, part), name)
    ]


def check_policy(policy: Policy, config: RlConfig) -> None:
    """Raises ValueError, with the remedy, unless this policy can be improved with this config."""
    model = policy.model
    for name in FLOW:
        require(model, name, "RL")
    family = model.config.family
    if config.placement == "disaggregated" and not is_ours(family):
        raise ValueError(
            f"placement is 'disaggregated', but its workers do not know the model family "
            f"'{family}', which is defined in a file of yours; choose 'host' or 'colocated'."
        )
    processor_of(policy, config.rollout.suite)
    if policy.predicts_subtasks:
        raise ValueError(
            "The policy writes out its subtask before it acts, which RL does not support; first "
            "fine-tune it without subtasks, using tools.train --init and --model.text-loss 0."
        )
    if policy.session().remembers:
        raise ValueError(
            "The policy reads past observations or takes the mean of overlapping chunks "
            "(model.observed, model.temporal_ensemble_coeff), which RL's rollouts do not; start "
            "from a policy that looks at one moment alone."
        )
    if model.config.solver != "euler":
        raise ValueError(
            f"model.solver is '{model.config.solver}', but RL needs the probability of each chunk, "
            f"which only Euler steps give; load the policy with solver 'euler'."
        )
    if model.config.compute.quantized:
        raise ValueError(
            "The checkpoint's weights are quantised and cannot be trained; start from the "
            "checkpoint that they were quantised from."
        )
    if config.rollout.replan_steps > model.config.horizon:
        raise ValueError(
            f"rollout.replan_steps is {config.rollout.replan_steps}, but the policy's chunks have "
            f"{model.config.horizon} steps; choose at most that many."
        )


def check_kept(model: FlowModel, params: Params, config: LearnerConfig) -> None:
    """Raises ValueError if the kept results of observations would change as the policy learns.

    Args:
      params: as `rl.flow_policy.init` makes them.
    """
    if not config.keep_observed:
        return
    moving = select(config.optimizer, params)[0]["policy"]
    changing = [
        name
        for path, moves in jax.tree_util.tree_flatten_with_path(moving)[0]
        if moves and re.search(model.observing, name := path_name(path))
    ]
    if changing:
        raise ValueError(
            f"learner.keep_observed is true, but training changes {len(changing)} of the "
            f"parameters that read observations, such as {changing[0]}; set it to false, or freeze "
            f"them with learner.optimizer.rate_factors."
        )


def one_group(suite: Suite, tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks to learn, which must share slots.

    Raises:
      ValueError: they do not, or there is no such task.
    """
    first, *others = suite.groups(tasks)
    if others:
        raise ValueError(
            f"The tasks of suite '{suite.name}' cannot share slots, so a run can learn only one of "
            f"them; name it, for example --rollout.tasks {first[0]}."
        )
    return first
