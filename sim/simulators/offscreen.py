"""MuJoCo's offscreen rendering: through EGL if there is an NVIDIA driver, else through OSMesa on
the CPU, which draws as fast as EGL does there."""

import os
import sys
from collections.abc import Callable, MutableMapping
from ctypes.util import find_library
from pathlib import Path


def choose_renderer(
    environment: MutableMapping[str, str] = os.environ,
    find: Callable[[str], str | None] = find_library,
    nvidia: bool | None = None,
) -> str:
    """Sets MUJOCO_GL and PYOPENGL_PLATFORM; call it before mujoco is imported. An existing value of
    MUJOCO_GL is kept.

    Args:
      environment: variables of this process.
      find: returns the location of a shared library, or None if there is none.
      nvidia: whether there is an NVIDIA driver; None looks.

    Returns:
      The choice: "egl", "osmesa" or, on macOS and Windows, "glfw".

    Raises:
      FileNotFoundError: neither library exists.
    """
    if not environment.get("MUJOCO_GL"):
        environment["MUJOCO_GL"] = _choice(find, nvidia)
    choice = environment["MUJOCO_GL"]
    if choice in ("egl", "osmesa"):
        environment["PYOPENGL_PLATFORM"] = choice
    return choice


def _choice(find: Callable[[str], str | None], nvidia: bool | None) -> str:
    if not sys.platform.startswith("linux"):
        return "glfw"
    if nvidia is None:
        nvidia = Path("/proc/driver/nvidia/version").exists()
    libraries = {"osmesa": "OSMesa", "egl": "EGL"}
    for choice in ("egl", "osmesa") if nvidia else ("osmesa", "egl"):
        if find(libraries[choice]):
            return choice
    raise FileNotFoundError(
        "MuJoCo draws offscreen through libOSMesa or libEGL, and neither is installed; install one "
        "(apt-get install libosmesa6 libegl1), or set MUJOCO_GL to what this machine has."
    )
