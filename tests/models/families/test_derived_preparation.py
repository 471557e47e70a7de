"""A policy that is trained further sees prompts and pictures as it does when it acts, whichever
code trained it first."""

from dataclasses import replace

import pytest

from models import Embodiment, Normalizer
from models.config import from_json, to_json
from models.families.pi.released import RELEASED
from models.inputs.processor import Processor
from models.load import check_fit, derived, inspect_checkpoint, trained_preparation, with_tokenizer
from tests.helpers.models.groot_whole import (
    FIXTURES,
    lerobots_folder,
    nvidias_folder,
    write_modality,
)
from tests.helpers.models.released_cases import RELEASED_CASES, case_policy

FAST = FIXTURES / "pi0_fast"
CASES = sorted(
    file.parent
    for pattern in ("released/openpi/*", "released/lerobot/*/*", "pi0_fast/openpi/*",
                    "pi0_fast/lerobot/*")
    for file in FIXTURES.glob(f"{pattern}/case.json")
)  # fmt: skip
ROBOTS = tuple(
    Embodiment(name, ("front",), Normalizer((0.5,) * 2, (2.0,) * 2), Normalizer((0.0,), (3.0,)))
    for name in ("one", "two")
)


def same_but_for_robots(root, tokenizer, **options):
    """The processor that acts, after a comparison with the one that is trained further."""
    acting = inspect_checkpoint(root, **options)
    wanted = acting.processor if tokenizer is None else with_tokenizer(acting.processor, tokenizer)
    begun = trained_preparation(root, acting.config, tokenizer, FAST / "fast")
    tuned = derived(begun, acting.config, ROBOTS)
    assert tuned == wanted.with_robots(ROBOTS)
    assert from_json(Processor, to_json(tuned)) == tuned
    if not getattr(acting.config, "projectors", ()):
        check_fit(acting.config, tuned, str(root))
    return wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_a_released_policy_is_prepared_for_training_as_for_acting(case, tmp_path):
    root = case_policy(case, tmp_path)
    if case.parent.name == "0.4.4":  # as its training leaves it, by which its version is told
        (root / "train_config.json").write_text("{}")
    kind = FAST if case.is_relative_to(FAST) else RELEASED_CASES
    options = {"relative": (), "horizon": 10} if case.name.endswith("_base") else {}
    if kind is RELEASED_CASES:
        options.pop("horizon", None)
    same_but_for_robots(root, kind / "tokenizer.model", **options)


ROWS = [
    name for name, row in RELEASED.items()
    if row.source == "openpi" and not row.refused and name not in {case.name for case in CASES}
]  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_so_is_a_row_of_the_table_that_was_not_recorded(name, tmp_path):
    parent = {"pi0": RELEASED_CASES, "pi0_fast": FAST}[RELEASED[name].family]
    like = parent / "openpi" / f"{RELEASED[name].family}_droid"
    root = case_policy(like, tmp_path).rename(tmp_path / name)
    options = {"relative": (), "horizon": 10}
    same_but_for_robots(root, parent / "tokenizer.model", **options)


LISTED = [n for n, row in RELEASED.items() if row.source == "lerobot" and "pi05" in n]


@pytest.mark.parametrize("name", LISTED)
def test_the_table_tells_lerobots_version_where_its_files_do_not(name, tmp_path):
    root = case_policy(RELEASED_CASES / "lerobot/0.4.4/pi05", tmp_path)
    root = root.rename(tmp_path / name.removeprefix("lerobot/"))
    options = {} if RELEASED[name].state else {"state": "text"}
    acting = same_but_for_robots(root, RELEASED_CASES / "tokenizer.model", **options)
    assert acting.prompts.pads_state is (RELEASED[name].state == "text-padded")


@pytest.mark.parametrize("padded", [True, False])
def test_lerobots_pictures_and_spelling_of_either_age_are_kept(padded, tmp_path):
    (case,) = (c for c in CASES if c.parent.name == ("0.4.4" if padded else "0.6.1")
               and c.name == "pi05")  # fmt: skip
    root = case_policy(case, tmp_path)
    if padded:
        (root / "train_config.json").write_text("{}")
    acting = same_but_for_robots(root, RELEASED_CASES / "tokenizer.model")
    assert acting.pictures.kind == ("bilinear-dark" if padded else "bilinear")
    assert acting.prompts.pads_state is padded


def test_groots_chat_and_pictures_are_kept(tmp_path):
    kinds = []
    for name, folder in (("lerobot", lerobots_folder), ("nvidia", nvidias_folder)):
        root = folder(tmp_path / name)
        modality = None if name == "lerobot" else write_modality(tmp_path / "modality.json")
        kinds.append(same_but_for_robots(root, None, modality=modality).pictures.kind)
    assert kinds == ["stretched", "stretched-middle"]


def test_a_model_that_reads_the_state_elsewhere_has_its_familys_prompt(tmp_path):
    root = case_policy(RELEASED_CASES / "openpi/pi05_libero", tmp_path)
    found = inspect_checkpoint(root)
    begun = with_tokenizer(found.processor, RELEASED_CASES / "tokenizer.model")
    told = replace(found.config, state_input="text")
    tuned = derived(begun, told, ROBOTS)
    assert not begun.prompts.spells_state
    assert tuned.prompts == replace(
        told.processor(ROBOTS, begun.tokenizer).prompts, limit=begun.text_limit
    )
