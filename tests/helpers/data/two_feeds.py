"""A mixture for tests: two feeds with different cameras, step widths, columns and transforms, of
which one lacks a camera in one episode."""

from dataclasses import replace
from functools import cache

import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from data.frames import ACTION, STATE, Feed
from data.loader.loader import Loader, plan_source
from data.packing.plan import Plan
from models import Embodiment, Normalizer, PackedBatch
from models.inputs.tokenizer import Tokenizer
from tests.helpers.data.layouts import layout
from tests.helpers.data.memory_frames import MemoryFrames
from tests.helpers.models.processors import word_processor

STEPS, ROWS, HORIZON, SIZE = 5, 8, 4, 8


def halved(state, actions):
    return state / 2, actions - state[:, None, :2]


TWO = MemoryFrames("two", absent=frozenset({(1, "wrist")}))
ONE = MemoryFrames(
    "one",
    lengths=(6, 11, 8),
    cameras=("top",),
    prompts=(("push", "shove it"), ("open the drawer",)),
    state_dim=2,
    action_dim=4,
    tasks=((0, 0, 6, 0), (1, 0, 5, 0), (1, 5, 6, 1), (2, 0, 8, 1)),
)
FEEDS = (
    Feed(TWO, 0, ("wrist", "front"), (0, 1, 2, 3), transform=halved),
    Feed(ONE, 1, (None, "top"), (0, 2, 4, 6), (STATE, "gripper"), ("gripper", ACTION), step=2.0),
)


def _scale(dims):
    return Normalizer(tuple(0.1 * d for d in range(dims)), tuple(1.0 + d for d in range(dims)))


def _processor():
    words = Tokenizer.build([p for f in FEEDS for task in f.frames.prompts for p in task], 300)
    robots = (
        Embodiment("both", ("wrist", "front"), _scale(3), _scale(2)),
        Embodiment("top", ("wrist", "front"), _scale(3), _scale(5)),
    )
    return word_processor(SIZE, 6, 5, HORIZON, "token", words.words, robots)


PROCESSOR = _processor()


def make_plan(processor=PROCESSOR, **options):
    sources = (
        plan_source(FEEDS[0], processor, weight=0.6),
        plan_source(FEEDS[1], processor, episodes=[0, 1], weight=0.4),
    )
    budget = replace(layout(60, 8, 6, 40, 4, 1), image_size=SIZE, state_dim=6, action_dim=5)
    budget = replace(budget, horizon=HORIZON, prefix=90, text=60)
    return Plan(sources, budget, ROWS, window=256, **options)


PLAN = make_plan()


def batches(number=STEPS, processor=PROCESSOR, plan=PLAN, feeds=FEEDS, **options):
    with Loader(feeds, processor, plan, **options) as loader:
        return [next(loader)[0] for _ in range(number)]


@cache
def expected() -> list[PackedBatch]:
    """The batches of the first steps, read only."""
    return batches(threads=0)


def assert_equal(actual, expected):
    for (path, theirs), ours in zip(*map(tree_leaves_with_path, (expected, actual)), strict=True):
        assert ours[1].dtype == theirs.dtype
        np.testing.assert_array_equal(ours[1], theirs, err_msg=keystr(path))
