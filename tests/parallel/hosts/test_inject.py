"""Faults on purpose: how they are written, and that each strikes once."""

import jax.numpy as jnp
import pytest

from parallel.hosts import inject


@pytest.fixture
def armed(tmp_path):
    yield lambda text: inject.arm(text, tmp_path)
    inject.arm("", tmp_path)


def test_a_list_of_faults_is_read():
    text = "kill@rank1:step50, nan@rank0:step60"
    assert inject.parse(text) == [inject.Fault("kill", 1, 50), inject.Fault("nan", 0, 60)]


@pytest.mark.parametrize("text", ["kill", "kill@1:50", "melt@rank0:step1", "kill@rank0:step1,"])
def test_what_is_no_fault_is_refused_with_the_kinds_there_are(text):
    with pytest.raises(
        ValueError, match=r"--inject: '.*' is not a fault.*KIND is one of kill, stop"
    ):
        inject.parse(text)


def test_a_fault_strikes_its_rank_at_its_step_once_in_a_run(armed, capsys):
    armed("exception@rank0:step3,exception@rank1:step2")
    inject.at(2)
    with pytest.raises(RuntimeError, match="exception@rank0:step3"):
        inject.at(3)
    assert "inject: exception@rank0:step3 at " in capsys.readouterr().err
    armed("exception@rank0:step3")  # the restarted run
    inject.at(3)


def test_a_batch_that_is_to_be_spoilt_is_the_callers(armed):
    armed("nan@rank0:step1")
    assert inject.at(1) == "nan"
    assert jnp.isnan(inject.spoilt(jnp.ones((2, 3)))).all()
    assert inject.at(1) is None
