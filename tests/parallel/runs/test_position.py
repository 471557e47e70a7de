"""A checkpoint whose position makes no sense, sealed by whoever wrote it: refused by checkpoint and
field before a step is made."""

import json

import pytest

from models.checkpoints import digests
from parallel.hosts import exits
from parallel.loop import TrainerConfig
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.spikes import Spikes, check_record
from parallel.runs.position import check_at_data
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, position

MESH = make_mesh(MeshConfig(data=8))
GOOD = {"norms": [[0, 1.5], [1, 2]], "in_a_row": 1, "skipped": 3}
HUGE = 10**30


def run(directory, steps, **options):
    where = Run(directory, config={}, assets={})
    config = TrainerConfig(train_steps=steps)
    return train(
        Denoiser(8), RULES, batches, position, where, config, OPTIMIZER, mesh=MESH, **options
    )


def test_a_run_is_not_resumed_from_a_position_without_sense(tmp_path):
    run(tmp_path, 1)
    path = tmp_path / "checkpoints/1"
    file = path / "position/data.json"
    sound, metrics = json.loads(file.read_text()), (tmp_path / "metrics.jsonl").read_bytes()
    bad_steps = sound["bad_steps"]
    for changed, field in (
        ({"offset": HUGE}, "offset is 1000"),
        ({"bad_steps": bad_steps | {"skipped": -1}}, "skipped is -1"),
    ):
        file.write_text(json.dumps(sound | changed))
        (path / digests.NAME).unlink()
        digests.write_digests(path, digests.digest_files(path, digests.names(path)))
        with pytest.raises(ValueError, match=f"{path}, position: {field}.*; copy") as refused:
            run(tmp_path, 2, resume=True)
        assert exits.code(refused.value, begun=True) == exits.REFUSED
        assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("found", "name"),
    [(found, "data is missing") for found in (None, [], 7, "x", {})]
    + [
        ({"data": None, "bad_steps": None} | offset, "offset is ")
        for offset in (
            {}, {"offset": "1"}, {"offset": 1.0}, {"offset": True}, {"offset": -1},
            {"offset": HUGE}, {"offset": None}, {"offset": [[0] * 10**6]},
        )
    ]
    + [({"data": {}, "offset": 0}, "bad_steps is missing")],
)  # fmt: skip
def test_a_position_that_none_saved_is_refused_by_its_field(found, name):
    with pytest.raises(ValueError, match=name) as refused:
        check_at_data(found)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"norms": norms}, "norms is ") for norms in (None, 7, {}, "x", [[0, 1.0]] * 1000)]
    + [
        ({"norms": [norm]}, "norms has ")
        for norm in (
            7, [1], [1, "2"], ["1", 2.0], [1, float("nan")], [1, float("inf")], [1, -2.0],
            [-1, 2.0], [HUGE, 2.0], [1.0, 2.0], [True, 2.0], [1, 2.0, 3.0], None,
        )
    ]
    + [({name: x}, f"{name} is ") for name in ("in_a_row", "skipped") for x in (-1, HUGE, "1", 1.0)]
    + [({"in_a_row": 4}, "in_a_row is 4")],
)  # fmt: skip
def test_a_record_of_bad_steps_that_none_saved_is_refused_by_its_field(changed, name):
    with pytest.raises(ValueError, match=name):
        check_record(GOOD | changed)
    with pytest.raises(ValueError, match="is missing"):
        check_record({k: v for k, v in GOOD.items() if k not in changed})


def test_a_record_that_was_saved_is_taken():
    check_record(GOOD)
    check_record(json.loads(json.dumps(Spikes("skip", 3.0, GOOD).record())))
