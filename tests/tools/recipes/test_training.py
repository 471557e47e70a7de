"""A run's measures of held-out episodes."""

from types import SimpleNamespace

import pytest

from parallel.mesh import make_mesh
from tools.recipes import training


class Asked(Exception):
    pass


@pytest.mark.parametrize("skips", [False, True])
def test_a_run_that_skips_what_it_cannot_read_skips_it_among_held_out_episodes_too(
    monkeypatch, skips
):
    def loader(*_, skip_unreadable=False, **__):
        raise Asked(skip_unreadable)

    monkeypatch.setattr(training, "Loader", loader)
    monkeypatch.setattr(training, "Plan", lambda *_, **__: None)
    ready = SimpleNamespace(
        sources=lambda held_out: [], mixed=SimpleNamespace(feeds=()), processor=None
    )
    config = SimpleNamespace(
        layout=lambda sources: None,
        rows=SimpleNamespace(number=8),
        data=SimpleNamespace(skip_unreadable=skips),
    )
    with pytest.raises(Asked) as asked:
        training._held_out_metrics(None, ready, config, make_mesh())
    assert asked.value.args == (skips,)
