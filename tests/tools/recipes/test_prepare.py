"""Batches of datasets as the field names their columns: the right values, by a mixture."""

import json

import numpy as np
import pytest

from data import open_dataset
from data.files.checksums import CHECKSUMS
from tests.helpers.data.damage import change, edit_column, rename_columns
from tests.helpers.data.recording import PARQUET
from tests.helpers.tools.small_run import SMALL, write_dataset
from tools.recipes.prepare import batches

NAMES = {
    "openpi's": {"observation.state": "state", "action": "actions"},
    "parts": {
        "observation.state": "observation.state.joint_position",
        "action": "action.joint_position",
    },
    "of no usual name": {"observation.state": "joint_position", "action": "command"},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A dataset, and its first batch as a dataset of LeRobot's names has it."""
    root = write_dataset(tmp_path_factory.mktemp("plain") / "set")
    (root / CHECKSUMS).unlink()
    with batches(root, SMALL, out=root.parent / "run") as loader:
        return root, next(loader)[0]


@pytest.mark.parametrize("names", NAMES)
def test_columns_of_any_name_train_by_a_mixture_that_names_them(plain, tmp_path, names):
    root, expected = plain
    renamed = rename_columns(root, tmp_path / "set", NAMES[names])
    state, actions = NAMES[names].values()
    with pytest.raises(ValueError, match="name some of those in a mixture"):
        batches(renamed, SMALL, out=tmp_path / "refused")
    told = {"path": "set", "state": [state], "actions": [actions]}
    (tmp_path / "mixture.json").write_text(json.dumps({"datasets": [told]}))
    with batches(tmp_path / "mixture.json", SMALL, out=tmp_path / "run") as loader:
        batch = next(loader)[0]
    for field in ("state", "actions", "action_mask", "weight", "images"):
        assert np.array_equal(getattr(batch, field), getattr(expected, field)), field
    values = open_dataset(root).column("observation.state")
    low, high = np.quantile(values.astype(np.float64), [0.01, 0.99], axis=0)
    scaled = (values - low) / (high - low) * 2 - 1
    for shown in batch.state[batch.weight > 0][:, :3]:
        assert np.abs(scaled - shown).max(axis=1).min() < 1e-4
    edit_column(renamed, PARQUET, actions, change(9, [float("nan")] * 2))
    with pytest.raises(ValueError, match=f"column '{actions}': is not finite"):
        batches(tmp_path / "mixture.json", SMALL, out=tmp_path / "again")
