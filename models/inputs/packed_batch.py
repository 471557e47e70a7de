"""Input of every model: rows in which samples of different length lie end to end.

A `PackedBatch` has static shapes whatever the samples, so one compiled program serves every batch,
and a sample pays only for the cameras and the tokens it has. `lay_out` alone decides where samples
stand: the loader fills its arrays by whole columns, and `pack` sample by sample. The unpacked form
is the same type with one sample a row. `weight` is that of a sample's loss; a mixture's weights
decide how often a sample is drawn, and are not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int64, Shaped, UInt8

from models.files import html
from models.inputs.pictures import Size, shape_of
from models.sharding import ROWS, constrain

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)

SUBTASK, ACTION_TOKENS = 1, 2
"""Kinds of place in `PackedBatch.targets`; 0 is padding."""

_SPAN, _MOST_GROUPS = 512, 5
"""Base in which a number counts the images of several groups, and how many groups it can hold."""


@dataclass(frozen=True)
class ImageSlots:
    """A group of a row's image slots: `number` of them, each for a picture of `height` × `width`
    pixels that fills `tokens` prefix places. A group of `past` pictures fills none."""

    height: int
    width: int
    tokens: int
    number: int = 0
    past: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a picture."""
        return self.height, self.width


@dataclass(frozen=True)
class Layout:
    """Static sizes of a packed row, fixed by the model and by the row's budgets.

    A row holds up to `samples` samples with up to `images` images, `text` text tokens and
    `prefix` prefix places in all. An image fills `tokens_per_image` places, a state `state_tokens`
    (0 or 1). `targets`: places of each sample for the tokens that the language model is to predict.
    `more`: further groups of image slots, for pictures of another size or of the past.
    `image_history`, `state_history`: past pictures of a camera, and past states, that a sample
    reads at most.

    Numbers of images, as arguments, count all groups in one number, see `count_code`.
    """

    prefix: int
    images: int
    samples: int
    text: int
    image_size: Size
    tokens_per_image: int
    state_tokens: int
    state_dim: int
    horizon: int
    action_dim: int
    targets: int = 0
    more: tuple[ImageSlots, ...] = field(default=(), repr=False)
    image_history: int = field(default=0, repr=False)
    state_history: int = field(default=0, repr=False)

    @cached_property
    def groups(self) -> tuple[ImageSlots, ...]:
        """All groups of image slots, in the order of `PackedBatch.image_camera`."""
        first = ImageSlots(*shape_of(self.image_size), self.tokens_per_image, self.images)
        return first, *self.more

    @cached_property
    def slots(self) -> Int64[np.ndarray, " groups"]:
        """Image slots of a row, group by group."""
        return np.array([group.number for group in self.groups])

    @cached_property
    def slot_tokens(self) -> Int64[np.ndarray, " groups"]:
        """Prefix places that an image fills, group by group."""
        return np.array([group.tokens for group in self.groups])

    @property
    def image_places(self) -> int:
        """Prefix tokens of all image slots, which `prefix_source` numbers before those of text."""
        return int(self.slots @ self.slot_tokens)

    def prefix_length(self, images: IntOrArray, text: IntOrArray) -> IntOrArray:
        """Prefix places taken by a sample with that many images and text tokens."""
        if self.more:
            counts = counts_of(images, len(self.groups))
            return counts @ self.slot_tokens + text + self.state_tokens
        return images * self.tokens_per_image + text + self.state_tokens

    def group_of(self, shape: tuple[int, ...], past: bool = False) -> int:
        """The number of the group of slots for pictures of a height and width.

        Raises:
          ValueError: the model reads no such picture.
        """
        for number, group in enumerate(self.groups):
            if group.shape == shape and group.past == past:
                return number
        when, most = (" of the past", self.more) if past else ("", self.groups)
        sizes = " or ".join(f"{g.height} × {g.width}" for g in most if g.past == past)
        raise ValueError(
            f"A picture{when} has {shape[0]} × {shape[1]} pixels, but the model reads "
            f"{sizes or 'none'}; fit pictures to the sizes in `ModelConfig.pictures`."
        )

    def holds(self, images: IntOrArray) -> Any:
        """True, for a number or each of an array, if a row has slots for that many images."""
        if self.more:
            return (counts_of(images, len(self.groups)) <= self.slots).all(-1)
        return images <= self.images


def count_code(counts: Int[np.ndarray, "*n groups"]) -> Int64[np.ndarray, "*n"]:
    """Images of each group of slots as one number, the plain number where there is one group. The
    sum of two such numbers counts the images of both.

    Raises:
      ValueError: there are too many groups, or too many images in one of several.
    """
    counts = np.asarray(counts, np.int64)
    groups = counts.shape[-1]
    if groups > 1 and (groups > _MOST_GROUPS or counts.max(initial=0) >= _SPAN // 2):
        raise ValueError(
            f"There are {groups} groups of image slots with up to {counts.max()} images each; a "
            f"row has at most {_MOST_GROUPS} groups of fewer than {_SPAN // 2}."
        )
    return counts @ _SPAN ** np.arange(groups)


def counts_of(code: IntOrArray, groups: int) -> Int64[np.ndarray, "*n groups"]:
    """The inverse of `count_code`."""
    counts = np.asarray(code, np.int64)[..., None] // _SPAN ** np.arange(groups)
    counts[..., :-1] %= _SPAN
    return counts


@dataclass(frozen=True)
class Sample:
    """One observation with the action chunk that followed it, ready to be laid into a row (numpy).

    `id` names the draw: every random number used for this sample derives from it, so they do not
    depend on what else is in the batch. `weight`: of its loss, 0 if it could not be read (a
    mixture's weights decide how often it is drawn). `action_mask` is false for padded dims and
    steps past the episode's end. `image_at`: for each image, the number of text tokens before it;
    if empty, the images come before all text. `subtask` and `action_tokens` are for the language
    model to predict, each from its own first token on. `cameras`: which of its embodiment's cameras
    each image shows; if empty, the first ones in order. Images are in grey levels, 0 to 255.
    `past`: for each image, the camera's earlier ones, the newest first; None where there is none.
    `past_state` likewise.
    """

    images: tuple[UInt8[np.ndarray, "_h _w 3"] | Float32[np.ndarray, "_h _w 3"], ...]
    text: Int[np.ndarray, " t"]
    state: Float[np.ndarray, " s"]
    actions: Float[np.ndarray, "h a"]
    action_mask: Bool[np.ndarray, "h a"]
    embodiment: int = 0
    weight: float = 1.0
    id: int = 0
    image_at: tuple[int, ...] = ()
    subtask: Int[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, np.int32))
    action_tokens: Int[np.ndarray, " m"] = field(default_factory=lambda: np.zeros(0, np.int32))
    cameras: tuple[int, ...] = ()
    past: tuple[tuple[Shaped[np.ndarray, "_h _w 3"] | None, ...], ...] = ()
    past_state: tuple[Float[np.ndarray, " s"] | None, ...] = ()


def most_images(samples: Sequence[Sample], layout: Layout) -> int:
    """The number of images, at least one, that a slot needs for any of the samples, with room for
    all the past that the model reads; `layout` gives the groups."""
    groups = layout.groups
    counts = np.zeros(len(groups), np.int64)
    for sample in samples:
        own = [layout.group_of(image.shape[:2]) for image in sample.images]
        counts = np.maximum(counts, np.bincount(own, minlength=len(groups)))
    counts[0] = max(counts[0], bool(groups[0].height))
    for number, group in enumerate(groups):
        if group.past:
            counts[number] = counts[layout.group_of(group.shape)] * layout.image_history
    return int(count_code(counts))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """R rows of up to K samples; sample j of a row has segment id j + 1, padding has 0.

    `prefix_source` says what stands at each prefix place: `i * N + n` is token n of image slot i,
    then come the T text tokens, then one place for the state of each slot. Positions restart with
    every sample. `image_camera` is the number of an image's camera in its embodiment. `targets`
    continue a sample's prefix: its subtask, then its action tokens, as `target_kind` says.

    `more_images` has an array for each further group of slots (`Layout.more`), whose slots continue
    the numbers of the first's. For a model that reads the past: `image_past` gives, for each image,
    the slots of the same camera's earlier pictures, the newest first, -1 where there is none;
    `image_age` is an image's place in that list of a present one, from 1 on, and 0 for present
    ones. `past_state` and `past_state_mask` give the earlier states, the newest first.
    """

    images: UInt8[Array, "r i height width 3"] | Float32[Array, "r i height width 3"]
    image_camera: Int[Array, "r all_i"]
    text: Int[Array, "r t"]
    prefix_source: Int[Array, "r p"]
    prefix_segment: Int[Array, "r p"]
    prefix_position: Int[Array, "r p"]
    state: Float[Array, "r k s"]
    actions: Float[Array, "r k h a"]
    action_mask: Bool[Array, "r k h a"]
    embodiment: Int[Array, "r k"]
    weight: Float[Array, "r k"]
    sample_id: Int[Array, "r k"]
    targets: Int[Array, "r k l"]
    target_kind: Int[Array, "r k l"]
    more_images: tuple[UInt8[Array, "r _i _h _w 3"] | Float32[Array, "r _i _h _w 3"], ...] = ()
    image_past: Int[Array, "r all_i t"] | None = None
    image_age: Int[Array, "r all_i"] | None = None
    past_state: Float[Array, "r k p s"] | None = None
    past_state_mask: Bool[Array, "r k p"] | None = None

    def __repr__(self) -> str:
        arrays = (f"{name}={_spelt(x)}" for name, x in _members(self))
        return f"PackedBatch({', '.join(arrays)})"

    def _repr_html_(self) -> str:
        rows, facts = [(name, _spelt(x)) for name, x in _members(self)], {}
        if _is_held(self.weight) and _is_held(self.prefix_segment):
            taken, segment = np.asarray(self.weight) > 0, np.asarray(self.prefix_segment)
            facts = {
                "rows": f"{segment.shape[0]} of {segment.shape[1]} prefix places",
                "samples": f"{taken.sum()} in {taken.size} slots",
                "prefix": f"{(segment > 0).mean():.1%} filled",
            }
        return html.card("PackedBatch", facts, html.table(("array", "dtype and shape"), rows))


class Places(NamedTuple):
    """Positions of n samples: their row and slot, and the image slots of up to m images; -1 past a
    sample's last one."""

    row: Int64[np.ndarray, " n"]
    slot: Int64[np.ndarray, " n"]
    image: Int64[np.ndarray, "n m"]


def lay_out(
    samples: Int[np.ndarray, " r"],
    images: Int[np.ndarray, " n"],
    text: Sequence[Int[np.ndarray, " _t"]],
    layout: Layout,
    *,
    image_at: Int[np.ndarray, "n m"] | None = None,
    group: Int[np.ndarray, "n m"] | None = None,
    pictures: Sequence[Shaped[np.ndarray, "r _i _h _w 3"]] | None = None,
) -> tuple[dict[str, Any], Places]:
    """A batch's arrays (numpy) by name, with text and prefix filled in, and the positions for the
    rest.

    Weights are 1 where a sample stands; all else is 0.

    Args:
      samples: number of samples in each row; a row holds consecutive ones.
      images: number of images of each sample, past ones included.
      text: token ids of each sample.
      image_at: as in `Sample`; entries past a sample's last image are ignored.
      group: the group of slots that each image belongs to; the first, if None.
      pictures: used as the batch's images, an array for each group; only the slots that no sample
        takes are blackened.

    Raises:
      ValueError: a row asks for more samples, images, text tokens or prefix places than the layout
        has.
    """
    lay, counts = layout, np.asarray(samples, np.int64)
    images, words = np.asarray(images, np.int64), np.array([len(t) for t in text], np.int64)
    number, groups = np.arange(images.max(initial=0)), lay.groups
    has = number < images[:, None]
    if group is None:
        group = np.zeros(has.shape, np.int64)
    if lay.more:
        of = [has & (group == which) for which in range(len(groups))]
        by_group, ranks = np.stack([x.sum(axis=1) for x in of]), [x.cumsum(axis=1) - 1 for x in of]
    else:
        of, by_group, ranks = [has], images[None], [number]
    lengths = lay.slot_tokens @ by_group + words + lay.state_tokens
    ones = np.ones_like(words)
    before, whole = _in_rows(np.stack([ones, words, lengths, *by_group]), counts)
    slot, first_word = before[:2]
    _check_budget("samples", whole[0], lay.samples)
    places, tokens, starts = np.full(has.shape, -1), np.zeros_like(group), np.zeros_like(group)
    slots = token = 0
    placed = zip(of, ranks, before[3:], whole[3:], groups, strict=True)
    for own, rank, first, amounts, each in placed:
        _check_budget("images", amounts, each.number, each if lay.more else None)
        at = (first[:, None] + rank)[own]
        places[own], starts[own], tokens[own] = slots + at, token + at * each.tokens, each.tokens
        slots, token = slots + each.number, token + each.number * each.tokens
    _check_budget("text", whole[1], lay.text)
    _check_budget("prefix", whole[2], lay.prefix)
    arrays = _blank(len(counts), lay, pictures)
    used = np.arange(lay.prefix) < whole[2, :, None]
    sources = _sources(slot, starts, tokens, first_word, words, lay, image_at)
    arrays["prefix_source"][used] = sources
    arrays["prefix_segment"][used] = np.repeat(slot + 1, lengths)
    begins = np.repeat(lengths.cumsum() - lengths, lengths)
    arrays["prefix_position"][used] = np.arange(len(begins)) - begins
    if len(words):
        arrays["text"][np.arange(lay.text) < whole[1, :, None]] = np.concatenate(list(text))
    row = np.repeat(np.arange(len(counts)), counts)
    arrays["weight"][row, slot] = 1
    if pictures is not None:
        for array, amounts in zip(pictures, whole[3:], strict=True):
            array[np.arange(array.shape[1]) >= amounts[:, None]] = 0
    return arrays, Places(row, slot, places)


def pack(rows: Sequence[Sequence[Sample]], layout: Layout) -> PackedBatch:
    """Lays samples end to end into rows (numpy arrays, ready for `device_put`).

    Raises:
      ValueError: a row asks for more samples, images, text tokens or prefix places than the layout
        has, or a sample for more targets, an image is of no size that the layout has, or a sample's
        `image_at` does not fit its images and text.
    """
    samples = [sample for row in rows for sample in row]
    shown = [_shown(sample, layout) for sample in samples]
    images = np.array([len(pictures) for pictures in shown], np.int64)
    group, image_at = np.zeros((2, len(samples), images.max(initial=0)), np.int64)
    for i, (sample, pictures) in enumerate(zip(samples, shown, strict=True)):
        _check_image_at(sample)
        image_at[i, : len(sample.image_at)] = sample.image_at
        group[i, : len(pictures)] = [picture.group for picture in pictures]
    counts = np.array([len(row) for row in rows], np.int64)
    text = [sample.text for sample in samples]
    arrays, places = lay_out(counts, images, text, layout, image_at=image_at, group=group)
    kinds = {picture.image.dtype for pictures in shown for picture in pictures}
    dtype = np.result_type(np.uint8, *kinds)
    filled = [array.astype(dtype) for array in (arrays["images"], *arrays["more_images"])]
    arrays["images"], arrays["more_images"] = filled[0], tuple(filled[1:])
    firsts = np.cumsum([0, *layout.slots])
    for sample, pictures, i, j, at in zip(
        samples, shown, *(p.tolist() for p in places), strict=True
    ):
        for slot, (image, which, camera, past, age) in zip(at, pictures, strict=False):
            filled[which][i, slot - firsts[which]] = image
            arrays["image_camera"][i, slot] = camera
            if layout.image_history:
                earlier = [at[number] if number >= 0 else -1 for number in past]
                arrays["image_past"][i, slot, : len(past)] = earlier
                arrays["image_age"][i, slot] = age
        for name in ("state", "actions", "action_mask", "embodiment", "weight"):
            arrays[name][i, j] = getattr(sample, name)
        arrays["sample_id"][i, j] = np.uint32(sample.id & 0xFFFFFFFF).astype(np.int32)
        for age, state in enumerate(sample.past_state):
            if state is not None:
                arrays["past_state"][i, j, age], arrays["past_state_mask"][i, j, age] = state, True
        put_targets(arrays, (i, j), sample.subtask, sample.action_tokens)
    return PackedBatch(**arrays)


def put_targets(
    arrays: dict[str, Any],
    place: tuple[int, int],
    subtask: Int[np.ndarray, " n"],
    action_tokens: Int[np.ndarray, " m"],
) -> None:
    """Writes the tokens that the language model is to predict for the sample at (row, slot) into a
    batch's arrays.

    Raises:
      ValueError: they are more than the layout has places for.
    """
    needed, limit = len(subtask) + len(action_tokens), arrays["targets"].shape[-1]
    if needed > limit:
        raise ValueError(
            f"A sample has {len(subtask)} subtask tokens and {len(action_tokens)} action tokens to "
            f"predict but the layout has {limit} places for both; raise model.targets to {needed}."
        )
    targets, kind = arrays["targets"][place], arrays["target_kind"][place]
    targets[: len(subtask)], kind[: len(subtask)] = subtask, SUBTASK
    targets[len(subtask) : needed] = action_tokens
    kind[len(subtask) : needed] = ACTION_TOKENS


@jax.named_scope("embedding")
def prefix_tokens(
    batch: PackedBatch, images: Float[Array, "b n w"], *more: Float[Array, "r _m w"]
) -> Float[Array, "r p w"]:
    """The embedded token that `prefix_source` names at each place of the rows, on the devices that
    share them.

    Args:
      images: tokens of every image slot that fills places, b = r · i.
      more: tokens of text and, where the model reads it there, of the state.
    """
    rows = batch.images.shape[0]
    every = jnp.concatenate([images.reshape(rows, -1, images.shape[-1]), *more], axis=1)
    x = jnp.take_along_axis(every, batch.prefix_source[..., None], axis=1)
    return constrain(x, ROWS, "context")


def image_segments(batch: PackedBatch, tokens: Sequence[int]) -> Int[Array, "r all_i"]:
    """Segment of the sample that the picture in each image slot belongs to, 0 where it is empty.

    Args:
      tokens: prefix places that a picture of each size fills, as in `ModelConfig.pictures`.
    """
    arrays, before, owners = (batch.images, *batch.more_images), 0, []
    for array, each in zip(arrays, tokens, strict=False):
        begins = batch.prefix_source[:, :, None] == before + jnp.arange(array.shape[1]) * each
        owners.append(jnp.where(begins, batch.prefix_segment[:, :, None], 0).max(axis=1))
        before += array.shape[1] * each
    owner = jnp.concatenate(owners, axis=1) if owners[1:] else owners[0]
    if batch.image_past is None:
        return owner
    owner = jnp.pad(owner, ((0, 0), (0, batch.image_camera.shape[1] - owner.shape[1])))
    past = jnp.where(batch.image_past < 0, owner.shape[1], batch.image_past)
    row = jnp.arange(owner.shape[0])[:, None, None]
    return owner.at[row, past].max(owner[:, :, None], mode="drop")


def pictures_by_sample(
    batch: PackedBatch, cameras: int
) -> tuple[Shaped[Array, "r k c t height width 3"], Bool[Array, "r k c t"]]:
    """Pictures of each sample by camera and observation, the oldest first, and which there are, for
    a model whose pictures have one size and fill one place."""
    owner, camera = image_segments(batch, [1]), batch.image_camera
    now = jnp.ones_like(owner, bool) if batch.image_age is None else batch.image_age == 0
    own = owner[:, None] == jnp.arange(1, batch.state.shape[1] + 1)[:, None]
    shows = now[:, None] & (camera[:, None] == jnp.arange(cameras)[:, None])
    found = own[:, :, None] & shows[:, None]
    slot, there = found.argmax(-1)[..., None], found.any(-1)[..., None]
    if batch.image_past is not None:
        past = jax.vmap(lambda past, at: past[at])(batch.image_past, slot[..., 0])[..., ::-1]
        slot = jnp.concatenate([jnp.maximum(past, 0), slot], axis=-1)
        there = jnp.concatenate([there & (past >= 0), there], axis=-1)
    images = jnp.concatenate([batch.images, *batch.more_images], axis=1)
    return jax.vmap(lambda shown, at: shown[at])(images, slot), there


def _members(batch: PackedBatch) -> list[tuple[str, Any]]:
    return [(field.name, getattr(batch, field.name)) for field in fields(batch)]


def _spelt(x: Any) -> str:
    """An array's dtype and shape; the repr of anything else that a tree of this form may hold."""
    known = hasattr(x, "dtype") and hasattr(x, "shape")
    return f"{x.dtype}{list(x.shape)}" if known else repr(x)


def _is_held(x: Any) -> bool:
    """True for an array whose values this process holds."""
    if isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and x.is_fully_addressable)


class _Shown(NamedTuple):
    """A picture of a sample; `past` numbers earlier ones among the sample's pictures."""

    image: Shaped[np.ndarray, "_h _w 3"]
    group: int
    camera: int
    past: tuple[int, ...]
    age: int


def _shown(sample: Sample, lay: Layout) -> list[_Shown]:
    """A sample's present pictures in order, then its past ones, each once."""
    cameras = sample.cameras or range(len(sample.images))
    earlier: list[_Shown] = []
    shown = []
    for number, (image, camera) in enumerate(zip(sample.images, cameras, strict=True)):
        past, seen = [], {id(image): number}
        for picture in sample.past[number] if sample.past else ():
            if picture is None:
                past.append(-1)
                continue
            if id(picture) not in seen:
                seen[id(picture)] = len(sample.images) + len(earlier)
                group, age = lay.group_of(picture.shape[:2], past=True), len(past) + 1
                earlier.append(_Shown(picture, group, camera, (), age))
            past.append(seen[id(picture)])
        shown.append(_Shown(image, lay.group_of(image.shape[:2]), camera, tuple(past), 0))
        for at in set(past) - {number, -1}:
            one = earlier[at - len(sample.images)]
            earlier[at - len(sample.images)] = one._replace(past=tuple(past[one.age :]))
    return shown + earlier


def _blank(rows: int, lay: Layout, pictures: Sequence[np.ndarray] | None) -> dict[str, Any]:
    places, slots, groups = (rows, lay.prefix), (rows, lay.samples), lay.groups
    chunks, images = (*slots, lay.horizon, lay.action_dim), int(lay.slots.sum())
    if pictures is None:
        pictures = [np.zeros((rows, g.number, *g.shape, 3), np.uint8) for g in groups]
    past: dict[str, Any] = {}
    if lay.image_history:
        past["image_past"] = np.full((rows, images, lay.image_history), -1, np.int32)
        past["image_age"] = np.zeros((rows, images), np.int32)
    if lay.state_history:
        past["past_state"] = np.zeros((*slots, lay.state_history, lay.state_dim), np.float32)
        past["past_state_mask"] = np.zeros((*slots, lay.state_history), bool)
    return past | {
        "images": pictures[0],
        "more_images": tuple(pictures[1:]),
        "image_camera": np.zeros((rows, images), np.int32),
        "text": np.zeros((rows, lay.text), np.int32),
        "prefix_source": np.zeros(places, np.int32),
        "prefix_segment": np.zeros(places, np.int32),
        "prefix_position": np.zeros(places, np.int32),
        "state": np.zeros((*slots, lay.state_dim), np.float32),
        "actions": np.zeros(chunks, np.float32),
        "action_mask": np.zeros(chunks, bool),
        "embodiment": np.zeros(slots, np.int32),
        "weight": np.zeros(slots, np.float32),
        "sample_id": np.zeros(slots, np.int32),
        "targets": np.zeros((*slots, lay.targets), np.int32),
        "target_kind": np.zeros((*slots, lay.targets), np.int32),
    }


def _in_rows(
    amounts: Int64[np.ndarray, "c n"], counts: Int64[np.ndarray, " r"]
) -> tuple[Int64[np.ndarray, "c n"], Int64[np.ndarray, "c r"]]:
    """Amount of each kind before each sample in its row, and in each row as a whole."""
    total = np.zeros((len(amounts), amounts.shape[1] + 1), np.int64)
    amounts.cumsum(axis=1, out=total[:, 1:])
    ends = counts.cumsum()
    starts = total[:, ends - counts]
    return total[:, :-1] - np.repeat(starts, counts, axis=1), total[:, ends] - starts


def _sources(
    slot: Int64[np.ndarray, " n"],
    images: Int64[np.ndarray, "n m"],
    tokens: Int64[np.ndarray, "n m"],
    first_word: Int64[np.ndarray, " n"],
    words: Int64[np.ndarray, " n"],
    lay: Layout,
    image_at: Int[np.ndarray, "n m"] | None,
) -> Int64[np.ndarray, " p"]:
    """Contents of all samples' prefix places: pieces that each count up from their start.

    A sample's pieces are text and image in turn, then the rest of its text, then its state. Image
    m begins at the row's image token `images` and has `tokens` of them.
    """
    cuts = np.zeros((len(slot), images.shape[1] + 2), np.int64)
    if image_at is not None:
        np.maximum.accumulate(np.where(tokens > 0, image_at, 0), axis=1, out=cuts[:, 1:-1])
    cuts[:, -1] = words
    starts = np.empty((len(slot), 2 * images.shape[1] + 2), np.int64)
    lengths = np.empty_like(starts)
    starts[:, :-1:2] = lay.image_places + first_word[:, None] + cuts[:, :-1]
    lengths[:, :-1:2] = cuts[:, 1:] - cuts[:, :-1]
    starts[:, 1:-1:2], lengths[:, 1:-1:2] = images, tokens
    starts[:, -1] = lay.image_places + lay.text + slot
    lengths[:, -1] = lay.state_tokens
    ends = lengths.cumsum().reshape(lengths.shape)
    return np.repeat(starts - ends + lengths, lengths.ravel()) + np.arange(lengths.sum())


def _check_budget(
    name: str, amounts: Int64[np.ndarray, " r"], limit: int, of: ImageSlots | None = None
) -> None:
    amount = amounts.max(initial=0)
    if amount > limit:
        size = "" if of is None else f" of {of.height} × {of.width} pixels"
        raise ValueError(
            f"A row needs {amount} {name} places{size} but the layout has {limit}; "
            f"raise layout.{name} or shorten the prompt."
        )


def _check_image_at(sample: Sample) -> None:
    at, end = list(sample.image_at), len(sample.text)
    if at and (len(at) != len(sample.images) or sorted(at) != at or at[0] < 0 or at[-1] > end):
        raise ValueError(
            f"A sample's image_at is {at}; give for each of its {len(sample.images)} images, "
            f"ascending, how many of its {end} text tokens come before it."
        )
