"""Traces of steps: which steps they hold, and that tracing changes nothing of what is learnt."""

import gzip
import json
from dataclasses import replace
from functools import partial

import jax
import pytest

from parallel.mesh import make_mesh
from parallel.monitor.step_trace import FOLDER, traced_steps
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.launched import launch
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, losses, position

CONFIG = TrainerConfig(train_steps=8, save_every=4)


def run(directory, profile="", source=batches, **options):
    where = Run(directory, config={"model": "toy"}, assets={})
    mesh = make_mesh(devices=jax.devices()[:1])
    config = replace(CONFIG, profile=profile)
    return train(
        Denoiser(), RULES, source, position, where, config, OPTIMIZER, mesh=mesh, **options
    )


def traced(directory, host=0):
    """The steps in each of a host's traces, in the order in which these were made."""
    found = []
    for path in sorted(directory.glob(f"{FOLDER}/host-{host}/plugins/profile/*/*.trace.json.gz")):
        assert next(path.parent.glob("*.xplane.pb")).stat().st_size > 0
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert (path.parent / "perfetto_trace.json.gz").exists()
        found.append({int(e["args"]["step_num"]) for e in events if e.get("name") == "step"})
    return found


@pytest.fixture(scope="module")
def untraced(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untraced")
    run(directory)
    assert not (directory / FOLDER).exists()
    return losses(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "steps"), [("2:4", {2, 3}), ("0:1", {0}), ("6:8", {6, 7})])
def test_a_trace_holds_the_steps_that_were_asked_for_and_changes_no_loss(
    tmp_path, untraced, profile, steps, capsys
):
    assert run(tmp_path, profile).finished
    assert traced(tmp_path) == [steps]
    assert losses(tmp_path) == untraced
    said = capsys.readouterr().out
    assert f"Trace: {tmp_path / FOLDER / 'host-0'} (docs/running.md)" in said


@pytest.mark.slow
def test_a_run_that_failed_while_it_was_traced_leaves_its_trace_and_a_resumed_one_adds_the_rest(
    tmp_path, untraced, capsys
):
    with pytest.raises(OSError, match="disk lost"):
        run(tmp_path, "3:8", source=partial(lost, at=6))
    first = traced(tmp_path)
    assert first == [{3, 4, 5}]
    run(tmp_path, "3:8", resume=True)
    assert traced(tmp_path) == [*first, {4, 5, 6, 7}], "it went on from the checkpoint of step 4"
    assert losses(tmp_path) == untraced


def test_steps_made_before_a_start_are_not_traced_and_that_is_said(tmp_path, capsys):
    with pytest.raises(OSError, match="lost"):
        run(tmp_path, source=partial(lost, at=7))
    run(tmp_path, "1:3", resume=True)
    assert "Steps 1 to 2 were already made before this start" in capsys.readouterr().out
    assert traced(tmp_path) == []


def lost(start, where, at):
    """Batches that end with an error."""
    for step, fed in enumerate(batches(start, where), start):
        if step == at:
            raise OSError("disk lost")
        yield fed


@pytest.mark.slow
def test_each_of_several_hosts_writes_its_own(tmp_path):
    launch(tmp_path, "--profile", "2:4")
    assert [traced(tmp_path, host) for host in range(2)] == [[{2, 3}]] * 2


@pytest.mark.parametrize("profile", ["3", "3:3", "5:2", "2:9", "a:b", "-1:2", "1:2:3", " 1:2"])
def test_what_names_no_steps_of_the_run_is_refused(profile):
    with pytest.raises(ValueError, match=f"trainer.profile is {profile!r}.* expected A"):
        traced_steps(profile, 8, "trainer.profile")


def test_nothing_is_traced_unless_asked_for():
    assert not traced_steps("", 8, "trainer.profile")
