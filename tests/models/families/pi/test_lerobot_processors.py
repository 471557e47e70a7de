"""The processor files that we write are those that LeRobot 0.6.1 saved for the same policies, but
that scales are means and deviations with no epsilon."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.families.pi.lerobot_processors import write_processors
from models.families.pi.lerobot_statistics import read_normalizers
from models.inputs.embodiment import Normalizer
from tests.helpers.models.released_cases import RELEASED_CASES

STATE = Normalizer((0.5, -1, 2, 0, 3, 4, -5), (1, 0.25, 3, 1e-6, 2, 30, 7))
ACTIONS = Normalizer((0, 1, 2, 3, 4, 5, 6), (1, 2, 1e-4, 4, 5, 6, 7))
SAVED = RELEASED_CASES / "lerobot" / "0.6.1"
FILES = ("policy_preprocessor.json", "policy_postprocessor.json")
NAMES = ["pi0", "pi05", "pi0_relative", "pi05_relative"]


def steps(file):
    listed = json.loads(file.read_text())
    assert listed["name"] == file.stem
    return listed["steps"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", FILES)
def test_the_steps_are_those_that_lerobot_saves(name, file, tmp_path):
    config = json.loads((SAVED / name / "config.json").read_text())
    write_processors(tmp_path, config, STATE, ACTIONS)
    wrote, saved = steps(tmp_path / file), steps(SAVED / name / file)
    for ours, theirs in zip(wrote, saved, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("state_file") == theirs.get("state_file")
        if "state_file" in ours:
            theirs["config"] |= {"eps": 0.0, "norm_map": ours["config"]["norm_map"]}
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_the_scales_come_back_from_the_files(name, tmp_path):
    config = json.loads((SAVED / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_processors(tmp_path, config, STATE, ACTIONS)
    read = read_normalizers(tmp_path)
    for key, wanted in (("observation.state", STATE), ("action", ACTIONS)):
        np.testing.assert_allclose(read[key].offset, wanted.offset, rtol=1e-7)
        np.testing.assert_allclose(read[key].scale, wanted.scale, rtol=1e-7)


def test_statistics_have_names_that_lerobot_saves(tmp_path):
    config = json.loads((SAVED / "pi0" / "config.json").read_text())
    write_processors(tmp_path, config, STATE, ACTIONS)
    for file in sorted(tmp_path.glob("*.safetensors")):
        wrote, saved = load_file(file), load_file(SAVED / "pi0" / file.name)
        assert {name: x.shape for name, x in wrote.items()}.items() <= {
            name: x.shape for name, x in saved.items()
        }.items()
