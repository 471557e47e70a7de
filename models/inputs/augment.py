"""Image augmentation in training: pictures are cropped, rotated, shifted and recoloured inside the
compiled step.

A picture's changes depend on (key, sample id, camera) alone, not on what its sample is packed with;
each camera varies by itself. Crop and rotation are one affine, bilinear warp; brightness, contrast,
saturation and hue are one affine map of colours, with the meanings that torchvision's ColorJitter
gives them. A shift moves whole pixels and repeats the edge (DrQ, Kostrikov et al., arXiv
2004.13649).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt8

from models.inputs.packed_batch import PackedBatch, image_segments

_STREAM = 2**32 - 1
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


@dataclass(frozen=True)
class AugmentConfig:
    """Ranges of image augmentation; the defaults leave images unchanged.

    `crop`: sides of the part that is cut out at random and enlarged again, as a share of the
    image's. `rotation`: largest angle in either direction, in degrees. `brightness`,
    `contrast` and `saturation` are scaled by a factor from 1 − x to 1 + x; `hue` is turned by up to
    x of a full turn in either direction. `shift`: largest move up, down and sideways, as a share of
    the image's height; unlike a crop, it leaves sizes as the policy will see them. Cameras whose
    name contains one of `fixed` are not cropped, rotated or shifted.
    """

    crop: float = 1.0
    rotation: float = 0.0
    shift: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    fixed: tuple[str, ...] = ("wrist",)

    def __post_init__(self) -> None:
        limits = {"rotation": 180, "shift": 1, "hue": 0.5}
        limits |= dict.fromkeys(("brightness", "contrast", "saturation"), 1)
        for name, most in limits.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"augment.{name} is {getattr(self, name)}; give a number from 0 to {most}."
                )
        if not 0 < self.crop <= 1:
            raise ValueError(f"augment.crop is {self.crop}; give a share above 0 and up to 1.")

    @property
    def moves(self) -> bool:
        """True if any picture is warped."""
        return self.crop < 1 or self.rotation > 0

    @property
    def colours(self) -> bool:
        """True if any picture is recoloured."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


def augment(
    batch: PackedBatch,
    key: PRNGKeyArray,
    config: AugmentConfig,
    cameras: Sequence[Sequence[str]],
    tokens: Sequence[int],
) -> PackedBatch:
    """The batch with augmented pictures in its used image slots; everything else, including
    padding, is unchanged.

    Args:
      key: the step's key, for all samples.
      cameras: names of the cameras of every embodiment.
      tokens: prefix places that a picture of each size fills.
    """
    if not (config.moves or config.shift or config.colours):
        return batch
    owner = image_segments(batch, tokens)
    sample = jnp.maximum(owner - 1, 0)
    ids, robots = (
        jnp.take_along_axis(x, sample, axis=1) for x in (batch.sample_id, batch.embodiment)
    )
    movable = jnp.asarray(_movable(config, cameras))[robots, batch.image_camera]
    key = jax.random.fold_in(key, _STREAM)

    def one(image: Array, id: Array, camera: Array, movable: Array, used: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, id), camera)
        return jnp.where(used, augment_image(image, own, config, movable), image)

    arrays, first = [], 0
    for array in (batch.images, *batch.more_images):
        end = first + array.shape[1]
        own = (x[:, first:end] for x in (ids, batch.image_camera, movable, owner > 0))
        arrays.append(jax.vmap(jax.vmap(one))(array, *own))
        first = end
    return replace(batch, images=arrays[0], more_images=tuple(arrays[1:]))


def augment_image(
    image: UInt8[Array, "h w 3"],
    key: PRNGKeyArray,
    config: AugmentConfig,
    movable: Bool[Array, ""] | bool = True,
) -> UInt8[Array, "h w 3"]:
    """One picture, augmented at random from `key`; if it is not `movable`, only its colours
    change."""
    warp_key, colour_key = jax.random.split(key)
    pixels = image.astype(jnp.float32)
    if config.shift:
        image = _shifted(image, jax.random.fold_in(warp_key, 1), config, movable)
        pixels = image.astype(jnp.float32)
    if config.moves:
        pixels = _warp(image, warp_key, config, movable)
    if config.colours:
        pixels = _recolour(pixels, colour_key, config)
    return jnp.clip(jnp.round(pixels), 0, 255).astype(jnp.uint8)


def _shifted(
    image: UInt8[Array, "h w 3"], key: PRNGKeyArray, config: AugmentConfig, movable: Any
) -> UInt8[Array, "h w 3"]:
    most = round(config.shift * image.shape[0])
    move = jax.random.randint(key, (2,), -most, most + 1) * movable
    padded = jnp.pad(image, ((most, most), (most, most), (0, 0)), mode="edge")
    return jax.lax.dynamic_slice(padded, (*(most + move), 0), image.shape)


def _warp(
    image: UInt8[Array, "h w 3"], key: PRNGKeyArray, config: AugmentConfig, movable: Any
) -> Float[Array, "h w 3"]:
    """Reads every pixel from where the inverse of crop and rotation puts it; beyond the edge, it
    repeats the edge."""
    high, wide = image.shape[:2]
    centre, middle = (high - 1) / 2, (wide - 1) / 2
    y_shift, x_shift, turn = jax.random.uniform(key, (3,), minval=-1, maxval=1) * movable
    scale = jnp.where(movable, config.crop, 1.0)
    angle = turn * np.deg2rad(config.rotation)
    room = (1 - config.crop) / 2
    across, down = jnp.arange(wide) - middle, jnp.arange(high)[:, None] - centre
    y = scale * (jnp.cos(angle) * down + jnp.sin(angle) * across) + y_shift * (room * high) + centre
    x = scale * (jnp.cos(angle) * across - jnp.sin(angle) * down) + x_shift * (room * wide) + middle
    y, x = jnp.clip(y, 0, high - 1), jnp.clip(x, 0, wide - 1)
    top, left = (jnp.floor(z).astype(jnp.int32) for z in (y, x))
    below, right = jnp.minimum(top + 1, high - 1), jnp.minimum(left + 1, wide - 1)
    v, u = (y - top)[..., None], (x - left)[..., None]
    upper = image[top, left] * (1 - u) + image[top, right] * u
    lower = image[below, left] * (1 - u) + image[below, right] * u
    return upper * (1 - v) + lower * v


def _recolour(
    pixels: Float[Array, "h w 3"], key: PRNGKeyArray, config: AugmentConfig
) -> Float[Array, "h w 3"]:
    """Brightness, contrast about the mean grey, saturation about each pixel's grey, then hue as a
    turn of chroma in YIQ: all affine, so one matrix and one offset."""
    spread = jnp.array([config.brightness, config.contrast, config.saturation, config.hue])
    drawn = jax.random.uniform(key, (4,), minval=-1, maxval=1) * spread
    brightness, contrast, saturation = 1 + drawn[:3]
    grey = (pixels.mean((0, 1)) * _TO_YIQ[0]).sum() * brightness
    cos, sin = jnp.cos(2 * jnp.pi * drawn[3]), jnp.sin(2 * jnp.pi * drawn[3])
    chroma = saturation * jnp.array([[cos, -sin], [sin, cos]])
    turn = jnp.eye(3).at[1:, 1:].set(chroma)
    matrix = brightness * contrast * (np.linalg.inv(_TO_YIQ) @ turn @ _TO_YIQ)
    return (pixels[..., None, :] * matrix).sum(-1) + (1 - contrast) * grey


def _movable(
    config: AugmentConfig, cameras: Sequence[Sequence[str]]
) -> Bool[np.ndarray, "embodiments cameras"]:
    """Mask of the cameras that may be cropped, rotated and shifted."""
    movable = np.zeros((len(cameras), max(1, *map(len, cameras))), bool)
    for robot, names in enumerate(cameras):
        for camera, name in enumerate(names):
            movable[robot, camera] = not any(part in name for part in config.fixed)
    return movable
