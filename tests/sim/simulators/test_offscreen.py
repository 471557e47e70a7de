"""MuJoCo draws with what the machine has."""

import sys

import pytest

from sim.simulators.offscreen import choose_renderer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a choice")


@pytest.mark.parametrize(
    ("nvidia", "installed", "choice"),
    [
        (True, {"EGL", "OSMesa"}, "egl"),
        (True, {"OSMesa"}, "osmesa"),
        (False, {"EGL", "OSMesa"}, "osmesa"),
        (False, {"EGL"}, "egl"),
    ],
)
def test_egl_draws_where_an_nvidia_driver_is_and_osmesa_elsewhere(nvidia, installed, choice):
    environment: dict[str, str] = {}
    assert choose_renderer(environment, {name: name for name in installed}.get, nvidia) == choice
    assert environment == {"MUJOCO_GL": choice, "PYOPENGL_PLATFORM": choice}


def test_the_users_choice_is_kept():
    environment = {"MUJOCO_GL": "egl"}
    assert choose_renderer(environment, {"OSMesa": "x"}.get, False) == "egl"
    assert environment["PYOPENGL_PLATFORM"] == "egl"


def test_without_a_library_the_error_says_what_to_install():
    with pytest.raises(FileNotFoundError, match="apt-get install libosmesa6"):
        choose_renderer({}, {}.get, False)
