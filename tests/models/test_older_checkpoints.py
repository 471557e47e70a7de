"""Checkpoints of commit a8a56575, whose processors had 19 fields, act as they did there."""

import json
from pathlib import Path

import numpy as np
import pytest

from models import Processor, load_policy
from models.config import from_json, model_config, to_json
from parallel.loop import TrainerConfig
from rl.config import RlConfig
from tests.helpers.models.tiny_policy import KEYS, PROCESSOR, openpi

OLDER = Path(__file__).parents[1] / "fixtures" / "older"
PROCESSORS = json.loads((OLDER / "processors.json").read_text())
PROMPT, STATE = "Lift_the red\nblock ", [0.25, -1.5, 0.999]


@pytest.fixture(scope="module")
def samples():
    with np.load(OLDER / "samples.npz") as file:
        return dict(file)


def test_a_policy_acts_as_it_did(samples):
    policy = load_policy(OLDER / "policy")
    assert policy.processor == PROCESSOR
    found = policy.infer(openpi(2), keys=KEYS[:2])["actions"]
    np.testing.assert_allclose(found, samples["actions"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_prepares_what_it_did(name, samples):
    processor = from_json(Processor, PROCESSORS[name])
    assert from_json(Processor, to_json(processor)) == processor
    if not processor.has_tokenizer:
        assert processor.targets is None
        return
    pictures, number = samples["pictures"], list(PROCESSORS).index(name)
    made = processor.sample([pictures, None], np.array(STATE), PROMPT, actions=np.full((6, 1), 0.5))
    for part in ("text", "image_at", "images", "action_tokens"):
        found, wanted = np.asarray(getattr(made, part)), samples[f"{number}/{part}"]
        assert found.dtype == wanted.dtype or not wanted.size
        np.testing.assert_array_equal(found, wanted, err_msg=part)


def test_an_older_processors_damage_is_named():
    broken = PROCESSORS["pi05"] | {"text_limit": 0}
    with pytest.raises(ValueError, match=r"prompts: text_limit is 0; expected"):
        from_json(Processor, broken, "assets.processor")
    with pytest.raises(ValueError, match=r"pictures: kind is 'round', which is no PictureFit"):
        from_json(Processor, PROCESSORS["pi05"] | {"resize": "round"}, "assets.processor")


@pytest.mark.parametrize(
    ("family", "field"),
    [("pi", "euler_steps"), ("groot", "euler_steps"), ("pi0_fast", "max_decoding_steps")],
)
def test_the_steps_of_older_configs_are_whose_they_were(family, field):
    config = model_config({"family": family, "steps": 7})
    assert getattr(config, field) == 7
    assert model_config(to_json(config)) == config
    assert from_json(TrainerConfig, {"steps": 7}).train_steps == 7
    older = from_json(RlConfig, {"steps": 7, "flow": {"steps": 5}})
    assert (older.learner_steps, older.flow.euler_steps) == (7, 5)
