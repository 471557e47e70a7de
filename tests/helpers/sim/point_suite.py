"""A suite of the point world, for what opens suites by a file and a name."""

from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld, expert


def slots(tasks: tuple[str, ...], count: int, size: int) -> DeviceSlots:
    return DeviceSlots(PointWorld(), count, expert)


POINTS = Suite("points", ("points",), 8, slots)

TWO_TASKS = """
from dataclasses import replace

from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld, expert


def slots(tasks, count, size):
    world = PointWorld()
    (world.name,) = tasks
    return DeviceSlots(world, count, expert)


MINE = Suite("mine", ("near", "far"), 8, slots, together=False, noise=0.4)
"""
"""A file with a suite whose tasks cannot share slots."""
