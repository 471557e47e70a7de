"""A LeRobot policy's scales are those of the normalizer step in its saved preprocessor."""

import json

import numpy as np
import pytest

from models.checkpoints.safetensors_format import write_file
from models.families.pi.lerobot_statistics import read_normalizers

STATISTICS = {
    "observation.state.q01": [0.0, 1.0, 2.0],
    "observation.state.q99": [1.0, 5.0, 2.0],
    "action.mean": [1.0, 2.0],
    "action.std": [0.5, 2.0],
}


def save(path, action="MEAN_STD", without=()):
    """A preprocessor laid out as LeRobot 0.4.4 saves it."""
    kinds = {"observation.images.a": "VISUAL", "observation.state": "STATE", "action": "ACTION"}
    config = {
        "eps": 1e-8,
        "features": {name: {"type": kind, "shape": [3]} for name, kind in kinds.items()},
        "norm_map": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": action},
    }
    step = {"registry_name": "normalizer_processor", "config": config, "state_file": "stats"}
    steps = [{"registry_name": "rename_observations_processor", "config": {}}, step]
    text = json.dumps({"name": "policy_preprocessor", "steps": steps})
    (path / "policy_preprocessor.json").write_text(text)
    arrays = {
        name: ((len(values),), lambda values=values: np.asarray(values, np.float32))
        for name, values in STATISTICS.items()
        if name not in without
    }
    write_file(path / "stats", arrays, np.dtype(np.float32), {})
    return path


def test_state_and_action_are_scaled_as_lerobot_scales_them(tmp_path):
    normalizers = read_normalizers(save(tmp_path))
    assert set(normalizers) == {"observation.state", "action"}
    np.testing.assert_allclose(
        normalizers["observation.state"](np.asarray([0.25, 2.0, 2.0]))[:2], [-0.5, -0.5]
    )
    np.testing.assert_allclose(normalizers["action"](np.asarray([3.0, 1.0])), [4.0, -0.5])


def test_a_constant_dimension_lies_at_the_lower_end_of_its_range(tmp_path):
    state = read_normalizers(save(tmp_path))["observation.state"]
    offset, scale = state.offset[2], state.scale[2]
    np.testing.assert_allclose((2.0 - offset) / scale, -1, rtol=1e-6)


def test_a_policy_without_statistics_scales_nothing(tmp_path):
    assert read_normalizers(tmp_path) == {}
    assert read_normalizers(save(tmp_path, without=tuple(STATISTICS))) == {}


def test_a_mode_without_its_statistics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"scales action by QUANTILES, but .* lack 'q01'"):
        read_normalizers(save(tmp_path, action="QUANTILES"))
    with pytest.raises(ValueError, match="scales action by LOG; expected one of MEAN_STD, MIN_MAX"):
        read_normalizers(save(tmp_path, action="LOG"))
