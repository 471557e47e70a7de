"""What every model eats: rows in which samples of different length lie end to end.

A `PackedBatch` has static shapes whatever the samples, so one compiled program serves every batch,
and a sample pays only for the cameras and the tokens it has. `pack` is the one place that lays
samples out; the loader, the policy and the tests all use it. The unpacked form is the same type
with one sample a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)

SUBTASK, ACTION_TOKENS = 1, 2
"""What a place of `PackedBatch.targets` holds; 0 is padding."""


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
    episode's end. `image_at`: for each image the number of text tokens before it; empty, the images
    come before all text. `subtask` and `action_tokens` are for the language model to predict, each
    from its own first token on. `cameras`: which of its embodiment's cameras each image shows;
    empty, they are the first ones in order.
    """

    images: tuple[UInt8[np.ndarray, "h w 3"], ...]
    text: Int[np.ndarray, "t"]
    state: Float[np.ndarray, "s"]
    actions: Float[np.ndarray, "h a"]
    action_mask: Bool[np.ndarray, "h a"]
    embodiment: int = 0
    weight: float = 1.0
    id: int = 0
    image_at: tuple[int, ...] = ()
    subtask: Int[np.ndarray, "n"] = field(default_factory=lambda: np.zeros(0, np.int32))
    action_tokens: Int[np.ndarray, "m"] = field(default_factory=lambda: np.zeros(0, np.int32))
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

    images: UInt8[Array, "r i h w 3"]
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


def pack(rows: Sequence[Sequence[Sample]], layout: Layout) -> PackedBatch:
    """Lays samples end to end into rows (numpy arrays, ready for `device_put`).

    Raises:
      ValueError: a row asks for more samples, images, text tokens or prefix places than the layout
      has, or a sample for more targets, or its `image_at` does not fit its images and text.
    """
    r, lay = len(rows), layout
    size = lay.image_size
    images = np.zeros((r, lay.images, size, size, 3), np.uint8)
    image_camera = np.zeros((r, lay.images), np.int32)
    text = np.zeros((r, lay.text), np.int32)
    source, segment, position = (np.zeros((r, lay.prefix), np.int32) for _ in range(3))
    state = np.zeros((r, lay.samples, lay.state_dim), np.float32)
    actions = np.zeros((r, lay.samples, lay.horizon, lay.action_dim), np.float32)
    action_mask = np.zeros(actions.shape, bool)
    embodiment, sample_id = (np.zeros((r, lay.samples), np.int32) for _ in range(2))
    weight = np.zeros((r, lay.samples), np.float32)
    targets, target_kind = (np.zeros((r, lay.samples, lay.targets), np.int32) for _ in range(2))
    text_base = lay.images * lay.tokens_per_image
    state_base = text_base + lay.text
    for i, row in enumerate(rows):
        _check_row(row, lay)
        image_slot = place = text_place = 0
        for j, sample in enumerate(row):
            n_image, n_text = len(sample.images), len(sample.text)
            for k, image in enumerate(sample.images):
                images[i, image_slot + k] = image
            image_camera[i, image_slot : image_slot + n_image] = sample.cameras or range(n_image)
            text[i, text_place : text_place + n_text] = sample.text
            first_token = image_slot * lay.tokens_per_image
            image_tokens = first_token + np.arange(n_image * lay.tokens_per_image)
            text_tokens = text_base + text_place + np.arange(n_text)
            before = np.asarray(sample.image_at or (0,) * n_image, int)
            at = np.repeat(before, lay.tokens_per_image)
            states = np.arange(state_base + j, state_base + j + lay.state_tokens)
            length = lay.prefix_length(n_image, n_text)
            places = slice(place, place + length)
            source[i, places] = np.append(np.insert(text_tokens, at, image_tokens), states)
            segment[i, places] = j + 1
            position[i, places] = np.arange(length)
            state[i, j] = sample.state
            actions[i, j], action_mask[i, j] = sample.actions, sample.action_mask
            embodiment[i, j], weight[i, j] = sample.embodiment, sample.weight
            sample_id[i, j] = np.uint32(sample.id & 0xFFFFFFFF).astype(np.int32)
            n_subtask, n_target = len(sample.subtask), _targets(sample)
            targets[i, j, :n_subtask] = sample.subtask
            targets[i, j, n_subtask:n_target] = sample.action_tokens
            target_kind[i, j, :n_target] = ACTION_TOKENS
            target_kind[i, j, :n_subtask] = SUBTASK
            image_slot, place, text_place = (
                image_slot + n_image,
                place + length,
                text_place + n_text,
            )
    arrays: dict[str, Any] = {
        "images": images,
        "image_camera": image_camera,
        "text": text,
        "prefix_source": source,
        "prefix_segment": segment,
        "prefix_position": position,
        "state": state,
        "actions": actions,
        "action_mask": action_mask,
        "embodiment": embodiment,
        "weight": weight,
        "sample_id": sample_id,
        "targets": targets,
        "target_kind": target_kind,
    }
    return PackedBatch(**arrays)


def _check_row(row: Sequence[Sample], layout: Layout) -> None:
    used = {
        "samples": len(row),
        "images": sum(len(s.images) for s in row),
        "text": sum(len(s.text) for s in row),
        "prefix": sum(layout.prefix_length(len(s.images), len(s.text)) for s in row),
    }
    for name, amount in used.items():
        if amount > getattr(layout, name):
            raise ValueError(
                f"A row needs {amount} {name} places but the layout has {getattr(layout, name)}; "
                f"raise layout.{name} or shorten the prompt."
            )
    for sample in row:
        at, end = list(sample.image_at), len(sample.text)
        if at and (len(at) != len(sample.images) or sorted(at) != at or at[0] < 0 or at[-1] > end):
            raise ValueError(
                f"A sample's image_at is {at}; give for each of its {len(sample.images)} images, "
                f"ascending, how many of its {end} text tokens come before it."
            )
        if _targets(sample) > layout.targets:
            raise ValueError(
                f"A sample has {len(sample.subtask)} subtask tokens and "
                f"{len(sample.action_tokens)} action tokens to predict but the layout has "
                f"{layout.targets} places for both; raise model.targets to {_targets(sample)}."
            )


def _targets(sample: Sample) -> int:
    return len(sample.subtask) + len(sample.action_tokens)
