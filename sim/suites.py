"""Benchmark suites by name.

A user's own suite is a `Suite` in their own file (`--suite path/to/file.py:NAME`) or an entry point
of the group "chiliad.suites" in their own package, as with presets.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from models.files.own_file import digest, load
from sim.protocol import Environment, Slots
from sim.suite import Suite

ENTRY_POINTS = "chiliad.suites"
"""Group in which an installed package offers suites by name."""


def load_suite(name: str) -> Suite:
    """A suite by name: one of ours (`tabletop`, `tabletop-lift`, `arm-lift`, `metaworld`,
    `libero_spatial`, `pusht`, `gym:CartPole-v1`, …), `path/to/file.py:NAME`, or an entry point of
    an installed package.

    Raises:
      ValueError: there is no suite of that name, or the object of that name is not a `Suite`.
      FileNotFoundError: the file, or the simulator of the suite, is missing.
    """
    path = name.rpartition(":")[0]
    if path.endswith(".py"):
        suite = load(name, Suite, "suite")
        return replace(suite, source=f"sha256:{digest(path)}")
    family = re.split("[-_:]", name, maxsplit=1)[0]
    if family in _FAMILIES:
        return _FAMILIES[family](name)
    return _installed(name)


def _installed(name: str) -> Suite:
    offered = entry_points(group=ENTRY_POINTS)
    named = list(offered.select(name=name))
    if not named:
        theirs = f", {sorted(offered.names)} of installed packages" if offered.names else ""
        raise ValueError(
            f"Unknown suite '{name}'; choose tabletop or tabletop_varied, arm (or one of their "
            f"tasks: tabletop-lift), metaworld, libero_spatial (_object, _goal, _10, _90, …), "
            f"pusht, gym:ID of a gymnasium environment{theirs}, or give "
            f"path/to/file.py:NAME of a Suite of yours."
        )
    if len(named) > 1:
        raise ValueError(
            f"Suite '{name}' is offered by {[point.value for point in named]}; uninstall all but "
            "one of the packages."
        )
    found = named[0].load()
    if not isinstance(found, Suite):
        raise ValueError(
            f"Entry point '{name}' of {ENTRY_POINTS}, {named[0].value}, is of type "
            f"{type(found).__name__}, not Suite; let it name a variable that holds a "
            f"sim.suite.Suite."
        )
    package = named[0].dist
    return found if package is None else replace(found, source=f"{package.name} {package.version}")


def _tabletop(name: str) -> Suite:
    from sim.environments.experts import expert, phases
    from sim.environments.physics import ACTION_RANGE
    from sim.environments.scenery import CAMERAS, CHANGES, VARIED, Randomisation
    from sim.environments.tabletop import Tabletop
    from sim.environments.tasks import TASKS

    looks = {
        "tabletop": (tuple(CAMERAS)[:1], Randomisation()),
        "tabletop_varied": (tuple(CAMERAS), VARIED),
    }

    def made(task: str, size: int, change: str) -> Environment:
        family, _, kind = task.partition("-")
        cameras, random = looks[family]
        random = CHANGES[change].of(random) if change in CHANGES else random
        return Tabletop(kind, size, cameras, random)

    families = {family: tuple(f"{family}-{task}" for task in TASKS) for family in looks}
    changes = {name: change.about for name, change in CHANGES.items()}
    suite = _on_device(name, families, made, expert, changes)
    return replace(
        suite,
        action_range=ACTION_RANGE,
        phases=lambda task, goal, acted: phases(task.split("-")[-1], goal, acted),
    )


def _arm(name: str) -> Suite:
    from sim.environments.arm import Arm, named
    from sim.environments.arm_physics import CONTROLS, action_range
    from sim.environments.arm_tasks import TASKS

    tasks = {named(t, c): (t, c) for c in CONTROLS for t in TASKS}

    def made(task: str, size: int, change: str) -> Environment:
        kind, control = tasks[task]
        return Arm(kind, size, control=control)

    families = {"arm": tuple(named(t) for t in TASKS), **{task: (task,) for task in tasks}}
    suite = _on_device(name, families, made, Arm.expert)
    suite = replace(suite, action_range=action_range(tasks[suite.tasks[0]][1]))
    # A joint's range is wide: of 0.003 the expert still lifts in 63 of 64 episodes, of 0.006 in 15.
    return replace(suite, noise=0.003) if name.endswith("-joint") else suite


def _on_device(
    name: str,
    families: Mapping[str, tuple[str, ...]],
    made: Callable[[str, int, str], Any],
    expert: Callable[[Any, Any], Any],
    changes: Mapping[str, str] = MappingProxyType({}),
) -> Suite:
    """A suite of several tasks by a family's name, or of one task by its own.

    `made(task, size, change)` makes a task's environment. `changes` are the variants that change
    it, with a description of each; there is always one more variant, whose prompts are paraphrases.
    A variant's name has the change after the family: "tabletop_camera-lift".
    """
    changes = {**changes, "paraphrase": "wordings that no recording has"}
    known = {**families, **{task: (task,) for tasks in families.values() for task in tasks}}
    variants = {_changed(suite, c): (suite, c) for suite in known for c in changes}
    if name not in known and name not in variants:
        raise ValueError(
            f"Unknown suite '{name}'; choose one of {list(known)}, or a variant of one: "
            f"{[_changed(next(iter(known)), change) for change in changes]}."
        )
    plain, change = variants.get(name, (name, ""))

    def environment(task: str, size: int) -> Environment:
        env = made(task, size, change)
        env.name = task
        if change == "paraphrase":
            env.prompts = env.task.paraphrases
        return env

    def open_slots(chosen: tuple[str, ...], count: int, size: int) -> Slots:
        from sim.environments.device_slots import DeviceSlots

        return DeviceSlots(environment(chosen[0], size), count, expert)

    return Suite(
        name=name,
        tasks=known[plain],
        episodes=128,
        open=open_slots,
        together=False,
        slots=128,
        environment=environment,
        variants={} if change else {c: _changed(name, c) for c in changes},
        about=changes.get(change, ""),
    )


def _changed(suite: str, change: str) -> str:
    family, dash, task = suite.partition("-")
    return f"{family}_{change}{dash}{task}"


def _metaworld(name: str) -> Suite:
    from sim.benchmarks.metaworld import FAMILIES, suite

    plain = name.removesuffix("_paraphrase")
    if plain not in FAMILIES:
        raise ValueError(
            f"Unknown suite '{name}'; choose one of {list(FAMILIES)}, or append _paraphrase to "
            "one, for other wordings of its tasks."
        )
    return suite(plain, paraphrased=name != plain)


def _gym(name: str) -> Suite:
    _, _, environment = name.partition(":")
    if not environment:
        raise ValueError(f"Unknown suite '{name}'; give gym:ID, such as gym:CartPole-v1.")
    from sim.benchmarks.gym import suite

    return suite(environment)


def _pusht(name: str) -> Suite:
    if name != "pusht":
        raise ValueError(f"Unknown suite '{name}'; give pusht.")
    from sim.benchmarks.gym import pusht

    return pusht()


def _libero(name: str) -> Suite:
    from sim.benchmarks.libero import suite

    return suite(name)


_FAMILIES: dict[str, Callable[[str], Suite]] = {
    "arm": _arm,
    "tabletop": _tabletop,
    "metaworld": _metaworld,
    "libero": _libero,
    "gym": _gym,
    "pusht": _pusht,
}
"""Families by the start of a name, up to the first of "-_:"; each imports only what it needs."""
