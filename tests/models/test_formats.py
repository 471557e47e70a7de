"""A user's file brings a format of checkpoints, which every command that reads one then knows."""

from dataclasses import dataclass

import numpy as np
import pytest

from models import Embodiment, Normalizer, Policy, load_policy
from models.checkpoints.rename import Rule, Table
from models.checkpoints.safetensors_format import new_model, write_file
from models.checkpoints.sources import CheckpointSource
from models.formats import (
    CheckpointFormat,
    CheckpointInfo,
    _own,
    formats,
    register,
    require_scaling,
    writers,
)
from models.inputs.tokenizer import Tokenizer
from models.load import derived, inspect_params, trained_preparation
from tests.helpers.models.linear_model import HORIZON, LinearConfig

ROBOT = Embodiment("point", ("front",), Normalizer.identity(2), Normalizer.identity(2))
TABLE = Table((Rule("weight", "w", "i o -> i o"),))


@dataclass(frozen=True)
class Options:
    gain: float | None = None


def inspect(path):
    with np.load(path / "linear.npz") as file:
        source = CheckpointSource(str(path), dict(file))
    return CheckpointInfo(LinearConfig(), None, source, TABLE, FORMAT)


def acts(path, info, told):
    if told.gain is None:
        raise ValueError(f"{path} does not say its gain; give load_policy(gain=…).")
    robot = Embodiment("point", ("front",), ROBOT.state, Normalizer((0.0,) * 2, (told.gain,) * 2))
    return info.config, prepares(path, info, info.config).with_robots([robot])


def prepares(path, info, config):
    return config.processor([ROBOT], Tokenizer(tuple((path / "words.txt").read_text().split())))


def statistics(folder):
    def read(state, actions):
        require_scaling(str(folder), "state", "min-max", state)
        return ROBOT.state, ROBOT.actions

    return {"point": read} if (folder / "linear.npz").is_file() else {}


def write(policy, target):
    target.mkdir()
    np.savez(target / "linear.npz", w=policy.params["weight"])
    words = policy.processor.tokenizer.words
    (target / "words.txt").write_text(" ".join(words))


FORMAT = CheckpointFormat(
    "linear-npz",
    ("linear",),
    lambda path: (path / "linear.npz").is_file(),
    inspect,
    acts,
    prepares,
    Options,
    statistics,
    write,
)


@pytest.fixture
def known():
    register(FORMAT)
    yield
    _own.pop(FORMAT.name)


@pytest.fixture(scope="module")
def policy():
    config = LinearConfig()
    weight = np.random.default_rng(0).normal(size=(2 + config.vocabulary + 2, HORIZON * 2))
    processor = config.processor([ROBOT], Tokenizer(("push", "pull")))
    return Policy(config.build(), {"weight": weight.astype(np.float32)}, processor)


SEEN = {"image": {"front": np.full((16, 16, 3), 90, np.uint8)}, "state": [0.5, 1.0]}


def test_a_policy_makes_the_road_through_a_users_format(known, policy, tmp_path):
    writers("linear")["linear-npz"](policy, tmp_path / "out")
    with pytest.raises(ValueError, match="does not say its gain"):
        load_policy(tmp_path / "out")
    again = load_policy(tmp_path / "out", gain=1.0)
    np.testing.assert_array_equal(again.params["weight"], policy.params["weight"])
    told = SEEN | {"prompt": "push"}
    noise = np.zeros((1, HORIZON, 2))
    found, wanted = (x.infer(told, noise=noise)["actions"] for x in (again, policy))
    np.testing.assert_array_equal(found, wanted)
    stronger = load_policy(tmp_path / "out", gain=2.0).infer(told, noise=noise)["actions"]
    np.testing.assert_allclose(stronger, 2 * wanted, rtol=1e-6)


def test_training_goes_on_from_a_users_format_with_its_preparation(known, policy, tmp_path):
    FORMAT.write(policy, tmp_path / "out")
    begun = trained_preparation(tmp_path / "out", policy.model.config)
    assert derived(begun, policy.model.config, [ROBOT]) == policy.processor
    assert inspect_params(tmp_path / "out").format is FORMAT


def test_a_format_that_takes_files_of_others_is_tried_after_those_that_know_theirs(known, tmp_path):
    order = formats()
    assert order[0] is FORMAT, "a user's own come first"
    assert [x.general for x in order] == sorted(x.general for x in order)
    write_file(new_model(tmp_path), {}, np.dtype(np.float32), {})
    takers = [x for x in order if x.recognises(tmp_path)]
    assert [x.name for x in takers] == ["lerobot"]
    assert takers[0].general


def test_an_option_of_another_format_is_refused_by_name(known, policy, tmp_path):
    FORMAT.write(policy, tmp_path / "out")
    with pytest.raises(ValueError, match=r"leave out modality, relative"):
        load_policy(tmp_path / "out", gain=1.0, modality="modality.json", relative=())


def test_statistics_of_a_users_format_are_of_the_kind_that_it_says(known, tmp_path):
    (tmp_path / "linear.npz").touch()
    read = FORMAT.statistics(tmp_path)["point"]
    assert read("min-max", "quantile") == (ROBOT.state, ROBOT.actions)
    with pytest.raises(ValueError, match=r"by min-max, not z-score; give --data\.state-scaling m"):
        read("z-score", "quantile")


def test_without_the_file_nothing_knows_the_format(policy, tmp_path):
    FORMAT.write(policy, tmp_path / "out")
    assert FORMAT not in formats()
    assert "linear-npz" not in writers("linear")
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        load_policy(tmp_path / "out")
