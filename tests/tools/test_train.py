"""`tools.train` on a dataset of ours: exact resume, any mesh, and errors that come first."""

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from data.errors import DatasetError
from models import load_policy
from models.checkpoints import own
from models.config import from_json, to_json
from models.files.terminal import Console
from parallel.hosts import exits
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.metrics import read_metrics
from parallel.trainer import TrainResult, check_start
from tests.helpers.data.flips import flips
from tests.helpers.tools.small_run import MODEL, SMALL, losses, one_device, write_dataset
from tools import rl, train
from tools.recipes.prepare import prepare
from tools.recipes.presets import TINY, RunConfig, load_preset, presets
from tools.recipes.training import summary

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_device():
        yield


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.run(train.Paths(str(dataset), out), SMALL, QUIET).finished
    return out


def test_a_run_leaves_config_metrics_held_out_figures_and_checkpoints(finished):
    assert from_json(RunConfig, json.loads((finished / "config.json").read_text())) == SMALL
    assert len(losses(finished)) == 8
    assert np.isfinite(losses(finished)).all()
    measured = [row for row in read_metrics(finished) if "val_loss" in row]
    assert len(measured) == 2
    assert all(row["val_mean_action_mse"] > 0 for row in measured)
    assert from_json(RunConfig, own.read_json(finished, "config")) == SMALL
    ((name, stats),) = own.read_json(finished, "assets")["statistics"].items()
    assert name == load_policy(finished).processor.embodiments[0].name
    assert len(stats["state"]["q01"]) == 3
    assert stats["actions"]["count"] == stats["state"]["count"]


@pytest.mark.slow
def test_resuming_from_an_earlier_checkpoint_repeats_the_losses(finished, dataset, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for later in (6, 8):
        shutil.rmtree(out / "checkpoints" / str(later))
    train.run(train.Paths(str(dataset), out, resume=True), SMALL, QUIET)
    assert losses(out) == losses(finished)


def test_a_run_in_a_folder_that_looks_like_markup_resumes(finished, dataset, tmp_path, capsys):
    out = Path(shutil.copytree(finished, tmp_path / "a[/b]c"))
    train.run(train.Paths(str(dataset), out, resume=True), SMALL)
    assert f"{out}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one(finished, dataset, tmp_path):
    sharded = replace(SMALL, mesh=MeshConfig(data=4, fsdp=2))
    console = Console(file=io.StringIO(), width=500)
    train.run(train.Paths(str(dataset), tmp_path / "run"), sharded, console)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=1e-5)
    assert "the slowest of 8 ranks has" in console.file.getvalue()
    logged = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    found = [row["attention_excess"] for row in map(json.loads, logged) if "loss" in row]
    assert found
    assert all(0 <= value < 0.5 for value in found)


@pytest.mark.slow
def test_a_policy_is_rebuilt_from_its_checkpoint_alone(finished, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished / "checkpoints" / "8", moved / "8")
    policy = load_policy(moved / "8", euler_steps=2)
    images = np.zeros((3, 2, 16, 16, 3), np.uint8)
    states = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
    prompts = ["push", "pull", "a prompt with words never seen"]
    keys = [(1, 0), (1, 1), (1, 2)]
    together = policy.act((images, states), prompts, keys)
    assert together.shape == (3, 4, 2)
    np.testing.assert_array_equal(together, policy.act((images, states), prompts, keys))
    first = policy.act((images[:1], states[:1]), prompts[:1], keys[:1])
    np.testing.assert_allclose(first[0], together[0], atol=1e-5)


def test_resuming_with_another_config_is_refused_by_the_field_that_differs(
    finished, dataset, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    wider = replace(SMALL, model=replace(MODEL, vocabulary=600))
    with pytest.raises(ValueError, match=r"config\.json: model\.vocabulary is 512, but 600"):
        train.run(train.Paths(str(dataset), out, resume=True), wider, QUIET)


def test_a_run_whose_config_was_cut_is_held_to_that_of_its_checkpoint(finished, dataset, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    (out / "config.json").write_text((finished / "config.json").read_text()[:-40])
    paths = train.Paths(str(dataset), out, resume=True)
    wider = replace(SMALL, model=replace(MODEL, vocabulary=600))
    with pytest.raises(ValueError, match=r"config\.json: model\.vocabulary is 512, but 600"):
        train.run(paths, wider, QUIET)
    assert (out / "config.json").read_text() == (finished / "config.json").read_text()
    assert (out / "config.json.damaged").exists()
    assert train.run(paths, SMALL, QUIET).finished


@pytest.mark.slow
def test_steps_may_grow_where_the_schedule_does_not_end_with_them(finished, dataset, tmp_path):
    """`decay_steps` of eight is what a run of eight steps decays over, so losses are the same."""
    optimizer = replace(SMALL.optimizer, decay_steps=8)
    short = replace(SMALL, optimizer=optimizer, trainer=replace(SMALL.trainer, train_steps=3))
    paths = train.Paths(str(dataset), tmp_path / "run")
    assert train.run(paths, short, QUIET).step == 3
    grown = replace(short, trainer=SMALL.trainer)
    assert train.run(replace(paths, resume=True), grown, QUIET).step == 8
    assert losses(tmp_path / "run") == losses(finished)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trainer"]["train_steps"] == 8
    with pytest.raises(ValueError, match="has made 8 steps already, but only 3 were asked for"):
        train.run(replace(paths, resume=True), short, QUIET)


def test_steps_to_trace_may_change_and_are_refused_before_anything_is_read(
    finished, dataset, tmp_path
):
    traced = replace(SMALL, trainer=replace(SMALL.trainer, profile="1:3"))
    out = shutil.copytree(finished, tmp_path / "run")
    assert train.run(train.Paths(str(dataset), out, resume=True), traced, QUIET).finished
    beyond = replace(SMALL, trainer=replace(SMALL.trainer, profile="7:9"))
    with pytest.raises(ValueError, match=r"trainer\.profile is '7:9', but the run has 8 steps"):
        train.run(train.Paths("no such data", tmp_path / "new"), beyond, QUIET)
    assert not (tmp_path / "new").exists()


def test_a_run_that_a_bad_step_stops_may_skip_it_and_no_other_may_judge_anew(
    finished, dataset, tmp_path
):
    out = shutil.copytree(finished, tmp_path / "run")
    paths = train.Paths(str(dataset), out, resume=True)
    judging = replace(SMALL.trainer, on_bad_step="skip", spike_factor=10.0)
    assert train.run(paths, replace(SMALL, trainer=judging), QUIET).finished
    (out / "config.json").write_text(json.dumps(to_json(replace(SMALL, trainer=judging))))
    with pytest.raises(ValueError, match=r"trainer\.on_bad_step is skip, but stop was asked for"):
        train.run(paths, SMALL, QUIET)


@pytest.mark.parametrize("steps", [12, 6])
def test_other_steps_are_refused_where_the_schedule_ends_with_them(
    finished, dataset, steps, tmp_path
):
    out = shutil.copytree(finished, tmp_path / "run")
    other = replace(SMALL, trainer=replace(SMALL.trainer, train_steps=steps))
    with pytest.raises(ValueError, match=rf"8 steps, but {steps} .* cosine schedule .*decay-steps"):
        train.run(train.Paths(str(dataset), out, resume=True), other, QUIET)


def test_a_checkpoint_of_another_model_is_refused_by_its_first_difference(
    finished, dataset, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    wider = replace(SMALL, model=replace(MODEL, vocabulary=600))
    (out / "config.json").write_text(json.dumps(to_json(wider)))
    with pytest.raises(ValueError, match=r"another model: .*embedding has shape \(512, 16\)"):
        train.run(train.Paths(str(dataset), out, resume=True), wider, QUIET)


def test_a_dataset_changed_since_the_checkpoint_is_refused(finished, tmp_path):
    """Other values under the same lengths and costs: only the content tells."""
    out, other = tmp_path / "run", write_dataset(tmp_path / "set", seed=1)
    shutil.copytree(finished, out)
    for later in (6, 8):
        shutil.rmtree(out / "checkpoints" / str(later))
    with pytest.raises(ValueError, match="has changed since"):
        train.run(train.Paths(str(other), out, resume=True), SMALL, QUIET)


@pytest.mark.slow
def test_a_run_from_before_kinds_of_scaling_resumes_by_quantiles_each_time(
    finished, dataset, tmp_path
):
    out = shutil.copytree(finished, tmp_path / "run")
    file = out / "config.json"
    z_scores = replace(SMALL.data, state_scaling="z-score", action_scaling="z-score")
    since = replace(SMALL, data=z_scores)
    with pytest.raises(ValueError, match=r"data\.action_scaling is quantile, but z-score"):
        train.run(train.Paths(str(dataset), out, resume=True), since, QUIET)
    earlier = json.loads(file.read_text())
    del earlier["data"]["state_scaling"], earlier["data"]["action_scaling"]
    file.write_text(json.dumps(earlier))
    for _ in range(2):
        for later in (6, 8):
            shutil.rmtree(out / "checkpoints" / str(later))
        told = Console(file=io.StringIO())
        train.run(train.Paths(str(dataset), out, resume=True), since, told)
        assert "began before data.state_scaling was an option" in told.file.getvalue()
        assert losses(out) == losses(finished)
        assert json.loads(file.read_text()) == earlier


def test_what_cannot_train_is_refused_before_anything_is_written(finished, dataset, tmp_path):
    out = tmp_path / "run"
    short = replace(SMALL, trainer=replace(SMALL.trainer, train_steps=2))
    uneven = replace(SMALL, rows=replace(SMALL.rows, number=3), mesh=MeshConfig(data=2))
    with pytest.raises(ValueError, match="warm-up must end"):
        train.run(train.Paths(str(dataset), out), short, QUIET)
    with pytest.raises(ValueError, match="3 rows does not divide over 2 devices"):
        train.run(train.Paths(str(dataset), out), uneven, QUIET)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train.run(train.Paths(str(dataset), out, resume=True), SMALL, QUIET)
    with pytest.raises(ValueError, match="continue with --resume"):
        train.run(train.Paths(str(dataset), finished), SMALL, QUIET)
    for inside in (dataset, dataset / "run"):
        with pytest.raises(ValueError, match=r"is inside of .*, which is read"):
            train.run(train.Paths(str(dataset), inside), SMALL, QUIET)
    assert not out.exists()
    assert not (dataset / "run").exists()


def damaged(dataset: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "set"
    shutil.copytree(dataset, copy)
    return copy


def test_a_missing_video_is_named_before_anything_is_written(dataset, tmp_path):
    broken = damaged(dataset, tmp_path)
    video = next((broken / "videos" / "observation.images.wrist").rglob("*.mp4"))
    video.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"wrist.*\.mp4"):
        train.run(train.Paths(str(broken), tmp_path / "run"), SMALL, QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_straight_from_the_videos_gives_the_losses_of_a_raw_store(
    finished, dataset, tmp_path
):
    assert SMALL.data.encoding == "raw"
    direct = replace(SMALL, data=replace(SMALL.data, encoding="direct"))
    train.run(train.Paths(str(dataset), tmp_path / "run"), direct, QUIET)
    assert losses(tmp_path / "run") == losses(finished)
    assert not list((tmp_path / "run" / "store").rglob("*.array_record"))


@pytest.mark.slow
def test_a_frame_store_is_trained_on_as_it_is(finished, tmp_path):
    (store,) = (path.parent for path in (finished / "store").rglob("store.json"))
    train.run(train.Paths(str(store), tmp_path / "run"), SMALL, QUIET)
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.parametrize(
    "kept", ["warnings-*.json", "*/stats.json", "*/columns/action/c/0/0", "*/episodes.npz"]
)
def test_a_flipped_bit_in_what_a_run_keeps_of_its_data_is_refused_at_the_next_start(
    kept, finished, dataset
):
    (file,) = (finished / "store").glob(kept)
    for _ in flips(file, 2):
        with pytest.raises(DatasetError, match=f"{file}, checksum: .*; delete "):
            prepare(dataset, finished, SMALL, QUIET)
    assert prepare(dataset, finished, SMALL, QUIET).mixed.names


def test_a_robot_with_more_dims_than_the_model_is_refused(dataset, tmp_path):
    narrow = replace(SMALL, model=replace(MODEL, state_dim=2))
    with pytest.raises(ValueError, match=r"'observation.state'\] has 3 dims.*up to 2"):
        train.run(train.Paths(str(dataset), tmp_path / "run"), narrow, QUIET)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_summed_up_in_a_sentence(finished, tmp_path):
    """The held-out loss that is the last, and the checkpoint with the lowest of those kept."""
    where, result = train.Paths("sets/a", finished), TrainResult(None, 8, True)
    losses = [row["val_loss"] for row in read_metrics(finished) if "val_loss" in row]
    told = (
        f"{finished} is finished after 8 steps; its held-out loss is {losses[1]:.4g}, and its best "
    )
    best = int(np.argmin(losses))
    told += f"checkpoint {finished}/checkpoints/{4 * (best + 1)}"
    told += f" ({losses[0]:.4g})" * (best == 0) + "."
    assert summary(where, result) == told


def test_memory_that_runs_out_says_the_rows_and_what_helps(dataset, tmp_path, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5e9 bytes.")

    monkeypatch.setattr("tools.recipes.training.train", full)
    with pytest.raises(exits.OutOfMemory) as found:
        train.run(train.Paths(str(dataset), tmp_path / "run"), SMALL, QUIET)
    assert re.fullmatch(
        r"Memory ran out: 5.0 GB were asked for at once; a step takes \d+ rows, each of \d+ "
        r"places, \d+ samples and \d+ pictures; in this order, try fewer rows \(--rows.number, "
        r"now \d+\), smaller rows \(--rows.samples, now \d+\), recomputation \(--model.[a-z.]+"
        r".remat full\), "
        r"more micro-batches \(--trainer.accumulation, now 1\), QLoRA \(docs/qlora.md\) or "
        r"parameters shared out over more devices \(--mesh.fsdp\). "
        r"\(RESOURCE_EXHAUSTED: Out of memory allocating 5e9 bytes\.\)",
        str(found.value),
    )


def test_unknown_presets_are_refused_and_a_users_file_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"Unknown preset 'huge'.*tiny"):
        load_preset("huge")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py"):
        load_preset(str(tmp_path / "nowhere.py:MINE"))
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import replace\nfrom tools.recipes.presets import TINY\n"
        "MINE = replace(TINY, rows=replace(TINY.rows, number=2))\nOTHER = 3\n"
    )
    assert load_preset(f"{mine}:MINE").rows.number == 2
    with pytest.raises(ValueError, match="no RunConfig named 'OTHER'"):
        load_preset(f"{mine}:OTHER")


@pytest.mark.parametrize(
    ("typed", "resume"),
    [
        ([], False),
        (["--no-resume"], False),
        (["--resume"], True),
        (["--resume", "auto"], "auto"),
        (["--resume=auto"], "auto"),
    ],
)
def test_resume_alone_or_with_auto(typed, resume):
    for more in ([], ["--trainer.keep", "2"]):
        assert train.parse(["--data", "a", *typed, *more])[0].resume == resume
        assert rl.parse(["--checkpoint", "a", "--out", "b", *typed])[0].resume == resume


@pytest.mark.parametrize(
    ("typed", "warmup"),
    [
        ("--preset tiny --trainer.train-steps 60", 6),
        ("--preset tiny --trainer.steps 60 --optimizer.schedule constant", 6),
        ("--preset tiny --optimizer.decay-steps 50", 5),
        ("--preset tiny --trainer.train-steps 3", 0),
        ("--preset tiny --trainer.train-steps 200", 100),
        ("--preset pi05 --trainer.train-steps 500", 50),
        ("--preset tiny --trainer.train-steps 60 --optimizer.warmup-steps=40", 40),
        ("--preset tiny --trainer.train-steps 60 --optimizer.warmup_steps 100", 100),
    ],
)
def test_a_presets_warm_up_fits_a_short_run_and_a_given_one_stays(typed, warmup, capsys):
    config = train.parse(["--data", "a", *typed.split()])[1]
    assert config.optimizer.warmup_steps == warmup
    assert config.trainer.eval_every == min(
        config.trainer.train_steps, 1000 if "pi05" in typed else 500
    )
    said = f"warm-up of {1000 if 'pi05' in typed else 100} steps is shortened to {warmup}, a tenth"
    given = warmup == 100 or "warmup" in typed
    assert (said in capsys.readouterr().err) == (not given)
    fits = nullcontext()
    if warmup >= config.trainer.train_steps:
        fits = pytest.raises(ValueError, match="warmup_steps is 100 and decay_steps 60; warm-up mu")
    with fits:
        mesh = make_mesh(config.mesh, devices=jax.devices()[:1])
        check_start(config.rows.number, mesh, config.trainer, config.optimizer)


@pytest.mark.parametrize(
    ("data", "suite", "family", "form", "expected"),
    [
        ("one", "", "", "", "evaluate --checkpoint {run} --data {data} --out {run}/open_loop"),
        ("both", "", "", "", "serve --checkpoint {run}"),
        ("store", "", "mine.py", "", "serve --checkpoint {run} --family mine.py"),
        (
            *("one", "", "mine.py", "form.py:MINE"),
            "evaluate --checkpoint {run} --family mine.py --data {data} --data-format form.py:MINE "
            "--out {run}/open_loop",
        ),
        (
            *("both", "metaworld", "mine.py", "form.py:MINE"),
            "evaluate --checkpoint {run} --family mine.py --suite metaworld --out {run}/evaluation",
        ),
    ],
)
def test_the_command_named_next_is_one_that_works(
    data, suite, family, form, expected, finished, dataset, tmp_path, monkeypatch
):
    (store,) = (finished / "store").glob("*/store.json") if data == "store" else (dataset / "x",)
    both = tmp_path / "both.json"
    both.write_text(json.dumps({"datasets": [{"path": str(dataset)}, {"path": str(dataset)}]}))
    data = {"one": dataset, "both": both, "store": store.parent}[data]
    if family:
        monkeypatch.delitem(train.CONFIGS, SMALL.model.family)
    paths = train.Paths(str(data), finished, data_format=form, preset=f"{family}:MINE")
    config = replace(SMALL, closed_loop=replace(SMALL.closed_loop, suite=suite))
    line = f"Next: python -m tools.{expected.format(run=finished, data=data)}"
    assert train._next(paths, config) == line


@pytest.mark.parametrize(
    ("command", "typed", "warmup"),
    [
        (train, "--data a", 600),
        (train, "--data a --trainer.train-steps 900", 90),
        (train, "--data a --trainer.train-steps 1200", 600),
        (rl, "--checkpoint a --out b", 600),
        (rl, "--checkpoint a --out b --learner-steps 93", 600),
        (rl, "--checkpoint a --out b --learner-steps 92", 119),
    ],
)
def test_a_long_warm_up_of_a_users_preset_shrinks_only_with_its_run(
    command, typed, warmup, tmp_path
):
    """In RL it counts updates, of which a step makes 13."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from tools.recipes.presets import TINY as RUN\n"
        "from tools.recipes.rl_presets import TABLETOP_PPO as RL\n"
        "trainer = replace(RUN.trainer, train_steps=1000, eval_every=2000)\n"
        "optimizer = replace(RUN.optimizer, warmup_steps=600)\n"
        "TRAIN = replace(RUN, optimizer=optimizer, trainer=trainer)\n"
        "warmed = replace(RL.learner.optimizer, warmup_steps=600)\n"
        "learner = replace(RL.learner, optimizer=warmed)\n"
        "IMPROVE = replace(RL, learner=learner, learner_steps=50)\n"
    )
    name = "TRAIN" if command is train else "IMPROVE"
    config = command.parse([*typed.split(), "--preset", f"{tmp_path / 'mine.py'}:{name}"])[1]
    learner = config if command is train else config.learner
    assert learner.optimizer.warmup_steps == warmup
    if command is train:
        shrunk = "train-steps" in typed
        assert config.trainer.eval_every == (config.trainer.train_steps if shrunk else 2000)


@pytest.mark.parametrize("typed", [[], ["--trainer.train-steps", "8"]])
def test_a_resumed_run_keeps_its_warm_up_unless_another_is_asked_for(
    typed, finished, dataset, tmp_path, capsys
):
    out, mine = shutil.copytree(finished, tmp_path / "run"), tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import replace\nfrom tests.helpers.tools.small_run import SMALL\n"
        "MINE = replace(SMALL, optimizer=replace(SMALL.optimizer, warmup_steps=5))\n"
    )
    command = [f"--preset={mine}:MINE", "--data", str(dataset), "--out", str(out), "--resume"]
    paths, config, _ = train.parse([*command, *typed])
    assert train.run(paths, config).finished
    assert "continues with the warm-up of 2 steps that it began with" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text()) == to_json(SMALL)
    paths, config, _ = train.parse([*command, *typed, "--optimizer.warmup_steps", "5"])
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps is 2, but 5 was asked for"):
        train.run(paths, config, QUIET)


def test_options_change_a_preset():
    arguments = ["--data", "a", "--out", "b", "--trainer.train-steps", "700", "--preset", "tiny"]
    paths, config, _ = train.parse([*arguments, "--resume"])
    assert paths == train.Paths("a", Path("b"), resume=True, preset="tiny")
    assert train.parse(["--preset=tiny", "--data", "sets/a"])[0].folder == Path("runs/a")
    assert config == replace(TINY, trainer=replace(TINY.trainer, train_steps=700))
    for data, name in (("mixes/both.json", "both"), ("hf://me/set.v2", "set.v2")):
        assert train.Paths(data).folder == Path("runs") / name


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_survive_json(name):
    assert from_json(RunConfig, json.loads(json.dumps(to_json(presets()[name])))) == presets()[name]


def test_a_config_of_another_version_is_refused_by_its_field():
    value = to_json(TINY)
    value["model"]["vision"]["pool"] = "mean"
    with pytest.raises(ValueError, match=r"config\.model\.vision.*'pool'"):
        from_json(RunConfig, value)


@pytest.mark.slow
def test_two_launched_processes_give_the_losses_of_one(finished, dataset, tmp_path):
    preset, out = tmp_path / "mine.py", tmp_path / "run"
    preset.write_text("from tests.helpers.tools.small_run import HOSTS as MINE\n")
    command = [sys.executable, "-m", "tools.launch", "-n", "2", "--", "python", "-m", "tools.train"]
    command += [f"--preset={preset}:MINE", "--data", str(dataset), "--out", str(out)]
    launched = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    assert launched.returncode == 0, launched.stdout
    np.testing.assert_allclose(losses(out), losses(finished), rtol=1e-5)
    measured = [
        [r["val_loss"] for r in read_metrics(o) if "val_loss" in r] for o in (out, finished)
    ]
    np.testing.assert_allclose(*measured, rtol=1e-5)
    assert launched.stdout.count("[0] Goodput") == 1
    assert "[1] Goodput" not in launched.stdout


def test_an_option_that_does_not_fit_is_refused_in_a_sentence(dataset, tmp_path):
    command = [sys.executable, "-m", "tools.train", "--data", str(dataset), "--process-id", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --coordinator and --num-processes: missing")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_with_an_optimizer_of_a_users_file_resumes_exactly(dataset, tmp_path):
    name = f"{Path(__file__).parents[1] / 'helpers/parallel/own_optimizer.py'}:amsgrad"
    own_method = replace(SMALL, optimizer=replace(SMALL.optimizer, name=name))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train.run(train.Paths(str(dataset), whole), own_method, QUIET).finished
    assert own.read_json(whole, "config")["optimizer"]["name"] == name
    shutil.copytree(whole, cut)
    for later in (6, 8):
        shutil.rmtree(cut / "checkpoints" / str(later))
    train.run(train.Paths(str(dataset), cut, resume=True), own_method, QUIET)
    assert losses(cut) == losses(whole)
    with pytest.raises(ValueError, match=r"optimizer\.name is .*own_optimizer\.py:amsgrad, but ad"):
        train.run(train.Paths(str(dataset), cut, resume=True), SMALL, QUIET)
