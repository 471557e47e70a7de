"""MuJoCo's own renderer: a script for a process of its own, as OpenGL's backend is chosen
(MUJOCO_GL) before MuJoCo is imported.

`python mujoco_renderer.py FOLDER SIZE` reads every NAME.mjb and NAME.json (qpos, and lookat,
distance, azimuth and elevation of the free camera) and writes NAME.npz: geom ids, -1 where there is
none, and depths in metres. Exits with 3 if the backend does not work.
"""

import json
import sys
from pathlib import Path

import numpy as np

try:
    import mujoco

    context = mujoco.GLContext(64, 64)
    context.make_current()
    context.free()
except Exception as error:
    print(repr(error))
    sys.exit(3)


def main(folder: Path, size: int) -> None:
    """Renders all scenes of the folder."""
    for path in folder.glob("*.mjb"):
        scene = json.loads(path.with_suffix(".json").read_text())
        model = mujoco.MjModel.from_binary_path(str(path))
        model.vis.global_.fovy = scene["fovy"]
        model.vis.quality.offsamples = 0  # a mean of two ids is neither
        model.vis.quality.numslices = model.vis.quality.numstacks = 100
        data = mujoco.MjData(model)
        data.qpos[:] = scene["qpos"]
        mujoco.mj_forward(model, data)
        camera = mujoco.MjvCamera()
        for field, value in scene["camera"].items():
            setattr(camera, field, value)
        with mujoco.Renderer(model, size, size) as renderer:
            renderer.update_scene(data, camera)
            renderer.enable_segmentation_rendering()
            ids, kinds = np.moveaxis(renderer.render(), -1, 0)
            renderer.disable_segmentation_rendering()
            renderer.enable_depth_rendering()
            depths = renderer.render()
        ids = np.where(kinds == mujoco.mjtObj.mjOBJ_GEOM, ids, -1)
        np.savez(path.with_suffix(".npz"), ids=ids, depths=depths)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
