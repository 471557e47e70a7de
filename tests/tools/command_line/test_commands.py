"""A mistyped subcommand ends in one line that names the nearest."""

import pytest

from tools import checkpoint, data
from tools.runs import __main__ as runs


@pytest.mark.parametrize(
    ("run", "typed", "said"),
    [
        (data.app.cli, ["stat", "PATH"], "there is no command 'stat'; did you mean stats?"),
        (
            data.app.cli,
            ["from_robots"],
            "there is no command 'from_robots'; did you mean from-robot",
        ),
        (data.app.cli, ["\x1b[2J"], r"there is no command '\x1b[2J'; `--help` lists them."),
        (checkpoint.app.cli, ["verfy"], "there is no command 'verfy'; did you mean verify?"),
        (runs.app.cli, ["lst"], "there is no command 'lst'; did you mean list?"),
    ],
)
def test_a_mistyped_command_names_the_nearest(run, typed, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run(args=typed)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
