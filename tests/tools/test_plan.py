"""The planner finds the mesh it should, refuses what cannot fit, and says what would."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from models.layers.pipeline import Pipeline, check_pipeline
from parallel.planning.cluster import CHIPS, make_cluster
from parallel.planning.predict import (
    Choice,
    Line,
    Profile,
    choices,
    predict,
    profiler,
    search,
    slowest,
)
from parallel.planning.reliability import Recovery
from parallel.planning.scaling import curve
from tools.plan import (
    _HEADINGS,
    Machines,
    PlannedRun,
    _write,
    cells,
    describe,
    main,
    make_task,
    whole_step,
)
from tools.recipes.scaling import write

RUN = PlannedRun(preset="pi05", rows=8192)
H100 = make_cluster("h100", 1024, price=2.5)


@pytest.fixture(scope="module")
def task():
    return make_task(RUN, H100)


@pytest.fixture(scope="module")
def profiles(task):
    return profiler(task, H100.chip)


@pytest.fixture(scope="module")
def found(task, profiles):
    return search(task, H100, ("dots", "full"), profiles=profiles)


def test_pi05_on_1024_gpus_is_sharded_inside_the_node_and_copied_across(found):
    best = found[0]
    assert best.choice.sizes["fsdp"] == 8
    assert best.choice.sizes["data"] == 128
    assert 0.2 < best.mfu < 0.7
    assert best.parts["exposed communication"] < 0.05 * best.step


@pytest.mark.parametrize(("cameras", "text", "samples"), [(2, 60, 4), (3, 33, 2), (1, 200, 7)])
def test_rows_are_full_of_samples(cameras, text, samples):
    run = PlannedRun(preset="pi05", cameras=cameras, text=text, samples=samples)
    task = make_task(run, H100)
    assert task.samples == samples
    assert task.batch(8).prefix_source.shape == (8, samples * (256 * cameras + text))


def test_every_plan_fits_and_the_slower_come_later(found):
    limit = H100.chip.memory * H100.chip.memory_share
    assert all(p.bytes <= limit for p in found)
    steps = [p.step for p in found if p.step > 1.01 * min(p.step for p in found)]
    assert steps == sorted(steps)


def test_the_state_of_pi05_is_four_f32_copies_split_by_fsdp(task, profiles):
    parameters = sum(leaf.size for leaf in task.trained)
    assert parameters == pytest.approx(3.353e9, rel=0.001)
    memory = {
        n: predict(task, Choice((1024 // n, n, 1, 1, 1)), H100, profiles).memory["state"]
        for n in (1, 8, 64)
    }
    assert memory[1] == pytest.approx(16 * parameters, rel=1e-4)
    assert memory[8] == pytest.approx(memory[1] / 8, rel=0.01)
    assert memory[64] == pytest.approx(memory[1] / 64, rel=0.06)  # biases are whole


@pytest.mark.slow
def test_more_of_anything_that_helps_is_never_slower(task, profiles):
    def step(cluster=H100, **changes):
        mesh = changes.pop("mesh", (128, 8, 1, 1, 1))
        made = replace(task, rows=changes.pop("rows", task.rows))
        return predict(made, Choice(mesh, **changes), cluster, profiles).step

    faster = replace(H100, across=replace(H100.across, bandwidth=4 * H100.across.bandwidth))
    assert step(faster) <= step()
    assert step(rows=4096) < step() < step(rows=16_384)
    assert step(remat="dots") < step(remat="full")
    assert step(accumulation=1) < step(accumulation=4)
    assert step() < step(replace(H100, jitter=0.1))


@pytest.mark.slow
def test_few_tokens_on_a_slow_network_expose_what_many_hide(task, profiles):
    slow = replace(H100, across=replace(H100.across, bandwidth=5e9))
    choice = Choice((1, 1024, 1, 1, 1))

    def exposed(rows):
        found = predict(replace(task, rows=rows), choice, slow, profiles)
        return found.parts["exposed communication"] / found.step

    assert exposed(1024) > 0.5 > exposed(65_536)


def test_only_axes_that_split_something_are_searched(task):
    ways = list(choices(task, 16, ("full",), ("bf16",)))
    assert {way.sizes["fsdp"] for way in ways} == {1, 2, 4, 8, 16}
    for axis in {"tensor", "stage"} - task.split_axes:
        assert all(way.sizes[axis] == 1 for way in ways)


@pytest.mark.parametrize("rows", [24, 64])
def test_stages_are_planned_where_the_trainer_takes_them(task, rows):
    """pi05 shares the 18 layers of its two stacks, not the 27 of its vision tower."""
    ways = choices(replace(task, rows=rows), 8, ("full",), ("bf16",))
    staged = [way for way in ways if way.sizes["stage"] > 1]
    assert {way.sizes["stage"] for way in staged} == {2}
    for way in staged:
        shards = way.sizes["data"] * way.sizes["fsdp"]
        for pipeline in (Pipeline(), Pipeline(way.microbatches)):
            check_pipeline(pipeline, 2, 18, rows // way.accumulation, shards)


def test_the_vision_tower_waits_in_no_bubble(task, profiles):
    """Its share of the work is told by the FLOPs of one layer and of 27."""
    config = task.model("none", "bf16").model.config
    flat = replace(config, vision=replace(config.vision, depth=1)).build()
    whole, less = (t.own_flops.at(8) for t in (task, replace(task, model=lambda *_: flat)))
    tower = (whole - less) * 27 / 26 / whole
    assert 0.05 < tower < 0.3
    mesh = Choice((512, 1, 2, 1, 1), microbatches=4)
    parts = predict(task, mesh, H100, profiles).parts
    assert parts["bubble"] / parts["compute"] == pytest.approx((1 - tower) / 4, rel=0.05)


def test_what_is_refused_at_the_end_is_refused_at_the_start(tmp_path):
    run, machines = PlannedRun(preset="no such preset"), Machines()
    with pytest.raises(ValueError, match=r"must end in \.json"):
        main(run, machines, out=tmp_path / "plan.txt")
    with pytest.raises(ValueError, match=r"--scaling is .*must end in \.svg or \.png"):
        main(run, machines, scaling=tmp_path / "scaling.pdf")
    with pytest.raises(FileNotFoundError, match="plans does not exist; create it"):
        main(run, machines, out=tmp_path / "plans" / "plan.md")
    with pytest.raises(ValueError, match="--save-seconds"):
        main(replace(run, save_seconds=0), machines)
    with pytest.raises(ValueError, match="leave out --out, --json"):
        main(run, machines, scaling=tmp_path / "scaling.svg", as_json=True)


@pytest.mark.slow
def test_a_program_is_read_by_the_order_of_its_own_devices(monkeypatch):
    """That of a mesh with stages is another than the plan's (`parallel.mesh.make_mesh`)."""
    mesh, told = {"stage": 2, "data": 1, "fsdp": 1, "context": 1, "tensor": 1}, []
    memory = SimpleNamespace(peak=1)
    step = SimpleNamespace(program="text", mesh=mesh, memory=memory, flops={}, sent={})
    monkeypatch.setattr("tools.plan.compiled", lambda *_: step)
    monkeypatch.setattr("tools.plan.explained", lambda _, mesh, __: told.append(mesh))
    monkeypatch.setattr("tools.plan.explained_step", lambda *_: {"step_seconds": 1.0, "mfu": 1.0})
    run = PlannedRun(preset="tiny", rows=16)
    main(run, Machines(gpus=2), remats=("none",), explain=True, as_json=True)
    assert told == [mesh]


def test_what_cannot_fit_is_refused_with_what_would(task, profiles):
    small = make_cluster("h100", 1)
    with pytest.raises(ValueError, match=r"Nothing fits 1 h100 .* it fits 2 devices as fsdp=2"):
        search(
            replace(task, rows=64), replace(small, chip=replace(small.chip, memory=60e9)),
            ("full",), profiles=profiles,
        )  # fmt: skip


def test_rows_too_long_for_any_number_of_devices_are_refused_as_such(task):
    cluster = make_cluster("h100", 8)

    def heavy(remat, precision):
        return Profile(Line(0, 1e12), Line(0, 1e-3), Line(0, 1e12))

    with pytest.raises(ValueError, match="shorten the rows"):
        search(replace(task, rows=8), cluster, ("full",), profiles=heavy)


def test_rows_that_do_not_divide_are_refused_with_a_number_that_does(task, profiles):
    with pytest.raises(ValueError, match="A batch of 3 rows does not divide over 7 devices"):
        search(replace(task, rows=3), make_cluster("h100", 7), ("full",), profiles=profiles)


def test_the_slowest_of_many_is_what_all_wait_for():
    assert slowest(1, 0.1) == 1
    assert slowest(1024, 0) == 1
    assert 1 < slowest(8, 0.05) < slowest(1024, 0.05) < slowest(10_240, 0.05)
    assert slowest(1024, 0.05) == pytest.approx(1.176, abs=0.003)  # e^(0.05 · 3.24)


def test_an_epoch_costs_its_hours_times_the_price(found):
    row = describe(replace(RUN, dataset_frames=1_000_000), H100, found[0])
    hours = 1_000_000 / found[0].samples_per_second / 3600 / row["goodput"]
    assert row["epoch_hours"] == pytest.approx(hours)
    assert row["epoch_cost"] == pytest.approx(hours * 1024 * 2.5)
    assert row["save_every_seconds"] / 60 == pytest.approx(22, abs=1)
    assert len(cells(row)) == len(_HEADINGS)
    assert json.loads(json.dumps(row)) == row


def test_an_epoch_of_a_run_that_never_gets_through_has_no_end(found):
    often = replace(H100, failures=10.0)
    row = describe(replace(RUN, dataset_frames=1_000_000), often, found[0])
    assert (row["goodput"], row["epoch_hours"]) == (0, math.inf)


def test_a_program_as_slow_as_predicted_has_the_predicted_step(found):
    best = found[0]
    beside = best.parts["host"] + best.parts["slowest device"]
    whole = whole_step(best.step - beside, best)
    assert whole == pytest.approx({"step_seconds": best.step, "mfu": best.mfu})
    assert whole_step((best.step - beside) / 2, best)["mfu"] > 1.9 * best.mfu


@pytest.mark.slow
def test_the_curve_bends_down_with_devices(task, profiles, tmp_path):
    points = curve(task, H100, (8, 1024, 10_240), Recovery(), ("full",), ("bf16",), profiles)
    assert points[0].efficiency == 1
    assert points[0].efficiency > points[1].efficiency > points[2].efficiency > 0.8
    for point in points:
        assert point.simulated == pytest.approx(point.goodput, abs=0.01)
        assert point.low <= point.simulated <= point.high
    write(points, "a run", tmp_path / "curve.svg", H100)
    assert "| 10,240 | " in (tmp_path / "curve.md").read_text()
    told = json.loads((tmp_path / "curve.json").read_text())["rows"]
    assert told["1024"]["step_seconds"] == points[1].best.step
    assert told["10240"]["simulated_range"] == [points[2].low, points[2].high]
    assert (tmp_path / "curve.svg").read_text().count("<path") > 10


@pytest.mark.slow
def test_the_command_writes_its_table_and_all_that_fit(tmp_path, capsys):
    run, out = PlannedRun(preset="tiny", rows=16, dataset_frames=1000), tmp_path / "plan.json"
    main(run, Machines(gpus=2), remats=("none",), out=out, as_json=True)
    rows = json.loads(out.read_text())
    assert rows[:10] == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(math.prod(row["mesh"].values()) == 2 for row in rows)
    for suffix in (".md", ".html"):
        _write(out.with_suffix(suffix), rows, top=1)
        assert rows[0]["remat"] in out.with_suffix(suffix).read_text()


@pytest.mark.slow
def test_groot_is_planned_too():
    run = PlannedRun(preset="groot", rows=64)
    task = make_task(run, make_cluster("h100", 8))
    assert sum(leaf.size for leaf in task.trained) == pytest.approx(2.4e9, rel=0.1)
    best = search(task, make_cluster("h100", 8), ("none",))[0]
    assert 0.1 < best.mfu < 0.7


def test_float8_needs_a_chip_that_has_it(task):
    assert CHIPS["a100"].peak("float8_e4m3fn") < CHIPS["a100"].peak("bfloat16")


@pytest.mark.slow
def test_the_best_is_compiled_and_read(capsys):
    pytest.importorskip("jax_cuda12_plugin", reason="pip install -e '.[plan]'")
    run = PlannedRun(preset="tiny", rows=16)
    main(run, Machines(gpus=2), remats=("none",), explain=True, as_json=True)
    row = json.loads(capsys.readouterr().out.splitlines()[-1])[0]
    program = row["explained"]
    assert program["flops"] == row["compiled"]["flops"] > 0
    assert {"vision/mlp", "language/norm", "expert/attention", "update"} <= set(program["scopes"])
    assert program["step_seconds"] > program["seconds"] > program["memory_bound_seconds"] > 0
    assert 0 < program["mfu"] < 1
