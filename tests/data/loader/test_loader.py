"""Batches of a mixture: the planned samples, whatever the hosts, workers and threads."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np
import pytest

from data import open_dataset
from data.frames import STATE, Feed
from data.loader.loader import Loader, plan_source
from data.mixture.frame_filter import FrameFilter
from data.mixture.relabelled import RelabelledFrames
from data.packing.packing import fit_layout
from data.packing.plan import Plan
from data.store.direct import open_direct
from data.store.store import build_store
from data.video.seek import SeekTable
from models import Embodiment, Normalizer, pack
from models.families.groot.eagle_turn import EagleTurn
from models.inputs.action_tokens import ActionTokens
from models.inputs.bpe import ByteBpe
from models.inputs.fast import Fast
from models.inputs.history import History, Padding
from models.inputs.packed_batch import ACTION_TOKENS, ImageSlots
from models.inputs.parts import kinds, part_class
from models.inputs.pictures import PictureFit, picture_fit
from models.inputs.prompts import TemplatePrompt, template
from tests.helpers.data.layouts import layout
from tests.helpers.data.recording import FRONT, WRIST
from tests.helpers.data.two_feeds import (
    FEEDS,
    HORIZON,
    PLAN,
    PROCESSOR,
    ROWS,
    SIZE,
    STEPS,
    TWO,
    assert_equal,
    batches,
    expected,
    make_plan,
)
from tests.helpers.models.groot_whole import WHOLE
from tests.helpers.models.processors import tokens_of


def sample(processor, draw, feeds):
    """A draw's sample, prepared as a robot's observation would be."""
    feed = feeds[draw.source]
    frames, start = feed.frames, int(feed.frames.starts[draw.episode])
    steps = draw.frame + np.array(feed.ahead)
    last = int(frames.lengths[draw.episode]) - 1
    state = np.hstack([frames.columns[name][start + draw.frame] for name in feed.state])
    rows = start + np.clip(steps, 0, last)
    actions = np.hstack([frames.columns[name][rows] for name in feed.actions])
    if feed.transform is not None:
        (state,), (actions,) = feed.transform(state[None], actions[None])
    seen = [
        camera is not None and (draw.episode, camera) not in frames.absent
        for camera in feed.cameras
    ]
    pictures = {}

    def picture(camera, frame):
        return pictures.setdefault((camera, frame), frames.picture(start + frame, camera))

    def past(column, read):
        observed = processor.observed
        ago = observed.state if column == "state" else observed.camera(column)
        at = [draw.frame - round(back * feed.step) for back in ago]
        absent = processor.observed.padding == "mask"
        return [None if frame < 0 and absent else read(max(frame, 0)) for frame in at]

    def earlier_state(frame):
        row = np.hstack([frames.columns[name][start + frame] for name in feed.state])
        return row if feed.transform is None else feed.transform(row[None], actions[None])[0][0]

    shown = zip(processor.embodiments[feed.embodiment].cameras, feed.cameras, seen, strict=True)
    return processor.sample(
        [
            picture(camera, draw.frame) if there else None
            for camera, there in zip(feed.cameras, seen, strict=True)
        ],
        state,
        frames.prompts[draw.task][draw.wording],
        embodiment=feed.embodiment,
        actions=actions,
        valid=(steps >= 0) & (steps <= last),
        past={"state": past("state", earlier_state)}
        | {
            name: past(name, lambda frame, camera=camera: picture(camera, frame))
            for name, camera, there in shown
            if there
        },
        id=draw.id,
    )


def reference(processor, plan, step, feeds=FEEDS):
    rows = [[sample(processor, draw, feeds) for draw in row] for row in plan.rows(step)]
    return pack(rows, plan.layout)


def test_a_batch_holds_the_planned_samples_prepared_as_for_acting():
    for step, batch in enumerate(expected()):
        assert_equal(batch, reference(PROCESSOR, PLAN, step))
    draws = [draw for step in range(STEPS) for row in PLAN.rows(step) for draw in row]
    assert {(draw.source, draw.task, draw.wording) for draw in draws} == {
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)
    }  # fmt: skip


def spelling(**changes):
    reader = replace(PROCESSOR.prompts, template=template("text"), **changes)
    return replace(PROCESSOR, state_input="text", prompts=reader)


def choices(part):
    """Each other value of each field of a part that has a choice."""
    for name, hint in get_type_hints(part).items():
        values = (False, True) if hint is bool else get_args(hint)
        if hint is bool or get_origin(hint) is Literal:
            yield from ({name: value} for value in values)


FAST = Fast.train(np.random.default_rng(0).uniform(-9, 9, (200, HORIZON, 5)), 900)
VIDEOS = Path(__file__).parents[2] / "fixtures/lerobot/lerobot_h264"
FITS = picture_fit("antialiased", SIZE), picture_fit("stretched", (SIZE, 12))
EAGLE = ByteBpe.read(WHOLE / "eagle")
OPTIONS = {
    **{
        f"pictures-{kind}": replace(PROCESSOR, pictures=picture_fit(kind, SIZE))
        for kind in kinds(PictureFit)
    },
    **{
        f"prompts-{'-'.join(map(str, *change.items()))}": spelling(**change)
        for change in choices(TemplatePrompt)
    },
    **{
        f"targets-{kind}": replace(PROCESSOR, targets=part_class(ActionTokens, kind)(FAST, 2000))
        for kind in kinds(ActionTokens)
    },
    "eagle": replace(PROCESSOR, prompts=EagleTurn(EAGLE)),
    "without language": replace(PROCESSOR, prompts=None),
    "held": replace(PROCESSOR, held=True),
    "black": replace(PROCESSOR, black_absent=True),
    "not square": replace(PROCESSOR, pictures=picture_fit("stretched", (SIZE, 12))),
    "two sizes": replace(PROCESSOR, pictures=(FITS[0], FITS[1])),
    "two sizes, black": replace(PROCESSOR, pictures=(FITS[1], FITS[0]), black_absent=True),
    "two sizes in a chat": replace(PROCESSOR, pictures=FITS, prompts=EagleTurn(EAGLE)),
    "shown past": replace(
        PROCESSOR,
        prompts=EagleTurn(EAGLE),
        observed=History((("images", (1, 3)),), shown=True),
    ),
    "without pictures": replace(PROCESSOR, pictures=()),
    **{
        f"past-{padding}": replace(
            PROCESSOR,
            pictures=FITS,
            observed=History((("state", (1, 3)), ("front", (1, 2, 5)), ("wrist", (2,))), padding),
        )
        for padding in get_args(Padding)
    },
}


def budget_of(processor, targets):
    """Rows for such samples."""
    past = bool(processor.observed.pictures)
    first, *more = (
        ImageSlots(*shape, 0 if old else 4, 30 if old or processor.observed.shown else 9, old)
        for old in range(1 + past)
        for shape in processor.image_sizes or [(0, 0)]
    )
    return replace(
        PLAN.layout,
        prefix=800,
        text=700,
        samples=4,
        targets=targets,
        images=first.number,
        image_size=first.shape,
        more=tuple(more),
        image_history=processor.observed.pictures,
        state_history=len(processor.observed.state),
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_a_batch_is_prepared_as_for_acting_option_by_option(option):
    """The options are those of the parts, so a new one is compared too."""
    processor = OPTIONS[option]
    feeds = []
    for feed in FEEDS:
        names = [(number, camera) for number, camera in enumerate(feed.cameras) if camera]
        fits = {camera: processor.fit(number) for number, camera in names if processor.fits}
        ahead = tuple(step - 1 for step in feed.ahead) if processor.held else feed.ahead
        feeds.append(replace(feed, frames=replace(feed.frames, fits=fits), ahead=ahead))
    sources = [plan_source(feed, processor) for feed in feeds]
    targets = 0 if processor.targets is None else 80
    plan = Plan(sources, budget_of(processor, targets), ROWS, window=256)
    for step, batch in enumerate(batches(2, processor, plan, feeds)):
        assert_equal(batch, reference(processor, plan, step, feeds))
        if targets:
            learnt = batch.target_kind[batch.weight > 0]
            assert (learnt == ACTION_TOKENS).any(axis=-1).all()
        if processor.held:
            before = (batch.weight > 0) & ~batch.action_mask[..., 0, 0]
            assert batch.actions[before][:, 0].any(axis=-1).all()
        if processor.black_absent:
            assert (batch.images.max(axis=(-3, -2, -1)) == 0).any()


def test_a_store_with_another_fit_than_the_policys_is_refused_by_name():
    other = replace(PROCESSOR, pictures=picture_fit("bilinear", SIZE))
    with pytest.raises(ValueError, match="'antialiased', but the policy expects 'bilinear'; conve"):
        Loader(FEEDS, other, PLAN)


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_a_frame_store_is_read_like_any_other_frames(recorded, tmp_path, encoding):
    store = build_store(open_dataset(recorded), tmp_path / "s", SIZE, encoding)
    same = Normalizer((0.0,) * 4, (1.0,) * 4), Normalizer((0.0,) * 3, (1.0,) * 3)
    robot = Embodiment("arm", ("wrist", "front"), *same)
    processor = replace(PROCESSOR, embodiments=(robot,))
    feed = Feed(store, 0, (WRIST, FRONT), tuple(range(HORIZON)))
    plan = Plan([plan_source(feed, processor)], PLAN.layout, ROWS, window=256)
    for step, batch in enumerate(batches(2, processor, plan, [feed])):
        for r, row in enumerate(plan.rows(step)):
            for k, draw in enumerate(row):
                rows = store.starts[draw.episode] + draw.frame
                pictures = np.zeros((2, SIZE, SIZE, 3), np.uint8)
                for camera, picture in zip((WRIST, FRONT), pictures, strict=True):
                    store.images(np.array([rows]), camera, [picture])
                np.testing.assert_array_equal(batch.images[r, 2 * k : 2 * k + 2], pictures)
                np.testing.assert_array_equal(batch.state[r, k, :4], store.column(STATE, rows))


def test_past_pictures_straight_from_videos_are_a_stores_each_decoded_once(tmp_path, monkeypatch):
    dataset = open_dataset(VIDEOS)
    cameras = dataset.cameras[:2]
    robot = Embodiment("arm", ("front", "wrist"), Normalizer.identity(3), Normalizer.identity(2))
    history = History((("images", (1, 2, 30)), ("state", (1,))))
    processor = replace(PROCESSOR, embodiments=(robot,), prompts=None, observed=history)
    made, decoded = [], []
    decode = SeekTable.decode
    monkeypatch.setattr(
        SeekTable,
        "decode",
        lambda table, frames: decoded.append((table.path, tuple(frames))) or decode(table, frames),
    )
    for frames in (
        build_store(dataset, tmp_path / "store", SIZE, "raw"),
        open_direct(dataset, SIZE, tmp_path / "cache", exact=True),
    ):
        decoded.clear()
        feed = Feed(frames, 0, cameras, tuple(range(HORIZON)))
        plan = Plan([plan_source(feed, processor)], budget_of(processor, 0), ROWS, window=256)
        made.append(batches(1, processor, plan, [feed], threads=0)[0])
    assert_equal(*made)
    (earlier,) = made[0].more_images
    assert earlier.any()
    each = [(path, frame) for path, frames in decoded for frame in frames]
    assert each
    assert len(set(each)) == len(each)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_shares_put_together_are_the_batch_of_one(hosts):
    shares = [batches(host_index=h, host_count=hosts) for h in range(hosts)]
    for step in range(STEPS):
        together = jax.tree.map(lambda *x: np.concatenate(x), *(share[step] for share in shares))
        assert_equal(together, expected()[step])


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": 3}, pytest.param({"workers": 2}, marks=pytest.mark.slow)],
)
def test_batches_do_not_depend_on_workers_or_threads(options):
    for actual, batch in zip(batches(**options), expected(), strict=True):
        assert_equal(actual, batch)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"host_count": 1, "workers": 2}, {"host_count": 4}])
def test_weighted_batches_depend_on_neither_hosts_nor_workers_nor_where_they_begin(options):
    rng = np.random.default_rng(0)
    weights = [rng.exponential(size=feed.frames.lengths.sum()) for feed in FEEDS]
    weights[0][:7] = 0

    def planned():
        sources = [
            plan_source(feed, PROCESSOR, weights=own, name=feed.frames.name)
            for feed, own in zip(FEEDS, weights, strict=True)
        ]
        return Plan(sources, PLAN.layout, ROWS, window=256)

    whole = batches(threads=0, plan=planned())
    shares = [
        batches(2, plan=planned(), start_step=3, host_index=h, **options)
        for h in range(options["host_count"])
    ]
    for step in range(2):
        together = jax.tree.map(lambda *x: np.concatenate(x), *(share[step] for share in shares))
        assert_equal(together, whole[3 + step])
    drawn = [draw for step in range(50) for row in planned().rows(step) for draw in row]
    assert {draw.episode for draw in drawn if draw.source == 0} == {1, 2, 3}


@pytest.mark.parametrize("start", [1, 3])
def test_a_start_at_any_step_gives_the_batches_from_there(start):
    later = batches(STEPS - start, plan=make_plan(), start_step=start)
    for actual, batch in zip(later, expected()[start:], strict=True):
        assert_equal(actual, batch)


@pytest.mark.slow
def test_hosts_and_workers_may_change_where_a_run_resumes():
    batches(2, host_index=1, host_count=4, threads=2)
    resumed = make_plan()
    common = {"number": 2, "plan": resumed, "start_step": 2, "host_count": 2}
    shares = [batches(host_index=0, workers=1, **common), batches(host_index=1, **common)]
    for step in range(2):
        together = jax.tree.map(lambda *x: np.concatenate(x), *(share[step] for share in shares))
        assert_equal(together, expected()[2 + step])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"threads": 2}, {"workers": 1}])
def test_batches_that_are_kept_never_change(options):
    with Loader(FEEDS, PROCESSOR, PLAN, **options) as loader:
        kept = [next(loader)[0] for _ in range(STEPS)]
        on_device = [jax.device_put(batch) for batch in kept]
        slices = [batch.images[2:3, 1:] for batch in kept]
        del kept
        for _ in range(40):
            next(loader)
    for step, batch in enumerate(expected()):
        assert_equal(jax.tree.map(np.asarray, on_device[step]), batch)
        np.testing.assert_array_equal(slices[step], batch.images[2:3, 1:])


def test_action_chunks_are_masked_past_the_end_of_the_episode():
    for step, batch in enumerate(expected()):
        for r, row in enumerate(PLAN.rows(step)):
            for k, draw in enumerate(row):
                feed = FEEDS[draw.source]
                last = feed.frames.lengths[draw.episode] - 1
                inside = [draw.frame + ahead <= last for ahead in feed.ahead]
                dims = (2, 5)[draw.source]
                np.testing.assert_array_equal(batch.action_mask[r, k, :, :dims].all(1), inside)
                assert not batch.action_mask[r, k, :, dims:].any()


def test_held_out_episodes_are_never_drawn():
    for step in range(40):
        for row in PLAN.rows(step):
            assert all(draw.episode in (0, 1) for draw in row if draw.source == 1)


def test_info_counts_the_samples_of_each_source_and_the_fill():
    with Loader(FEEDS, PROCESSOR, PLAN, start_step=2) as loader:
        _, info = next(loader)
    drawn = [draw.source for row in PLAN.rows(2) for draw in row]
    assert info.step == 2
    assert info.samples == {"two": drawn.count(0), "one": drawn.count(1)}
    assert info.fill == pytest.approx((expected()[2].prefix_segment > 0).mean())
    assert info.fill == pytest.approx(PLAN.fill([2]).prefix)
    assert 0 < info.decode_seconds < info.cpu_seconds
    assert info.skipped == 0
    facts = info.facts(hosts=2)
    assert facts["samples"] == 2 * len(drawn)
    assert facts["samples/one"] == 2 * drawn.count(1)
    assert facts["fill"] == info.fill
    assert facts["load_decode_seconds"] == info.decode_seconds


def test_states_read_as_text_never_take_more_places_than_planned():
    spelt = spelling()
    planned = plan_source(FEEDS[0], spelt).text
    states = np.random.default_rng(0).normal(scale=1.5, size=(50, 3))
    for task, wordings in enumerate(TWO.prompts):
        for wording, prompt in enumerate(wordings):
            longest = max(len(tokens_of(spelt, prompt, state)) for state in states)
            assert longest <= planned[task, wording]
        assert not planned[task, len(wordings) :].any()


@pytest.mark.parametrize("weights", [None, np.ones(int(TWO.lengths.sum()))])
def test_a_feed_none_of_whose_frames_may_be_drawn_is_refused(weights):
    left_out = FrameFilter(*np.array([[0, 0, int(TWO.lengths[0])]]).T)
    feed = replace(FEEDS[0], frames=RelabelledFrames(TWO, TWO.prompts, {}, 1.0, kept=left_out))
    with pytest.raises(ValueError, match=f"{TWO.name}: .*leave none of its frames to draw"):
        plan_source(feed, PROCESSOR, episodes=[1], weights=weights)


def test_a_run_costs_the_cameras_that_its_episode_has():
    assert plan_source(FEEDS[0], PROCESSOR).images.tolist() == [2, 1, 2, 2]
    assert plan_source(FEEDS[1], PROCESSOR).images.tolist() == [1, 1, 1, 1]


def test_a_fitted_layout_serves_the_loader():
    source = plan_source(FEEDS[0], PROCESSOR)
    images = np.repeat(source.images, source.runs.length)
    text = np.repeat(source.text[source.runs.task].max(axis=1), source.runs.length)
    budget = replace(layout(80, 0, 9, 0, 4, 1), image_size=SIZE, state_dim=6, action_dim=5)
    fitted = fit_layout(images, text, replace(budget, horizon=HORIZON))
    with Loader(FEEDS[:1], PROCESSOR, Plan([source], fitted, 4)) as loader:
        batch, info = next(loader)
    assert batch.prefix_segment.shape == (4, fitted.prefix)
    assert info.fill > 0.7


def test_rows_that_do_not_divide_among_hosts_are_refused():
    with pytest.raises(ValueError, match="8 rows a step do not divide among 3 hosts"):
        Loader(FEEDS, PROCESSOR, PLAN, host_count=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": replace(TWO, image_size=16)}, "two: its images have 16 × 16 pixels"),
        ({"cameras": ("wrist", "side")}, r"the feed asks for \['wrist', 'side'\]"),
        ({"cameras": ("wrist",)}, r"for each camera of embodiment 'both' \(wrist, front\)"),
        ({"actions": ("torque",)}, "has no column torque, only observation.state, action"),
        ({"ahead": (0, 1, 2)}, "give 4 numbers"),
    ],
)
def test_a_feed_that_does_not_fit_the_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Loader([replace(FEEDS[0], **changes), FEEDS[1]], PROCESSOR, PLAN)


def test_feeds_must_be_those_of_the_plan_and_told_apart_by_name():
    with pytest.raises(ValueError, match="The plan has 2 sources, but there are 1 feeds"):
        Loader(FEEDS[:1], PROCESSOR, PLAN)
    sources = [replace(source, name="same") for source in PLAN.sources]
    with pytest.raises(ValueError, match="Two sources are called 'same'"):
        Loader(FEEDS, PROCESSOR, Plan(sources, PLAN.layout, ROWS))
