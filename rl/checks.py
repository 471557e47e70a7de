"""Checks that refuse settings, policies and suites that do not fit each other, before hours are
spent on them."""

import re

import jax

from models import Policy
from models.files.own_file import by_name
from models.layers.batch_norm import is_running
from models.layers.functional import Params
from models.model import FLOW, FlowModel, is_ours, require
from models.robot_policy import processor_of
from models.sharding import path_name
from parallel.optimizer import select
from rl.config import LearnerConfig, RlConfig
from rl.objectives import SURROGATES, advantage_of
from rl.rewards import reward_of
from sim.suite import Suite


def check_named(config: RlConfig) -> None:
    """Reads the objective, the advantage and the reward that the config names; user's files run.

    Raises:
      ValueError: one does not exist, or the advantage does not fit placement or groups.
      FileNotFoundError: a file is missing.
    """
    objective, group = config.objective, config.rollout.group
    by_name(objective.name, SURROGATES, "objective.name")
    reward_of(config.rollout.reward)
    advantage = advantage_of(objective)
    if config.placement == "colocated" and advantage.on_device is None:
        raise ValueError(
            f"objective.name is '{objective.name}' with advantage '{objective.advantage}', but "
            f"placement 'colocated' has no groups of episodes, and always acts with the newest "
            f"policy; use 'ppo' with 'gae', an Advantage of yours with on_device, or placement "
            f"'host'."
        )
    if config.learner.warmup and not advantage.values:
        raise ValueError(
            f"learner.warmup is {config.learner.warmup}, but with objective.advantage "
            f"'{objective.advantage}' the policy has no value head to warm up; set it to 0."
        )
    if group < advantage.group:
        raise ValueError(
            f"rollout.group is {group}, but objective.advantage '{objective.advantage}' compares "
            f"the episodes of one start; set it to at least {advantage.group}, such as 8, or use "
            f"advantage 'gae'."
        )


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
    if policy.session().ensemble is not None:
        raise ValueError(
            "The policy takes the mean of overlapping chunks (model.temporal_ensemble_coeff), of "
            "which RL knows no probability; start from one that acts each chunk."
        )
    replan_steps, ago = config.rollout.replan_steps, model.config.observed.ago
    if between := [name for name, steps in ago if any(step % replan_steps for step in steps)]:
        raise ValueError(
            f"The policy reads {', '.join(between)} of steps at which RL does not ask it, as "
            f"rollout.replan_steps is {replan_steps}; choose a number that divides the steps back "
            "in model.observed, such as 1."
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
        if moves and not is_running(path) and re.search(model.observing, name := path_name(path))
    ]
    if changing:
        raise ValueError(
            f"learner.keep_observed is true, but training changes {len(changing)} of the "
            f"parameters that read observations, such as {changing[0]}; set it to false, or freeze "
            f"them with learner.optimizer.rate_factors."
        )


def one_group(suite: Suite, tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks of a population, which must share slots, as its members do.

    Raises:
      ValueError: they do not, or there is no such task.
    """
    first, *others = suite.groups(tasks)
    if others:
        raise ValueError(
            f"The tasks of suite '{suite.name}' cannot share slots, so a population can learn only "
            f"one of them; name it, for example --rollout.tasks {first[0]}."
        )
    return first


def learnt_tasks(
    suite: Suite, tasks: tuple[str, ...], held_out: tuple[str, ...]
) -> tuple[str, ...]:
    """The tasks to learn: those named, or all but those held out.

    Raises:
      ValueError: one of either does not exist, is named twice or is held out too, or none is left.
    """
    if held_out:
        suite.groups(held_out)
    if both := [task for task in tasks if task in held_out]:
        raise ValueError(f"Task {both} is in rollout.tasks and in held_out_tasks; choose one.")
    found = tasks or tuple(task for task in suite.tasks if task not in held_out)
    if not found:
        raise ValueError(
            f"held_out_tasks names all tasks of suite '{suite.name}', so none is left to learn."
        )
    suite.groups(found)
    return found
