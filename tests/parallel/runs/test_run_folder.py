"""A run's folder when something in it is away or damaged: what goes on, and what is refused."""

import json
import shutil
import time
from dataclasses import replace

import jax
import pytest
from rich.console import Console

from parallel import checkpoint
from parallel.mesh import make_mesh
from parallel.runs.run_folder import CONFIG_NAME, SAVED_NAME, check_folder, note_saved, read_config
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, fed, losses, position

CONFIG = TrainerConfig(train_steps=8, save_every=2, keep=2)
LOGS = ("metrics.jsonl", "goodput.jsonl")


def run(directory, config=CONFIG, source=batches, **options):
    at, mesh = Run(directory, {"model": "toy"}, {}), make_mesh(devices=jax.devices()[:1])
    return train(Denoiser(), RULES, source, position, at, config, OPTIMIZER, mesh=mesh, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    run(out)
    return losses(out)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run that was ended after 5 steps, two checkpoints and a half-way third."""
    out = tmp_path_factory.mktemp("half")
    with pytest.raises(ValueError, match="data ended after 5"):
        run(out, source=lambda start, where: iter([fed(i) for i in range(5)]))
    return out


@pytest.fixture
def at(half, tmp_path):
    return shutil.copytree(half, tmp_path / "run")


def content(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def unmounted(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def dangling(folder):
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere/scratch")


def a_file(folder):
    shutil.rmtree(folder)
    folder.touch()


def unfinished(folder):
    unmounted(folder)
    (folder / ".6.saving").mkdir()


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (
            shutil.rmtree,
            r"checkpoints is missing, but .*saved\.json says that the run was saved at ",
        ),
        (unmounted, r"checkpoints holds no checkpoint, but .*at step 4; mount or restore it"),
        (unfinished, r"checkpoints holds no checkpoint, but"),
        (dangling, r"checkpoints is a link to /nowhere/scratch, which does not exist; mount"),
        (a_file, r"checkpoints is not a folder; move it away"),
    ],
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_whose_checkpoints_are_away_is_refused_and_loses_nothing(lose, why, resume, at):
    lose(at / "checkpoints")
    before = content(at)
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        run(at, resume=resume)
    assert content(at) == before


def test_checkpoints_that_come_back_are_gone_on_from(at, whole, tmp_path):
    (at / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="checkpoints is missing"):
        run(at, resume=True)
    (at / "checkpoints").symlink_to(tmp_path / "elsewhere")
    run(at, resume=True)
    assert losses(at) == whole


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_begins_again(tmp_path, whole):
    never = replace(CONFIG, save_every=100)
    with pytest.raises(ValueError, match="data ended after 3"):
        run(tmp_path, never, source=lambda start, where: iter([fed(i) for i in range(3)]))
    assert not (tmp_path / SAVED_NAME).exists()
    (tmp_path / "checkpoints" / ".2.saving").mkdir(parents=True)
    run(tmp_path, resume=True)
    assert losses(tmp_path) == whole
    assert json.loads((tmp_path / SAVED_NAME).read_text()) == {"step": 8}


def test_a_run_of_an_earlier_version_is_noted_as_saved_when_it_goes_on(at):
    (at / SAVED_NAME).unlink()
    with pytest.raises(ValueError, match="data ended after 4"):
        run(at, source=lambda start, where: iter(()), resume=True)
    assert json.loads((at / SAVED_NAME).read_text()) == {"step": 4}


def test_a_rollback_to_checkpoints_that_are_away_stops_and_keeps_the_metrics(tmp_path):
    def source(start, where):
        for i in range(start, 100):
            if i == 5:
                while not (tmp_path / SAVED_NAME).exists():
                    time.sleep(0.005)
                shutil.rmtree(tmp_path / "checkpoints")
            b, facts = fed(i)
            yield (replace(b, actions=b.actions * float("nan")) if i == 5 else b), facts

    config = replace(CONFIG, save_every=4, on_bad_step="rollback", prefetch=1)
    with pytest.raises(FileNotFoundError, match="checkpoints is missing, but"):
        run(tmp_path, config, source)
    assert [step for step, _ in losses(tmp_path)][:5] == list(range(5))


def test_a_note_that_was_cut_still_says_that_something_was_saved(tmp_path):
    (tmp_path / CONFIG_NAME).write_text("{}")
    for cut in ("", '{"st', "[]", '{"step": "\\u001b"}'):
        (tmp_path / SAVED_NAME).write_text(cut)
        with pytest.raises(FileNotFoundError, match="says that the run was saved; mount or"):
            check_folder(tmp_path, resume=True)


def test_a_folder_of_damaged_checkpoints_alone_is_not_begun_in_again(tmp_path):
    note_saved(tmp_path, 4)
    (tmp_path / "checkpoints" / "4.damaged").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run already, saved at step 4; continue with"):
        check_folder(tmp_path, resume=False)


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("damage", [b"\x00" * 40, b"{}", b'{"step": 1', b"[" * 5000, b"\xff\xfe"])
def test_a_damaged_line_of_a_log_is_set_aside_and_the_run_goes_on(name, damage, at, whole, capsys):
    lines = (at / name).read_bytes().split(b"\n")
    lines[1] = damage
    (at / name).write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="data ended after 4 of 8"):  # before a step is compiled
        run(at, source=lambda start, where: iter(()), resume=True)
    assert f"{at / name}, line 2: damaged; the file was set aside as {name}.damaged" in (
        capsys.readouterr().out
    )
    assert (at / f"{name}.damaged").read_bytes() == b"\n".join(lines)
    kept = (at / name).read_bytes().split(b"\n")
    assert kept[: len(lines) - 2] == lines[:1] + lines[2:-1]


def test_a_run_with_damaged_logs_and_config_has_the_losses_of_a_sound_one(at, whole, capsys):
    for name in LOGS:
        path = at / name
        path.write_bytes(b"\x00\n" + path.read_bytes())
    (at / CONFIG_NAME).write_text('{"mod')
    assert read_config(at, Console()) == {"model": "toy"}
    run(at, resume=True)
    said = capsys.readouterr().out
    assert (
        "config.json is damaged and was set aside as config.json.damaged; continuing with that of"
    )
    assert said.count("line 1: damaged; the file was set aside") == 2
    assert losses(at) == whole
    assert json.loads((at / CONFIG_NAME).read_text()) == {"model": "toy"}


def test_a_second_damage_gets_a_name_of_its_own_and_the_newest_whole_checkpoint_is_asked(at):
    (at / CONFIG_NAME).write_text("[]")
    newest = at / "checkpoints" / str(checkpoint.latest(at / "checkpoints"))
    for file in (newest / "config").iterdir():
        file.write_bytes(b"")
    assert read_config(at, Console(quiet=True)) == {"model": "toy"}
    (at / CONFIG_NAME).write_text("")
    assert read_config(at, Console(quiet=True)) == {"model": "toy"}
    assert (at / "config.json.damaged").read_text() == "[]"
    assert (at / "config.json.damaged-2").read_text() == ""


def test_logs_are_on_disk_before_a_save_begins(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("parallel.monitor.metrics.os.fsync", lambda handle: synced.append(handle))
    save = checkpoint.CheckpointWriter.save

    def saving(writer, step, *rest):
        assert [at for at, _ in losses(tmp_path)] == list(range(step))
        assert len(synced) >= 2 * (step // 2)
        return save(writer, step, *rest)

    monkeypatch.setattr(checkpoint.CheckpointWriter, "save", saving)
    run(tmp_path, replace(CONFIG, train_steps=4))
    assert checkpoint.steps(tmp_path / "checkpoints") == [2, 4]


def test_a_log_that_fails_at_a_save_costs_no_steps(tmp_path, monkeypatch):
    def failing(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("parallel.monitor.metrics.MetricsWriter.sync", failing)
        with pytest.raises(OSError, match=r"No space left .* stopped after step \d of 4, saved"):
            run(tmp_path, replace(CONFIG, train_steps=4))
    assert checkpoint.steps(tmp_path / "checkpoints")[0] == 2
