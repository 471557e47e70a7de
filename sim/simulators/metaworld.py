"""Meta-World (Yu et al. 2019; McLean et al. 2025) from the package metaworld: its 50 tasks with a
Sawyer arm, with observations for a policy that reads prompts, and its scripted experts.

The state is proprioception alone; objects and goals must be seen in the pictures. Goal markers
stand where the package intends them, also in the first picture, in which its own markers lag.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from metaworld_prompts import PARAPHRASES, PROMPTS
from offscreen import choose_renderer

CAMERAS = {"corner": "corner4", "wrist": "gripperPOV", "behind": "behindGripper", "top": "topview"}
"""The package's names of the cameras. "corner4" is the closer position to which LeRobot moves
"corner2"."""
AZIMUTHS = {"close": 143.0, "left": 37.0}
"""Cameras of ours, and the angle about the table, in degrees, from which each sees the table and
little else. In the package's cameras, goal markers are a few pixels out of 128. Two sides together
show depth."""
_DISTANCE, _ELEVATION, _LOOK_AT, _FOVY = 1.1, -36.0, (0.0, 0.68, 0.1), 38.0
"""Position of those cameras: metres and degrees."""
UPSIDE_DOWN = {"corner"}


class Simulator:
    """One task at a time, out of those named.

    Args:
      tasks: names as in `PROMPTS`.
      size: pixels along the edge of a picture.
      cameras: keys of `CAMERAS` and `AZIMUTHS`; none if only states are needed.
      max_steps: longest episode; the package's limit is 500.
      until_success: whether success ends an episode.
      paraphrased: whether prompts are wordings that no recording has.
      draw_every: steps from one drawn picture to the next, counted from an episode's start;
        observations in between repeat the last picture. For recordings, as drawing is the main
        cost.
      antialias: whether edges are smooth, as published; without, drawing takes half the time.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        size: int,
        cameras: Sequence[str] = ("corner", "wrist"),
        max_steps: int = 500,
        until_success: bool = True,
        paraphrased: bool = False,
        draw_every: int = 1,
        antialias: bool = True,
    ) -> None:
        for names, known in ((tasks, PROMPTS), (cameras, (*CAMERAS, *AZIMUTHS))):
            if unknown := set(names) - set(known):
                raise ValueError(f"Meta-World has no {sorted(unknown)}; choose from {list(known)}.")
        self.tasks = list(tasks)
        self.size = size
        self.cameras = list(cameras)
        self.max_steps = max_steps
        self.until_success = until_success
        self.draw_every = draw_every
        self.antialias = antialias
        self.prompts = PARAPHRASES if paraphrased else PROMPTS
        self.limits = np.full(4, -1.0), np.full(4, 1.0)
        self.running: str | None = None
        self.scene: _Scene
        self.gl = _context(choose_renderer(), max(size, 160))
        from metaworld import env_dict, policies  # noqa: F401 (if it fails, it should fail now)

    def spec(self) -> dict[str, Any]:
        """Actions are the hand's movement in a step (1 is 1 cm) and the gripper's drive (-1 opens,
        1 closes). State: the hand's position (m) and the gripper's opening, 0 to 1."""
        return {
            "name": "metaworld",
            "tasks": self.tasks,
            "cameras": [f"observation.images.{camera}" for camera in self.cameras],
            "picture": [self.size, self.size],
            "state_names": ["x", "y", "z", "gripper"],
            "action_names": ["x", "y", "z", "gripper"],
            "fps": 80,
            "max_steps": self.max_steps,
            "goals": self.tasks,
            "prompts": [self.prompts[task] for task in self.tasks],
        }

    def reset(self, task: str, seed: int) -> int:
        """Starts the episode that the package draws from this seed, as in its benchmark MT1."""
        if self.running != task:
            if self.running is not None:
                self.scene.close()
            self.scene = _Scene(task, self.max_steps, max(self.size, 160), self.antialias)
            self.running = task
        self.scene.reset(seed)
        self.steps = 0
        return self.tasks.index(task)

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Pictures [c, size, size, 3] and state [4]."""
        if self.steps % self.draw_every == 0:
            pictures = [self.scene.picture(camera, self.size) for camera in self.cameras]
            self.images = np.array(pictures, np.uint8).reshape(-1, self.size, self.size, 3)
        return self.images, self.scene.seen[:4]

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Acts for 12.5 ms."""
        self.steps += 1
        reward, success = self.scene.step(action)
        return reward, success and self.until_success, False, success

    def expert(self) -> np.ndarray:
        """Action of the package's scripted policy, which sees the positions of all objects.

        Policies that grasp (those with `_grab_effort`) open the hand away from the object, where
        some of the package's policies drive it neither way. After a miss, those would press on the
        object with closed fingers forever, and would never demonstrate how to grasp again.
        """
        policy = self.scene.policy
        action = np.clip(policy.get_action(self.scene.seen), *self.limits)
        if action[3] == 0 and hasattr(policy, "_grab_effort"):
            action[3] = -1
        return action

    def film(self, size: int) -> np.ndarray:
        """Picture of the camera in the corner."""
        return self.scene.picture("corner", size)


class _Scene:
    """A loaded task, and its renderer, which is created when the first picture is needed."""

    def __init__(self, task: str, max_steps: int, largest: int, antialias: bool = True) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP

        self.env = env = ALL_V3_ENVIRONMENTS[task]()
        self.new_policy = ENV_POLICY_MAP[task]
        self.largest = largest
        self.drawing: _Drawing | None = None
        env.max_path_length = max_steps
        if not antialias:
            env.model.vis.quality.offsamples = 0
        env.seeded_rand_vec, env._freeze_rand_vec = True, False
        env._set_task_called = True
        env._partially_observable = False  # the experts look at the goal
        env.__dict__.pop("sawyer_observation_space", None)  # was cached without it

    def reset(self, seed: int) -> None:
        self.env.seed(seed)
        self.seen, _ = self.env.reset()
        self.policy = self.new_policy()

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self.seen, reward, _, _, info = self.env.step(action)
        return float(reward), bool(info["success"])

    def picture(self, camera: str, size: int) -> np.ndarray:
        if self.drawing is None:
            self.drawing = _Drawing(self.env, self.largest)
        return self.drawing.picture(camera, size)

    def close(self) -> None:
        if self.drawing is not None:
            self.drawing.context.free()


class _Drawing:
    """OpenGL's copy of a scene. It lacks shadows and reflections, which cost most of the time."""

    def __init__(self, env: Any, largest: int) -> None:
        import mujoco

        self.env, self.mujoco = env, mujoco
        env.model.vis.global_.offwidth = env.model.vis.global_.offheight = largest
        self.context = mujoco.MjrContext(env.model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.geoms = mujoco.MjvScene(env.model, maxgeom=1000)
        self.geoms.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        self.geoms.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self.option = mujoco.MjvOption()
        self.views = {name: mujoco.MjvCamera() for name in (*CAMERAS, *AZIMUTHS)}
        for name, view in self.views.items():
            fixed = name in CAMERAS
            view.type = getattr(mujoco.mjtCamera, f"mjCAMERA_{'FIXED' if fixed else 'FREE'}")
            if fixed:
                view.fixedcamid = env.model.camera(CAMERAS[name]).id
            else:
                view.distance, view.azimuth, view.elevation = _DISTANCE, AZIMUTHS[name], _ELEVATION
                view.lookat = _LOOK_AT
        env.model.vis.global_.fovy = _FOVY  # for cameras that are not the model's own

    def picture(self, camera: str, size: int) -> np.ndarray:
        mujoco, model, data = self.mujoco, self.env.model, self.env.data
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        for marker, place in self.env._target_site_config:
            data.site(marker).xpos = place[:3]
        every = mujoco.mjtCatBit.mjCAT_ALL
        view = self.views[camera]
        mujoco.mjv_updateScene(model, data, self.option, None, view, every, self.geoms)
        picture, square = np.empty((size, size, 3), np.uint8), mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(square, self.geoms, self.context)
        mujoco.mjr_readPixels(picture, None, square, self.context)
        return picture[:, ::-1] if camera in UPSIDE_DOWN else picture[::-1]  # lowest row first


def _context(renderer: str, size: int) -> Any:
    """OpenGL context for this process, created at its start."""
    import mujoco

    try:
        context = mujoco.GLContext(size, size)
        context.make_current()
    except Exception as error:
        raise RuntimeError(
            f"MuJoCo cannot render with {renderer} ({error}); run apt-get install libosmesa6 "
            "libegl1 libegl-mesa0, or set MUJOCO_GL to osmesa or egl."
        ) from error
    return context
