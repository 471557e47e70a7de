"""Input of every model: rows in which samples of different length lie end to end.

A `PackedBatch` has static shapes whatever the samples, so one compiled program serves every batch,
and a sample pays only for the cameras and the tokens it has. `lay_out` alone decides where samples
stand: the loader fills its arrays by whole columns, and `pack` sample by sample. The unpacked form
is the same type with one sample a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int64, Shaped, UInt8

from models.files import html
from models.sharding import ROWS, constrain

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)

SUBTASK, ACTION_TOKENS = 1, 2
"""Kinds of place in `PackedBatch.targets`; 0 is padding."""


@dataclass(frozen=True)
class Layout:
    """Static sizes of a packed row, fixed by the model and by the row's budgets.

    A row holds up to `samples` samples with up to `images` images, `text` text tokens and `prefix`
    prefix places in all. An image fills `tokens_per_image` places, a state `state_tokens` (0 or 1).
    `targets`: places of each sample for the tokens that the language model is to predict.
    """

    prefix: int
    images: int
    samples: int
    text: int
    image_size: int
    tokens_per_image: int
    state_tokens: int
    state_dim: int
    horizon: int
    action_dim: int
    targets: int = 0

    def prefix_length(self, images: IntOrArray, text: IntOrArray) -> IntOrArray:
        """Prefix places taken by a sample with that many images and text tokens."""
        return images * self.tokens_per_image + text + self.state_tokens


@dataclass(frozen=True)
class Sample:
    """One observation with the action chunk that followed it, ready to be laid into a row (numpy).

    `id` names the draw: every random number used for this sample derives from it, so they do not
    depend on what else is in the batch. `action_mask` is false for padded dims and steps past the
    episode's end. `image_at`: for each image, the number of text tokens before it; if empty, the
    images come before all text. `subtask` and `action_tokens` are for the language model to
    predict, each from its own first token on. `cameras`: which of its embodiment's cameras each
    image shows; if empty, the first ones in order. Images are in grey levels, 0 to 255.
    """

    images: tuple[UInt8[np.ndarray, "height width 3"] | Float32[np.ndarray, "height width 3"], ...]
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """R rows of up to K samples; sample j of a row has segment id j + 1, padding has 0.

    `prefix_source` says what stands at each prefix place: `i * N + n` is token n of image slot i,
    then come the T text tokens, then one place for the state of each slot. Positions restart with
    every sample. `image_camera` is the number of an image's camera in its embodiment. `targets`
    continue a sample's prefix: its subtask, then its action tokens, as `target_kind` says.
    """

    images: UInt8[Array, "r i height width 3"] | Float32[Array, "r i height width 3"]
    image_camera: Int[Array, "r i"]
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
    """Positions of n samples: their row and slot, and the first of the row's image slots that they
    fill."""

    row: Int64[np.ndarray, " n"]
    slot: Int64[np.ndarray, " n"]
    image: Int64[np.ndarray, " n"]


def lay_out(
    samples: Int[np.ndarray, " r"],
    images: Int[np.ndarray, " n"],
    text: Sequence[Int[np.ndarray, " _t"]],
    layout: Layout,
    *,
    image_at: Int[np.ndarray, "n m"] | None = None,
    pictures: Shaped[np.ndarray, "r i h w 3"] | None = None,
) -> tuple[dict[str, Any], Places]:
    """A batch's arrays (numpy) by name, with text and prefix filled in, and the positions for the
    rest.

    Weights are 1 where a sample stands; all else is 0.

    Args:
      samples: number of samples in each row; a row holds consecutive ones.
      images: number of images of each sample.
      text: token ids of each sample.
      image_at: as in `Sample`; entries past a sample's last image are ignored.
      pictures: used as the batch's images; only the slots that no sample takes are blackened.

    Raises:
      ValueError: a row asks for more samples, images, text tokens or prefix places than the layout
        has.
    """
    lay, counts = layout, np.asarray(samples, np.int64)
    images, words = np.asarray(images, np.int64), np.array([len(t) for t in text], np.int64)
    lengths = lay.prefix_length(images, words)
    ones = np.ones_like(words)
    before, whole = _in_rows(np.stack([ones, images, words, lengths]), counts)
    slot, first_image, first_word, _ = before
    for name, amounts in zip(("samples", "images", "text", "prefix"), whole, strict=True):
        _check_budget(name, amounts, lay)
    arrays = _blank(len(counts), lay, pictures)
    used = np.arange(lay.prefix) < whole[3, :, None]
    sources = _sources(slot, first_image, images, first_word, words, lay, image_at)
    arrays["prefix_source"][used] = sources
    arrays["prefix_segment"][used] = np.repeat(slot + 1, lengths)
    starts = np.repeat(lengths.cumsum() - lengths, lengths)
    arrays["prefix_position"][used] = np.arange(len(starts)) - starts
    if len(words):
        arrays["text"][np.arange(lay.text) < whole[2, :, None]] = np.concatenate(list(text))
    row = np.repeat(np.arange(len(counts)), counts)
    arrays["weight"][row, slot] = 1
    if pictures is not None:
        pictures[np.arange(lay.images) >= whole[1, :, None]] = 0
    return arrays, Places(row, slot, first_image)


def pack(rows: Sequence[Sequence[Sample]], layout: Layout) -> PackedBatch:
    """Lays samples end to end into rows (numpy arrays, ready for `device_put`).

    Raises:
      ValueError: a row asks for more samples, images, text tokens or prefix places than the layout
        has, or a sample for more targets, or its `image_at` does not fit its images and text.
    """
    samples = [sample for row in rows for sample in row]
    images = np.array([len(sample.images) for sample in samples], np.int64)
    image_at = np.zeros((len(samples), images.max(initial=0)), np.int64)
    for at, sample in zip(image_at, samples, strict=True):
        _check_image_at(sample)
        at[: len(sample.image_at)] = sample.image_at
    counts = np.array([len(row) for row in rows], np.int64)
    text = [sample.text for sample in samples]
    arrays, places = lay_out(counts, images, text, layout, image_at=image_at)
    kinds = [image.dtype for sample in samples for image in sample.images]
    arrays["images"] = arrays["images"].astype(np.result_type(np.uint8, *kinds))
    for sample, i, j, first in zip(samples, *(p.tolist() for p in places), strict=True):
        taken = slice(first, first + len(sample.images))
        for slot, image in enumerate(sample.images, first):
            arrays["images"][i, slot] = image
        arrays["image_camera"][i, taken] = sample.cameras or range(len(sample.images))
        for name in ("state", "actions", "action_mask", "embodiment", "weight"):
            arrays[name][i, j] = getattr(sample, name)
        arrays["sample_id"][i, j] = np.uint32(sample.id & 0xFFFFFFFF).astype(np.int32)
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
      images: tokens of every image slot, b = r · i.
      more: tokens of text and, where the model reads it there, of the state.
    """
    rows = batch.images.shape[0]
    every = jnp.concatenate([images.reshape(rows, -1, images.shape[-1]), *more], axis=1)
    x = jnp.take_along_axis(every, batch.prefix_source[..., None], axis=1)
    return constrain(x, ROWS, "context")


def image_segments(batch: PackedBatch, tokens_per_image: int) -> Int[Array, "r i"]:
    """Segment of the sample that each image slot belongs to: j + 1 for slot j, 0 if it is empty."""
    rows, slots = batch.images.shape[:2]
    owner = jnp.zeros((rows, slots + 1), jnp.int32)
    at = jnp.minimum(batch.prefix_source // tokens_per_image, slots)
    return owner.at[jnp.arange(rows)[:, None], at].max(batch.prefix_segment)[:, :slots]


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


def _blank(rows: int, lay: Layout, pictures: np.ndarray | None) -> dict[str, Any]:
    places, slots, size = (rows, lay.prefix), (rows, lay.samples), lay.image_size
    chunks = (*slots, lay.horizon, lay.action_dim)
    if pictures is None:
        pictures = np.zeros((rows, lay.images, size, size, 3), np.uint8)
    return {
        "images": pictures,
        "image_camera": np.zeros((rows, lay.images), np.int32),
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
    first_image: Int64[np.ndarray, " n"],
    images: Int64[np.ndarray, " n"],
    first_word: Int64[np.ndarray, " n"],
    words: Int64[np.ndarray, " n"],
    lay: Layout,
    image_at: Int[np.ndarray, "n m"] | None,
) -> Int64[np.ndarray, " p"]:
    """Contents of all samples' prefix places: pieces that each count up from their start.

    A sample's pieces are text and image in turn, then the rest of its text, then its state.
    """
    number = np.arange(images.max(initial=0))
    has = number < images[:, None]
    cuts = np.zeros((len(slot), len(number) + 2), np.int64)
    if image_at is not None:
        np.maximum.accumulate(np.where(has, image_at, 0), axis=1, out=cuts[:, 1:-1])
    cuts[:, -1] = words
    text_base = lay.images * lay.tokens_per_image
    starts = np.empty((len(slot), 2 * len(number) + 2), np.int64)
    lengths = np.empty_like(starts)
    starts[:, :-1:2] = text_base + first_word[:, None] + cuts[:, :-1]
    lengths[:, :-1:2] = cuts[:, 1:] - cuts[:, :-1]
    starts[:, 1:-1:2] = (first_image[:, None] + number) * lay.tokens_per_image
    lengths[:, 1:-1:2] = has * lay.tokens_per_image
    starts[:, -1] = text_base + lay.text + slot
    lengths[:, -1] = lay.state_tokens
    ends = lengths.cumsum().reshape(lengths.shape)
    return np.repeat(starts - ends + lengths, lengths.ravel()) + np.arange(lengths.sum())


def _check_budget(name: str, amounts: Int64[np.ndarray, " r"], layout: Layout) -> None:
    amount, limit = amounts.max(initial=0), getattr(layout, name)
    if amount > limit:
        raise ValueError(
            f"A row needs {amount} {name} places but the layout has {limit}; "
            f"raise layout.{name} or shorten the prompt."
        )


def _check_image_at(sample: Sample) -> None:
    at, end = list(sample.image_at), len(sample.text)
    if at and (len(at) != len(sample.images) or sorted(at) != at or at[0] < 0 or at[-1] > end):
        raise ValueError(
            f"A sample's image_at is {at}; give for each of its {len(sample.images)} images, "
            f"ascending, how many of its {end} text tokens come before it."
        )
