"""What `tools.evaluate` refuses before it compiles anything."""

import pytest
from rich.console import Console

from tools.evaluate import EvaluateConfig, run


@pytest.mark.parametrize("suite", ["tabletop-juggle", "lift"])
def test_an_unknown_suite_is_refused_before_a_checkpoint_is_read(suite, tmp_path):
    with pytest.raises(ValueError, match=rf"Unknown suite '{suite}'"):
        run(EvaluateConfig(tmp_path, tmp_path / "out", suite), Console(quiet=True))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        run(EvaluateConfig(tmp_path, tmp_path / "out"), Console(quiet=True))
    assert not (tmp_path / "out").exists()
