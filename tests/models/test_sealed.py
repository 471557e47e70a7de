"""Checkpoints whose digests fit and whose contents are nonsense are refused in one sentence that
names checkpoint and field, before an array is allocated."""

import shutil

import pytest

from models import load_policy
from models.checkpoints import digests
from models.config import to_json
from models.files.bounds import check_name
from models.inputs.embodiment import Embodiment, Normalizer
from models.load import inspect_checkpoint
from tests.helpers.models.sealed_files import put, saved, sealed
from tests.helpers.models.tiny_policy import ARM, PROCESSOR

__all__ = ["saved"]

BILLION = 10**9
ROBOT = to_json(ARM)
NONSENSE = [
    *(
        (f"assets.processor.embodiments.0.{which}.{part}.1", value, rf"{which}[:.] ?{part}\[1\] is")
        for which in ("state", "actions")
        for part, values in {
            "scale": (0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30),
            "offset": (float("nan"), float("-inf"), 1e30),
        }.items()
        for value in values
    ),
    ("assets.processor.embodiments.0.actions.scale", [1.0], "2 offsets but 1 scales"),
    ("assets.processor.embodiments.0.actions.scale.0", "1.0", r"scale\[0\] is '1.0', expected flo"),
    ("assets.processor.embodiments.0.actions.scale.0", 10**400, r"scale\[0\] is 1000.* finite"),
    ("assets.processor.embodiments.0.actions", {"offset": [], "scale": []}, "has no action dims"),
    ("assets.processor.embodiments.0.relative", [0, 7], "a state dim below 3, or -1"),
    ("assets.processor.embodiments.0.relative", [-2, -2], "a state dim below 3, or -1"),
    ("assets.processor.embodiments.0.cameras", ["a", "a"], "name each only once"),
    ("assets.processor.embodiments.0.cameras", "front", "cameras is 'front', expected list"),
    ("assets.processor.embodiments.0.name", "../../victim", r"named '../../victim'; a name has"),
    ("assets.processor.embodiments.0.name", "", "is named ''"),
    ("assets.processor.embodiments.0.cameras", ["../x"], "A camera of embodiment 'arm' is named"),
    ("assets.processor.embodiments", [], r"embodiments are \[\]; expected at least one"),
    ("assets.processor.embodiments", [ROBOT, ROBOT], r"embodiments are \['arm', 'arm'\]"),
    ("assets.processor.embodiments", {"arm": ROBOT}, "embodiments is .*, expected list"),
    ("assets.processor.embodiments", put, r"missing fields \['embodiments'\]"),
    ("assets.processor.action_dim", 1, "2 action dims, but the model takes up to 3 and 1"),
    ("assets.processor.state_dim", 1, "3 state and 2 action dims"),
    ("assets.processor.prompts.limit", 0, "text_limit is 0; expected"),
    (
        "assets.processor.prompts.tokenizer.words",
        ["a"] * 100,
        r"ids up to 357, but model.vocabulary is 320",
    ),
    ("assets.processor.state_input", "suffix", "state_input is 'suffix' but model.state_input is"),
    ("assets.processor.horizon", 5, "processor.horizon is 5 but model.horizon is 6"),
    (
        "assets.processor.pictures.size",
        16,
        "have sizes 16 × 16, but the model reads 8 × 8",
    ),
    *(
        (f"{where}.{name}", value, f"{name} is {value}; expected a whole number")
        for where in ("assets.processor", "config.model")
        for name in ("horizon", "action_dim", "state_dim")
        for value in (0, -1, BILLION)
    ),
    *(
        (where, value, f"image_size is {value}; expected a whole number")
        for where in ("assets.processor.pictures.size", "config.model.image_size")
        for value in (0, -1, BILLION)
    ),
    *(
        (f"config.model.{stack}.{name}", value, f"{name} is {value}; expected a whole number")
        for stack, names in {
            "vision": ("width", "depth", "heads", "patch"),
            "language": ("width", "depth", "heads", "kv_heads"),
            "expert": ("width", "hidden"),
        }.items()
        for name in names
        for value in (0, -1, BILLION)
    ),
    ("config.model.euler_steps", 0, "model.euler_steps is 0"),
    ("config.model.chunks", BILLION, "model.chunks is 1000000000"),
    ("config.model.vocabulary", BILLION, "model.vocabulary is 1000000000"),
    ("config.model.vision.heads", 3, "not a multiple of vision.heads, 3"),
    ("config.model.language.heads", True, "heads is True, expected int"),
    ("config.model.expert.head_dim", 7.5, "head_dim is 7.5, expected int"),
    ("config.model.text_loss", float("nan"), "text_loss is nan, expected a finite number"),
    ("config.model.compute.dtype", "object", "compute.dtype is 'object'"),
    ("config.model.compute.quantized", "(", r"compute.quantized is '\(', which is not"),
    ("config.model.compute.chunk", -1, "compute.chunk is -1"),
    ("config.model", [], "has a config without a model"),
    ("config.model", {}, "sizes 8 × 8, but the model reads 224 × 224"),
    ("config.model", put, "has a config without a model"),
    ("config.model.dit", {}, r"does not describe a PiConfig: unknown fields \['dit'\]"),
    ("config.model.family", "groot", "does not describe a GrootConfig"),
    ("config.model.family", "gato", r"Family 'gato' is unknown.*give --family path/to/file\.py"),
    ("config.model.family", ["pi"], "is unknown; expected one of"),
    ("assets.processor", 5, "processor is 5, expected Processor"),
    ("assets.processor", {}, "does not describe a Processor"),
]


@pytest.mark.parametrize(("where", "value", "why"), NONSENSE)
def test_sealed_nonsense_is_refused_by_its_checkpoint_and_field(saved, tmp_path, where, value, why):
    name, _, inner = where.partition(".")
    path = sealed(saved, tmp_path, name, lambda content: put(content, inner, value))
    with pytest.raises(ValueError, match=why) as refused:
        inspect_checkpoint(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("name", ["config", "assets"])
@pytest.mark.parametrize(
    "content", ["null", "[]", "3", "", "[" * 100_000, '{"model": ' * 100_000], ids=lambda x: x[:20]
)
def test_a_file_of_another_kind_is_refused_by_its_checkpoint(saved, tmp_path, name, content):
    path = sealed(saved, tmp_path, name, lambda _: None)
    (file,) = (path / name).iterdir()
    file.write_text(content)
    digests.write_digests(path, digests.digest_files(path, digests.names(path)))
    with pytest.raises(ValueError, match=str(path)):
        inspect_checkpoint(path)


def flipped(content: bytes) -> bytes:
    """The first byte turned over: a brace or a magic number."""
    return bytes([content[0] ^ 0xFF]) + content[1:]


@pytest.mark.parametrize("seals", [False, True], ids=["as-saved", "sealed-again"])
@pytest.mark.parametrize(
    "name",
    [
        "config/data.json",
        "state/_METADATA",
        "state/d/*",
        "state/manifest.ocdbt",
    ],
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        flipped,
        lambda content: b"",
        lambda content: None,
        lambda content: b'{"of": "another file"}',
    ],
    ids=["cut", "flipped", "empty", "removed", "swapped"],
)
def test_no_damage_loads_and_each_is_told_in_one_sentence(saved, tmp_path, damage, name, seals):
    """Also where a checkpoint was sealed after it was damaged, so that its digests match."""
    path = shutil.copytree(saved, tmp_path / "checkpoints/1")
    (file,) = path.glob(name)
    content = damage(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    if seals:
        (path / digests.NAME).unlink()
        digests.write_digests(path, digests.digest_files(path, digests.names(path)))
    with pytest.raises((ValueError, FileNotFoundError), match=str(path)) as refused:
        load_policy(path)
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)


def test_a_policy_of_the_unchanged_copy_loads(saved, tmp_path):
    path = sealed(saved, tmp_path, "config", lambda content: content)
    assert load_policy(path).processor == PROCESSOR


def test_weights_of_other_shapes_than_a_sealed_config_tells_are_refused_unallocated(
    saved, tmp_path
):
    path = sealed(saved, tmp_path, "config", lambda c: put(c, "model.language.hidden", 2**20))
    with pytest.raises(ValueError, match=r"another model: .* has shape"):
        load_policy(path)


def test_constant_dimensions_of_every_writer_stay_allowed():
    for scale in (1e-4, 1e-6, 5e-7, 1e-8, 5e-9, 1e9):
        Normalizer((0.0, -1e9), (scale, 1.0))


@pytest.mark.parametrize("name", ["so100", "physical-intelligence/libero", "model units", "机器人"])
def test_robots_keep_the_names_that_codes_give_them(name):
    Embodiment(name, ("observation.images.front",), ARM.state, ARM.actions)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc", "a/../b", "a//b", "a\\b", "a\nb", "\x1b[2J", "a\0", "x" * 201],
)
def test_names_that_are_paths_or_controls_are_refused(name):
    with pytest.raises(ValueError, match="a name has 1 to 200 bytes"):
        check_name("A robot", name, nested=True)


def test_a_checkpoint_of_several_robots_acts_as_the_one_that_is_named(saved, tmp_path):
    two = [ROBOT, {**ROBOT, "name": "gantry"}]
    path = sealed(saved, tmp_path, "assets", lambda c: put(c, "processor.embodiments", two))
    assert load_policy(path).embodiment == 0
    assert load_policy(path, robot="gantry").embodiment == 1
    with pytest.raises(ValueError, match=r"no robot 'crane'; choose one of \['arm', 'gantry'\]"):
        load_policy(path, robot="crane")
