"""A run that saves after every step, killed at seeded random moments of its life."""

import random
import signal
import subprocess
import sys
import time

import pytest

from models.checkpoints import digests
from parallel import checkpoint
from tests.helpers.parallel import train_often
from tests.helpers.parallel.toy import environment, losses

PROGRAM = (sys.executable, "-m", "tests.helpers.parallel.train_often")
STEPS_PER_KILL = 8
AHEAD = 3  # batches made before the first step
START_SECONDS = 5.0
SAVING = ".*.saving*"


def start(directory, steps, save_every=1):
    return subprocess.Popen(
        [*PROGRAM, str(directory), str(steps), str(save_every)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill(process, made, delay, saving=None):
    """Kills a process some seconds after it made so many batches, or once it is `saving`, whichever
    comes last."""
    heard = []
    while made and (line := process.stdout.readline()):
        heard.append(line)
        made -= line.startswith("batch ")
    time.sleep(delay)
    while saving is not None and not saving():
        assert process.poll() is None, "".join(heard)
        time.sleep(0.001)
    process.kill()
    heard.append(process.communicate(timeout=500)[0])
    assert process.returncode == -signal.SIGKILL, "".join(heard)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.drill)],
)
def test_killed_runs_resume_and_repeat_every_step_alike(tmp_path, kills):
    steps, rng = kills * STEPS_PER_KILL, random.Random(kills)
    train_often.run(tmp_path / "uninterrupted", steps, save_every=steps)
    expected, directory = losses(tmp_path / "uninterrupted"), tmp_path / "run"
    folder, halfway = directory / "checkpoints", 0
    for number in range(kills):
        process = start(directory, steps)
        if number % 5 == 4:
            kill(process, 0, rng.uniform(0, START_SECONDS))
        elif number % 5 == 3:
            kill(process, AHEAD + 1, 0, saving=lambda: any(folder.glob(SAVING)))
        else:
            kill(process, AHEAD + rng.randrange(1, STEPS_PER_KILL - 1), rng.uniform(0, 0.4))
        saved = checkpoint.steps(folder)
        assert [digests.damage(folder / str(step)) for step in saved] == [[]] * len(saved)
        halfway += any(folder.glob(SAVING))
        written = losses(directory)
        assert written == expected[: len(written)]
    assert 0 < saved[-1] < steps
    assert halfway > kills // 10
    every = steps // 4
    process = start(directory, steps, every)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert f"Resuming {directory} at step {saved[-1]} of {steps}." in said
    assert losses(directory) == expected
    assert checkpoint.steps(folder)[-1] == steps
    assert all(path.name.isdigit() for path in folder.iterdir())
    print(f"{kills} kills, {halfway} amid a save, {saved[-1]} steps made before the last")
