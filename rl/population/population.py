"""Definition of a population and its breeding: which numbers of a config are tuned, which member
copies which after a generation, and with which numbers it continues.

Population based training (Jaderberg et al., arXiv 1711.09846) by truncation selection: the worst
quarter continue from copies of the best quarter, with numbers a fifth larger or smaller. All random
choices derive from (seed, generation, member).
"""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from models.config import from_json
from models.files.terminal import Console
from parallel.optimizer import make_schedule
from parallel.runs.atomic import replace_text
from parallel.runs.json_lines import read_lines, set_damage_aside
from rl.config import RlConfig
from rl.step import optimizer_of

FILE_NAME = "population.jsonl"
FACTOR = 1.2
"""Factor by which a number grows or shrinks when it is explored."""

Hyperparameters = dict[str, float]
"""Tuned numbers by their path in a config, such as "objective.clip"."""

_WIDEST = 6
"""Largest power of FACTOR between initial numbers and the config's: a third to three times."""
_NEAR_ONE = ("discount", "gae_lambda", "b1", "b2", "ema_decay")
"""Numbers whose distance to 1 is scaled."""
_FREE = ("learner", "objective", "flow")
_BEGIN, _EXPLOIT, _EXPLORE = range(3)


@dataclass(frozen=True)
class PopulationConfig:
    """Members that take turns in the same simulators and learn from each other's success."""

    population: int = 0
    """Number of members; with 0 or 1, the run has no population."""
    turn: int | None = None
    """Steps that each member makes before all are compared; default: eval_every."""
    tuned: tuple[str, ...] = ("learner.optimizer.learning_rate", "objective.clip")
    """Names of the options whose numbers differ between members."""


@dataclass(frozen=True)
class Generation:
    """Results after a turn of all members, and decisions for the next turn. For each member:
    `success` on held-out starts (None if its policy no longer gave finite actions), the member
    whose state it continues from (`parents`), and its next `hyperparameters`."""

    step: int
    success: tuple[float | None, ...]
    parents: tuple[int, ...]
    hyperparameters: tuple[Hyperparameters, ...]

    @property
    def best(self) -> int:
        """The member with the highest success; the first if there are several."""
        return ranked(self.success)[0]


def check_population(population: PopulationConfig, config: RlConfig) -> None:
    """Raises ValueError, with the option to change, unless such a population can be bred."""
    if population.population < 2:
        raise ValueError(
            f"population is {population.population}; expected at least 2 members, or 0 and neither "
            f"--turn nor --tuned for a run without a population."
        )
    if turn_of(population, config) < 1:
        raise ValueError(
            f"turn is {population.turn} and eval_every {config.eval_every}; a population is "
            f"compared after turns of at least 1 step, so give --turn a number."
        )
    names = population.tuned
    if not names or len(set(names)) < len(names):
        raise ValueError(f"tuned is {list(names)}; expected at least one name, and none twice.")
    for name in names:
        _check_tuned(name, config)
    _check(config)


def turn_of(population: PopulationConfig, config: RlConfig) -> int:
    """Steps of a turn."""
    return config.eval_every if population.turn is None else population.turn


def hyperparameters(config: RlConfig, names: Sequence[str]) -> Hyperparameters:
    """The tuned numbers of a config."""
    return {name: _read(config, name) for name in names}


def configured(config: RlConfig, tuned: Hyperparameters) -> RlConfig:
    """The config with these numbers.

    Raises:
      ValueError: a part of the config refuses its number.
    """
    for name, value in tuned.items():
        config = _written(config, name.split("."), value)
    return config


def first_generation(
    config: RlConfig, population: PopulationConfig, success: float | None
) -> Generation:
    """Initial members. The first has the config's numbers; the others have numbers up to three
    times larger or smaller, drawn uniformly on the logarithmic scale.

    Args:
      success: of the policy that all begin with.
    """
    count = population.population
    own = hyperparameters(config, population.tuned)
    begun = [own]
    for member in range(1, count):
        rng = np.random.default_rng((config.seed, _BEGIN, member))
        drawn = own
        for name in own:
            drawn = _moved(config, drawn, name, int(rng.integers(-_WIDEST, _WIDEST + 1)))
        begun.append(drawn if drawn not in begun else explored(config, drawn, rng, begun))
    return Generation(0, (success,) * count, tuple(range(count)), tuple(begun))


def next_generation(
    config: RlConfig, last: Generation, step: int, success: Sequence[float | None]
) -> Generation:
    """Successor to `last`, from the members' success after `step`. After the last step of the run,
    no member copies another.

    Raises:
      ValueError: there is no member left whose policy acts.
    """
    order = ranked(success)
    if success[order[0]] is None:
        raise ValueError(
            f"No member's policy gives finite actions any more after step {step}; lower "
            f"learner.optimizer.learning_rate or --turn and start over in another folder."
        )
    count, tuned = len(success), list(last.hyperparameters)
    if step >= config.learner_steps:
        return Generation(step, tuple(success), tuple(range(count)), tuple(tuned))
    quarter = max(1, count // 4)
    best = [member for member in order[:quarter] if success[member] is not None]
    worst = {*order[-quarter:], *(k for k in order if success[k] is None)}
    parents = list(range(count))
    for member in sorted(worst):
        rng = np.random.default_rng((config.seed, _EXPLOIT, step, member))
        parents[member] = best[rng.integers(len(best))]
    for member in sorted(worst):
        parent = parents[member]
        begun = [tuned[k] for k in range(count) if parents[k] == parent and k not in worst]
        begun += [tuned[k] for k in sorted(worst) if parents[k] == parent and k < member]
        rng = np.random.default_rng((config.seed, _EXPLORE, step, member))
        tuned[member] = explored(config, last.hyperparameters[parent], rng, begun)
    return Generation(step, tuple(success), tuple(parents), tuple(tuned))


def ranked(success: Sequence[float | None]) -> list[int]:
    """Members from the best to the worst; among equals, the first comes first."""
    return sorted(range(len(success)), key=lambda k: (success[k] is None, -(success[k] or 0), k))


def explored(
    config: RlConfig,
    tuned: Hyperparameters,
    rng: np.random.Generator,
    taken: Collection[Hyperparameters] = (),
) -> Hyperparameters:
    """Each number multiplied or divided by `FACTOR`, at random, unless the config refuses the
    result. This is repeated if the result is `taken` by another member with the same state, which
    would learn the same."""
    for _ in range(4 * len(taken) + 1):
        for name in tuned:
            tuned = _moved(config, tuned, name, 1 if rng.random() < 0.5 else -1)
        if tuned not in taken:
            break
    return tuned


def read_generations(directory: Path) -> list[Generation]:
    """All generations of a population so far; empty if there is no record.

    Raises:
      ValueError: a line is damaged.
    """
    return [_generation(line) for line in read_lines(directory / FILE_NAME, _generation)]


def write_generations(directory: Path, generations: Sequence[Generation]) -> None:
    """Replaces the record atomically."""
    lines = (json.dumps(asdict(generation)) + "\n" for generation in generations)
    replace_text(directory / FILE_NAME, "".join(lines))


def set_damaged_generations_aside(directory: Path, console: Console) -> None:
    """Keeps the good lines of a damaged record, before a population resumes.

    Raises:
      ValueError: the last generation is damaged.
    """
    set_damage_aside(directory / FILE_NAME, _generation, console, last_matters=True)


def _generation(line: dict[str, Any]) -> Generation:
    found = from_json(Generation, line)
    if not len(found.success) == len(found.parents) == len(found.hyperparameters):
        raise ValueError("the members differ in number")
    return found


def _moved(config: RlConfig, tuned: Hyperparameters, name: str, factors: int) -> Hyperparameters:
    """Hyperparameters with one number larger by that many factors (smaller if negative). If the
    config refuses the result, tries as many factors the other way, then fewer."""
    for size in range(abs(factors), 0, -1):
        for towards in (size, -size) if factors > 0 else (-size, size):
            found = tuned | {name: _scaled(name, tuned[name], FACTOR**towards)}
            with suppress(ValueError):
                _check(configured(config, found))
                return found
    return tuned


def _scaled(name: str, value: float, factor: float) -> float:
    """Scales and rounds to six digits, so that scaling up and down again gives the same number."""
    near_one = name.rpartition(".")[2] in _NEAR_ONE
    return float(f"{1 - (1 - value) * factor if near_one else value * factor:.6g}")


def _check(config: RlConfig) -> None:
    """Raises ValueError for numbers that a run would refuse."""
    make_schedule(optimizer_of(config.learner, config.learner_steps))


def _check_tuned(name: str, config: RlConfig) -> None:
    try:
        value = _read(config, name)
    except AttributeError:
        value = None
    if name.partition(".")[0] not in _FREE or type(value) is not float:
        raise ValueError(
            f"tuned has '{name}', which is {_described(value)}; name a field of {', '.join(_FREE)} "
            f"that holds a number with a decimal point, such as learner.optimizer.learning_rate."
        )
    if value == (1.0 if name.rpartition(".")[2] in _NEAR_ONE else 0.0):
        raise ValueError(
            f"tuned has '{name}', which is {value}, and no factor changes that; give --{name} "
            f"another value or leave it out of --tuned."
        )


def _described(value: Any) -> str:
    return "not a field of the config" if value is None else f"{value!r}"


def _read(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _written(config: Any, path: Sequence[str], value: float) -> Any:
    first, *rest = path
    inner = _written(getattr(config, first), rest, value) if rest else value
    return replace(config, **{first: inner})
