"""What `tools.evaluate` refuses before it compiles anything."""

import pytest
from rich.console import Console

from tools.evaluate import EvaluateConfig, make_environment, run


@pytest.mark.parametrize("suite", ["tabletop-juggle", "libero", "lift"])
def test_an_unknown_suite_is_refused_with_those_there_are(suite):
    with pytest.raises(ValueError, match=rf"'{suite}'.*tabletop-lift"):
        make_environment(suite, 48)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        run(EvaluateConfig(tmp_path, tmp_path / "out"), Console(quiet=True))
    assert not (tmp_path / "out").exists()
