"""The point world with LIBERO's cameras and as many state and action dims as the arm of the fixture
`openpi/pi0`: what a policy whose cameras have other names must be told to act."""

import numpy as np

from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld

CAMERAS = ("observation.images.image", "observation.images.image2")
STATES, ACTIONS = 7, 6


class Arm(PointWorld):
    """Pictures of `size` from above, the second upside down; a state of zeros behind the place.
    Where it is `easy`, one step of anything is a success."""

    name = "arm"
    cameras = CAMERAS
    state_names = tuple(f"s{i}" for i in range(STATES))
    action_names = tuple(f"a{i}" for i in range(ACTIONS))
    action_range = ((-1.0, 1.0),) * ACTIONS
    max_steps = 8

    def __init__(self, size=32, easy=False):
        self.size, self.easy = size, easy

    def observe(self, state):
        seen = super().observe(state)
        return seen._replace(state=_padded(seen.state))

    def pictures(self, scene):
        front = self.render(scene, self.size)
        return np.stack([front, front[..., ::-1, ::-1, :]], 1)

    def step_chunk(self, state, actions):
        state, done = super().step_chunk(state, np.asarray(actions)[..., :2])
        done = done._replace(state=_padded(done.state))
        if self.easy:
            over = np.ones_like(done.terminated)
            done = done._replace(
                terminated=over, truncated=~over, achieved=np.ones_like(done.achieved)
            )
        return state, done


def suite(drawn=None, easy=False):
    def opened(tasks, count, size):
        return DeviceSlots(Arm(size, easy), count)

    return Suite("arm", ("arm",), 3, opened, slots=2, drawn=drawn)


def _padded(state):
    return np.pad(state, [(0, 0)] * (np.ndim(state) - 1) + [(0, STATES - 2)]).astype(np.float32)


ARM, DRAWN, EASY = suite(), suite(40), suite(40, easy=True)
