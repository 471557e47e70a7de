"""Options whose values no command can use, and old names, which scripts still use."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from models.files.terminal import Console
from rl.config import RlConfig
from tools import plan, rl, serve, train
from tools.command_line.options import cli, current_options, with_value
from tools.recipes.presets import TINY, RunConfig, load_preset


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--steps", "4"], ["--euler-steps", "4"]),
        (["--steps=4"], ["--euler-steps=4"]),
        (["--rollout.execute", "4"], ["--rollout.replan-steps", "4"]),
        (["--flow.steps=4"], ["--flow.euler-steps=4"]),
        (["--trainer.steps", "4"], ["--trainer.train-steps", "4"]),
        (["--objective.trace=0.9"], ["--objective.gae-lambda=0.9"]),
        (["--learner.optimizer.rates"], ["--learner.optimizer.rate-factors"]),
        (["--data.encoding", "none"], ["--data.encoding", "direct"]),
        (["--data.encoding=none"], ["--data.encoding=direct"]),
    ],
)
def test_an_old_option_is_taken_by_its_new_name_with_a_warning(old, new, capsys):
    given = ["--out", "a=b", *old]
    assert current_options(given, RlConfig, RunConfig, steps="euler_steps") == [
        "--out",
        "a=b",
        *new,
    ]
    said = capsys.readouterr()
    assert said.err.count("warning: ") == 1
    assert new[0].partition("=")[0] in said.err
    assert said.out == ""


@pytest.mark.parametrize("after", [[], ["--port", "0"]])
def test_a_flag_that_takes_a_value_now_gets_the_one_that_it_meant(after, capsys):
    typed = ["--checkpoint", "run", "--chunking", *after]
    expected = ["--checkpoint", "run", "--chunking", "guided", *after]
    assert with_value(typed, "--chunking", "guided") == expected
    assert "warning: --chunking is now --chunking guided" in capsys.readouterr().err
    assert with_value(expected, "--chunking", "guided") == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("preset", "name"), [("tiny", "euler-steps"), ("pi0-fast-tiny", "max-decoding-steps")]
)
def test_a_presets_model_tells_its_own_old_names(preset, name, capsys):
    typed = ["--model.steps", "7", "--trainer.steps=8"]
    expected = [f"--model.{name}", "7", "--trainer.train-steps=8"]
    assert current_options(typed, load_preset(preset)) == expected
    assert capsys.readouterr().err.count("warning: ") == 2


def test_todays_options_are_taken_as_they_are_and_silently(capsys):
    typed = ["--euler-steps", "4", "--stepsize", "--slots=2", "steps", "--model.euler-steps=4"]
    assert current_options(typed, RunConfig) == typed
    assert capsys.readouterr().err == ""


def planned(typed):
    cli(plan.main, args=typed)


@dataclass(frozen=True)
class Given:
    out: Path | None = None
    rate: float = 1.0
    sizes: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--out", "s3://"], "error: --out: s3://: has an empty bucket; is a variable unset?"),
        (["--out=s3:///runs"], "error: --out: s3:///runs: has an empty bucket;"),
        (["--out", ""], "error: --out: A path or URL is empty; is a variable in it unset?"),
        (["--rate", "nan"], "error: --rate: nan is no number to work with; give another."),
        (["--rate=1e999"], "error: --rate: 1e999 is no number to work with;"),
        (
            ["--sizes", "1", str(10**400)],
            "000 is no number to work with; give at most 9007199254740992.",
        ),
    ],
)
def test_a_value_that_no_command_can_use_ends_in_a_sentence_and_with_2(typed, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli(Given, args=typed)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@dataclass(frozen=True)
class Warned:
    rate: float = 1.0

    def __post_init__(self) -> None:
        print(f"warning: a rate of {self.rate} \033[2Jis high", file=sys.stderr)


def test_what_a_config_says_while_it_is_read_is_shown(capsys):
    assert cli(Warned, args=["--rate", "3"]).rate == 3
    told = capsys.readouterr().err
    assert "warning: a rate of 3.0 " in told
    assert "\033" not in told


def test_other_values_are_those_that_were_typed():
    typed = ["--out", "s3://bucket//".removesuffix("/"), "--rate", "-3e-4", "--sizes", "0", "-7"]
    assert cli(Given, args=typed) == Given(Path("s3://bucket"), -3e-4, (0, -7))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--optimizer.nam=x"], "no option --optimizer.nam; did you mean --optimizer.name"),
        (["--modle.horizon", "3"], "no option --modle.horizon; did you mean --model.horizon"),
        (["--trainer.stepz", "3"], "--trainer.train-steps? python -m tools.train --preset NAME -"),
        (
            ["--zzz"],
            "error: there is no option --zzz; python -m tools.train --preset NAME --help l",
        ),
    ],
)
def test_a_mistyped_option_is_one_sentence_that_names_those_like_it(typed, said, capsys):
    with pytest.raises(SystemExit) as end:
        train.parse(["--data", "a", "--preset", "tiny", *typed])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("read", "typed", "said"),
    [
        (train.parse, "--rows.number 0", "rows.number is 0; expected a whole number from 1 to"),
        (
            train.parse,
            "--rows.number 100000000000",
            "rows.number is 100000000000; expected a whole",
        ),
        (train.parse, "--stall-seconds 0", "stall_seconds is 0.0; give a number above 0."),
        (train.parse, "--stall-seconds inf", "--stall-seconds: inf is no number to work with"),
        (train.parse, "--optimizer.learning-rate nan", "--optimizer.learning-rate: nan is no num"),
        (train.parse, "--data.holdout 1.5", "data.holdout is 1.5; give a share below 1."),
        (train.parse, "--optimizer.learning-rate 1e39", "learning-rate: 1e39 is no number to work"),
        (train.parse, "--data.workers -1", "data.workers is -1; it must be at least 0."),
        (train.parse, "--data.workers 100000000000", "data.workers is 100000000000; expected a wh"),
        (train.parse, "--data.threads 100000000000", "data.threads is 100000000000; expected a wh"),
        (planned, "--gpus 100000000000", "cluster.devices is 100000000000; expected a whole numb"),
        (
            train.parse,
            "--closed-loop.episodes 0",
            "closed_loop.episodes is 0; it must be at least 1",
        ),
        (
            rl.parse,
            "--checkpoint a --out b --stall-seconds -3",
            "stall_seconds is -3.0; give a num",
        ),
        (planned, "--price-per-gpu-hour -1", "price is -1.0; give a number above 0."),
        (
            planned,
            "--price-per-gpu-hour nan",
            "--price-per-gpu-hour: nan is no number to work with",
        ),
    ],
)
def test_a_number_out_of_range_is_refused_at_the_start(read, typed, said, capsys):
    more = ["--data", "a"] if read is train.parse else []
    with pytest.raises((SystemExit, ValueError)) as end:
        read([*more, *typed.split()])
    told = f"{end.value} {capsys.readouterr().err}"
    assert said in " ".join(told.replace("\u2502", " ").split())


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_no_machine_has_is_refused(port):
    config = cli(serve.ServeConfig, args=["--checkpoint", "a", "--port", str(port)])
    with pytest.raises(ValueError, match=f"--port is {port}; give a port from 0"):
        serve.run(config, Console(quiet=True))


def test_a_config_of_python_that_is_no_number_is_refused_by_its_field(tmp_path):
    nan = replace(TINY, optimizer=replace(TINY.optimizer, learning_rate=float("nan")))
    with pytest.raises(
        ValueError, match=r"config\.optimizer\.learning_rate is nan, expected a finite"
    ):
        train.run(train.Paths("a", tmp_path / "run"), nan)
    assert not (tmp_path / "run").exists()
