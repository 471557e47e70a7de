"""Shipped presets are what their models' authors train with."""

import pytest

from tools.recipes.presets import load_preset


@pytest.mark.parametrize(
    ("name", "scaling"), [("pi05", "quantile"), ("pi0", "z-score"), ("groot", "min-max")]
)
def test_a_preset_scales_state_and_actions_as_the_release_of_its_model(name, scaling):
    """Case 10: all of them scaled by quantiles."""
    data = load_preset(name).data
    assert (data.state_scaling, data.action_scaling) == (scaling, scaling)
