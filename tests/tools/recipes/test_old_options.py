"""Old names of options, which scripts still use."""

from tools.recipes.old_options import EULER_STEPS, renamed


def test_an_old_option_is_taken_by_its_new_name_with_a_warning(capsys):
    for old, new in (
        (["--steps", "4"], ["--euler-steps", "4"]),
        (["--steps=4"], ["--euler-steps=4"]),
    ):
        assert renamed(["--out", "a=b", *old], EULER_STEPS) == ["--out", "a=b", *new]
        said = capsys.readouterr()
        assert said.err.count("warning: --steps is called --euler-steps now") == 1
        assert said.out == ""


def test_todays_options_are_taken_as_they_are_and_silently(capsys):
    typed = ["--euler-steps", "4", "--stepsize", "--slots=2", "steps"]
    assert renamed(typed, EULER_STEPS) == typed
    assert capsys.readouterr().err == ""
