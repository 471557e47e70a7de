"""Vision tower: a SigLIP ViT from pictures to tokens of the language model's width.

Architecture as in So400m/14 of PaliGemma (big_vision; arXiv 2303.15343): learned positions,
pre-norm blocks, no pooling, a linear head. Optionally the prompt enters at the stem by FiLM (arXiv
1709.07871), which lets a small model bind a word to pixels in a few hundred steps where attention
alone needs thousands.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Float32, Int, UInt8

from models.attention.attention import attend_fully
from models.files.bounds import LARGEST_DEPTH, check_size, check_sizes
from models.layers.layers import (
    Compute,
    Dense,
    LayerNorm,
    Lora,
    Remat,
    feed_forward,
)
from models.layers.stack import scan_layers, stack_layers
from models.sharding import ROWS, constrain, dividing


@dataclass(frozen=True)
class SiglipConfig:
    """Sizes of the vision tower, and its adapters if any; the defaults are So400m/14.

    `stem`: edge of the smaller patches, each with a ReLU, through which a patch is read; 0: no stem
    (SigLIP). With a stem, the model learns small things of low contrast sooner (arXiv 2106.14881).
    """

    width: int = 1152
    depth: int = 27
    hidden: int = 4304
    heads: int = 16
    patch: int = 14
    stem: int = 0
    lora: Lora | None = None
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_sizes("vision", self, "width", "hidden", "heads", "patch")
        check_size("vision.depth", self.depth, LARGEST_DEPTH)
        if self.width % self.heads:
            raise ValueError(
                f"vision.width is {self.width}, which is not a multiple of vision.heads, "
                f"{self.heads}; change one of them."
            )
        if self.stem < 0 or (self.stem and self.patch % self.stem):
            raise ValueError(
                f"vision.stem is {self.stem}, which does not divide vision.patch, {self.patch}; "
                "change one of them, or use 0 for no stem."
            )

    def tokens(self, image_size: int) -> int:
        """Tokens of one square picture."""
        return (image_size // self.patch) ** 2

    def check_image(self, where: str, image_size: int) -> None:
        """Raises ValueError unless patches divide the `image_size` of the config called `where`."""
        if image_size % self.patch:
            raise ValueError(
                f"{where}.image_size is {image_size}, which is not a multiple of "
                f"{where}.vision.patch, {self.patch}; change one of them."
            )


class Siglip(nnx.Module):
    """Maps uint8 pictures to `out_width`-wide tokens, or to the tower's own if it is None; patches
    in row order. Positions are learnt for pictures of `image_size`; a patch of another size has
    the position of the place where its upper left corner lies in such a picture (NaViT, arXiv
    2307.06304, as SmolVLM has it)."""

    def __init__(
        self,
        config: SiglipConfig,
        image_size: int,
        out_width: int | None,
        *,
        film_width: int | None,
        compute: Compute,
        rngs: nnx.Rngs,
    ):
        dtype = self.dtype = jnp.dtype(compute.dtype)
        self.patch, self.stem, self.remat = config.patch, config.stem, config.remat
        self.unroll = compute.unroll
        width, tokens = config.width, config.tokens(image_size)
        if config.stem:
            pixels = 3 * config.stem**2
            self.small = nnx.Linear(pixels, pixels, dtype=dtype, rngs=rngs)
        self.embed = nnx.Linear(3 * config.patch**2, width, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(
            nnx.initializers.normal(width**-0.5)(rngs.params(), (tokens, width))
        )
        if film_width is not None:
            self.film = nnx.Linear(film_width, 2 * width, dtype=dtype, rngs=rngs)
        self.blocks = stack_layers(lambda r: VitBlock(config, compute, r), config.depth, rngs)
        self.norm = LayerNorm(width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        if out_width is not None:
            self.head = nnx.Linear(width, out_width, dtype=dtype, rngs=rngs)

    @jax.named_scope("vision")
    def __call__(
        self,
        images: UInt8[Array, "b h w 3"] | Float32[Array, "b h w 3"],
        text: Float[Array, "b e"] | None = None,
    ) -> Float[Array, "b n d"]:
        """Tokens [b, n, out_width]; `text` conditions the stem of a tower that was built with FiLM.
        Devices that work on the same rows divide the pictures among themselves."""
        axes = dividing(len(images), *ROWS, "context", "stage")
        images = constrain(images, axes)
        p = self.patch
        pixels = (images.astype(jnp.float32) / 255 * 2 - 1).astype(self.dtype)
        patches = _patches(pixels, p)
        if self.stem:
            small = jax.nn.relu(self.small(_patches(patches.reshape(-1, p, p, 3), self.stem)))
            patches = small.reshape(patches.shape)
        x = self.embed(patches)
        if text is not None:
            scale, shift = jnp.split(self.film(text)[:, None], 2, axis=-1)
            x = jax.nn.relu(x * (1 + scale) + shift)
        position = self.position[...]
        if x.shape[1] != len(position):
            position = position[_places(x.shape[1], len(position))]
        x = x + position.astype(x.dtype)
        if self.unroll:  # else XLA lays pictures innermost (no loop), and transposes every norm's x
            x = with_layout_constraint(x, Layout((0, 1, 2)))
        graph, weights = nnx.split(self.blocks)
        layer = lambda x, w: (nnx.merge(graph, w)(x), None)  # noqa: E731
        x, _ = scan_layers(layer, x, weights, self.remat, axes=axes, unroll=self.unroll)
        x = self.norm(x)
        x = self.head(x) if hasattr(self, "head") else x
        return constrain(x, dividing(len(images), *ROWS))


def _patches(pixels: Float[Array, "b h w 3"], edge: int) -> Float[Array, "b n d"]:
    """Square patches of pictures, in row order, each as one vector."""
    b, h, w, _ = pixels.shape
    cut = pixels.reshape(b, h // edge, edge, w // edge, edge, 3).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(b, -1, 3 * edge * edge)


def _places(tokens: int, table: int) -> Int[np.ndarray, " n"]:
    """The row of a table of positions for each patch of a square picture."""
    side, known = math.isqrt(tokens), math.isqrt(table)
    at = np.arange(side) * known // side
    return (at[:, None] * known + at).reshape(-1)


class VitBlock(nnx.Module):
    """Pre-norm ViT block: full self-attention, then a GELU MLP."""

    def __init__(self, config: SiglipConfig, compute: Compute, rngs: nnx.Rngs):
        width, heads = config.width, (config.heads, config.width // config.heads)
        dense = partial(Dense, bias=True, compute=compute, rngs=rngs, lora=config.lora)
        norm = partial(LayerNorm, width, epsilon=1e-6, dtype=jnp.dtype(compute.dtype), rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.chunk = compute.chunk
        self.q, self.k, self.v = dense(width, heads), dense(width, heads), dense(width, heads)
        self.out = dense(heads, width)
        self.up, self.down = dense(width, config.hidden), dense(config.hidden, width)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        y = self.norm1(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        axes = dividing(len(x), *ROWS, "context", "stage")
        x = x + self.out(attend_fully(q, k, v, axes))
        return x + feed_forward(self.up, self.down, self.norm2(x), self.chunk)
