"""The contract of models: what every family has, that nothing outside a family asks which it is,
and how families are named, added and refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from models import Embodiment, Normalizer
from models.config import from_json, to_json
from models.files import built_in
from models.files.own_file import named_in_file, run_file
from models.formats import writers
from models.inputs.tokenizer import Tokenizer
from models.load import check_fit
from models.model import FLOW, ModelConfig, family_config, function_at, require
from models.sharding import path_name
from tools.recipes.presets import GROOT_TINY, TINY, RunConfig, presets
from tools.recipes.rl_presets import RL_PRESETS, learner_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "parallel", "sim", "rl", "tools", "tests")
OWN = re.compile(r"models/(checkpoints|families)/.*")
ASKED = re.compile(
    r"""isinstance\([^)]*\b(Pi(?!cture)|Groot)|\bfamily\b\W{0,3}\s*(==|!=|in)\s*[("']"""
)
MINE = """
from dataclasses import dataclass
from models.load import check_fit
from models.formats import writers
from models.model import ModelConfig

@dataclass(frozen=True)
class Mine(ModelConfig, family="{}"):
    width: int = 3
    tokens_per_image = 1

    def build(self):
        return self
"""


def sources():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not OWN.fullmatch(name) and name != "tests/test_contracts.py":
                yield name, path.read_text()


DOORS = ("models/__init__.py", "models/files/built_in.py")
"""Files that import a family's or name its modules: the package's face and the tables."""
FAMILYS = re.compile(r"models\.families\.(?!presets\b)|\b(Act|Pi|Pi0Fast|Groot)Config\b")
STANDS_FOR = re.compile(r"projectors|image_token|\.chat\b|\"(writes|pi0_fast)\"|action_head|eagle")
"""Words of one family, by which code could ask for it without its name."""


def test_nothing_but_tables_imports_a_family_or_uses_its_words():
    imports, words = set(), set()
    for name, text in sources():
        if not name.startswith(("tests/", "tools/bench/")):
            imports |= {name for _ in FAMILYS.finditer(text)}
            words |= {f"{name}: {hit[0]}" for hit in STANDS_FOR.finditer(text)}
    assert imports == set(DOORS)
    assert {where for where in words if not where.startswith(DOORS)} == {
        'models/files/older_processor.py: "writes"'
    }


def test_nothing_outside_a_familys_files_asks_which_family_it_has():
    found = [f"{name}: {hit[0]}" for name, text in sources() for hit in ASKED.finditer(text)]
    assert found == []
    assert ASKED.search("if isinstance(config, PiConfig):")
    assert ASKED.search("if config.family == 'pi':")


@pytest.mark.parametrize("preset", [TINY, GROOT_TINY], ids=["pi", "groot"])
def test_a_shipped_family_keeps_the_contract(preset):
    model = preset.model.build()
    assert model.config == preset.model
    assert (model, hash(model)) == (preset.model.build(), hash(preset.model.build()))
    for name in ("init", "loss", "sample_actions", "sharding_rules", *FLOW):
        require(model, name, "the contract")
    assert callable(function_at(getattr(model.config, "own_inputs", print)))
    assert set(writers(model.config.family)) <= {"openpi", "lerobot", "groot"}
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    parts = ("vision", "language", "action")
    chosen = {
        path: [n for n in parts if n in model.groups and re.match(f"({model.groups[n]})", path)]
        for path in paths
    }
    assert {len(names) for names in chosen.values()} == {1}
    for group in model.groups.values():
        assert any(re.match(f"({group})", path) for path in paths)
    read = {path for path in paths if re.search(model.observing, path)}
    assert read == {path for path, names in chosen.items() if names != ["action"]}
    layout = preset.model.layout(prefix=99, samples=2, images=3)
    assert layout.tokens_per_image == preset.model.tokens_per_image == 36
    assert preset.model.stacks(layout)[0].places == 3 * 36


def test_families_of_ours_are_found_where_they_are_said_to_be():
    found = {name: family_config(name).__module__ for name in built_in.CONFIGS}
    assert found == built_in.CONFIGS


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_run_is_written_with_its_family_and_read_with_or_without(name):
    preset = presets()[name]
    value = json.loads(json.dumps(to_json(preset)))
    assert value["model"]["family"] == preset.model.family
    assert from_json(RunConfig, value) == preset
    if preset.model.family in ("pi", "groot"):
        del value["model"]["family"]  # as files were before families had names
        assert from_json(RunConfig, value) == preset


def test_a_config_of_another_family_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"model is 'pi', expected 'groot'"):
        from_json(type(GROOT_TINY.model), to_json(TINY.model), "model")
    with pytest.raises(ValueError, match=r"model: Family 'gato' is unknown; .* \[.*'groot', "):
        from_json(ModelConfig, {"family": "gato"}, "model")


def test_a_users_file_adds_a_family_and_may_run_again_but_takes_no_other_files_name(tmp_path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(MINE.format("ours"))
    config = run_file(first).Mine(4)
    assert run_file(first) is run_file(first)
    assert from_json(ModelConfig, to_json(config)) == config
    first.write_text(MINE.format("ours").replace("3", "5"))
    assert named_in_file(f"{first}:Mine")().width == family_config("ours")().width == 5
    second.write_text(MINE.format("ours"))
    with pytest.raises(ValueError, match=r"second\.py defines a family 'ours', but .*first\.py"):
        run_file(second)
    second.write_text(MINE.format("pi"))
    with pytest.raises(
        ValueError, match=r"defines a family 'pi', but models\.families\.pi\.model already"
    ):
        run_file(second)
    with pytest.raises(ValueError, match=r"first\.py has no 'Other'"):
        named_in_file(f"{first}:Other")


def test_what_a_family_lacks_is_said_in_one_sentence(tmp_path):
    file = tmp_path / "lacking.py"
    file.write_text(MINE.format("lacking"))
    config = run_file(file).Mine()
    with pytest.raises(ValueError, match=r"'lacking' have no `stacks`, needed for a plan; add"):
        require(config, "stacks", "a plan")
    with pytest.raises(ValueError, match=r"'lacking' have no compute to change: Mine has no such"):
        config.computing(dtype="bfloat16")
    assert replace(config, width=2) == config.changed(width=2)


def test_more_robots_than_a_model_tells_apart_are_refused():
    scale = Normalizer((0.0,), (1.0,))
    robots = tuple(Embodiment(f"robot {i}", ("front",), scale, scale) for i in range(9))
    processor = GROOT_TINY.model.processor(robots, Tokenizer(("a",)))
    with pytest.raises(ValueError, match=r"9 embodiments, but the model distinguishes only 8"):
        check_fit(GROOT_TINY.model, processor, "a mixture")
    check_fit(TINY.model, TINY.model.processor(robots, Tokenizer(("a",))), "a mixture")


def test_rls_presets_train_of_pi_what_they_did_before_groups_had_names():
    """So runs that were saved then can be resumed."""
    rates = learner_of(RL_PRESETS["tabletop-grpo"], TINY.model.build()).optimizer.rate_factors
    assert rates == (("^policy/(expert|action|time)", 1.0), (".", 0.0))
