"""MuJoCo's own renderer, timed in a process of its own because OpenGL's backend (MUJOCO_GL) is
chosen before MuJoCo is imported. Needs our own environment and one of libosmesa6 and libegl1.

A request has `model` (an .mjb file), `qpos` (positions to draw, one after another), `camera`
(fields of MjvCamera), `fovy`, `size`, `shadows` and `seconds` (how long to draw); the answer has
frames per second and per CPU-second. A frame is the scene's update, the drawing and the reading
back.
"""

import json
import sys
import time

import mujoco
import numpy as np


def draw(
    model: str, qpos: list, camera: dict, fovy: float, size: int, shadows: bool, seconds: float
) -> dict[str, float]:
    """Frames per second of a loop over the positions."""
    scene = mujoco.MjModel.from_binary_path(model)
    scene.vis.global_.fovy = fovy
    scene.vis.quality.shadowsize = 512
    view = mujoco.MjvCamera()
    for field, value in camera.items():
        setattr(view, field, value)
    placed = []
    for position in qpos:
        data = mujoco.MjData(scene)
        data.qpos[:] = position
        mujoco.mj_forward(scene, data)
        placed.append(data)
    with mujoco.Renderer(scene, size, size) as renderer:
        picture = np.zeros((size, size, 3), np.uint8)

        def frame(data: mujoco.MjData) -> None:
            renderer.update_scene(data, view)
            drawn = renderer.scene
            drawn.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = shadows
            drawn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
            sun = drawn.lights[drawn.nlight]
            sun.type, sun.castshadow, sun.headlight = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, 1, 0
            sun.pos[:], sun.dir[:] = (0.4, 0.4, 1.5), (0.3, 0.4, -0.85)
            sun.ambient[:], sun.diffuse[:], sun.specular[:] = 0.2, 0.5, 0.0
            drawn.nlight += 1
            renderer.render(out=picture)

        frame(placed[0])
        count, start, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            frame(placed[count % len(placed)])
            count += 1
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"frames/s": count / wall, "frames/CPU-s": count / cpu}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(draw(**json.loads(line))), flush=True)
