"""Vision tower of Qwen3-VL (arXiv 2511.21631): a ViT for pictures of any aspect, whose patches join
by fours into tokens; features of inner blocks go to the first layers of the language model.

Positions are a table, interpolated to a picture's grid, and a rotation by row and column. All
pictures of a call have one size. Patches come in blocks of two by two, so that four in a row make a
token, and tokens in row order.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, UInt8

from models.attention.attention import attend_fully
from models.files.bounds import LARGEST_DEPTH, check_size, check_sizes
from models.inputs.packed_batch import PackedBatch
from models.layers.layers import Compute, Dense, LayerNorm, Lora, Remat, feed_forward, turned
from models.layers.stack import layer_of, layers_of, scan_layers, stack_layers
from models.sharding import ROWS, constrain, dividing

MERGE = 2
"""Patches that a token has along each side."""


@dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes of the tower; the defaults are Qwen3-VL-2B's. `table`: side of the table of positions.
    `deep`: blocks after which features are taken for the language model, ascending."""

    width: int = 1024
    depth: int = 24
    hidden: int = 4096
    heads: int = 16
    patch: int = 16
    table: int = 48
    deep: tuple[int, ...] = (5, 11, 17)
    lora: Lora | None = None
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_sizes("vision", self, "width", "hidden", "heads", "patch", "table")
        check_size("vision.depth", self.depth, LARGEST_DEPTH)
        if self.width % (4 * self.heads):
            raise ValueError(
                f"vision.width is {self.width}, which is not a multiple of 4 · vision.heads, "
                f"{4 * self.heads}; change one of them."
            )
        if sorted(set(self.deep)) != list(self.deep) or not all(
            0 <= block < self.depth for block in self.deep
        ):
            raise ValueError(
                f"vision.deep is {list(self.deep)}; give blocks below {self.depth}, ascending."
            )

    @property
    def edge(self) -> int:
        """Pixels that a token has along each side."""
        return self.patch * MERGE

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the tokens of a picture, from its height and width."""
        return shape[0] // self.edge, shape[1] // self.edge


class QwenVision(nnx.Module):
    """Maps pictures to tokens of `out_width`, and to as many for each of the deep features."""

    def __init__(self, config: QwenVisionConfig, out_width: int, compute: Compute, rngs: nnx.Rngs):
        self.config, self.unroll = config, compute.unroll
        dtype = self.dtype = jnp.dtype(compute.dtype)
        self.embed = nnx.Linear(2 * 3 * config.patch**2, config.width, dtype=dtype, rngs=rngs)
        draw = nnx.initializers.normal(config.width**-0.5)
        self.position = nnx.Param(draw(rngs.params(), (config.table**2, config.width)))
        self.blocks = stack_layers(
            lambda r: QwenVisionBlock(config, compute, r), config.depth, rngs
        )
        self.merger = Merger(config.width, True, out_width, dtype, rngs)
        if config.deep:
            self.deep_mergers = stack_layers(
                lambda r: Merger(config.width, False, out_width, dtype, r), len(config.deep), rngs
            )

    @jax.named_scope("vision")
    def __call__(
        self, images: UInt8[Array, "b h w 3"] | Float32[Array, "b h w 3"]
    ) -> tuple[Float[Array, "b n o"], Float[Array, "b n d o"]]:
        """Tokens, and those of the d deep features."""
        axes = dividing(len(images), *ROWS, "context", "stage")
        x = self.embedded(self.patches(constrain(images, axes)))
        high, wide = self.config.grid((images.shape[1], images.shape[2]))
        grid = (MERGE * high, MERGE * wide)
        x = x + self.positions(grid).astype(x.dtype)
        row, column = _patches_of(grid)
        half = self.config.width // self.config.heads // 4
        frequency = 10_000.0 ** -(np.arange(half, dtype=np.float32) / half)
        angles = [n[:, None] * frequency for n in (row, column)]
        angle = jnp.asarray(np.concatenate(angles, axis=1), jnp.float32)[None]
        graph, weights = nnx.split(self.blocks)

        def block(x: Array, w: Any) -> tuple[Array, None]:
            return nnx.merge(graph, w)(x, angle), None

        cuts, deep = (0, *(n + 1 for n in self.config.deep), self.config.depth), []
        for number, (first, last) in enumerate(pairwise(cuts)):
            if first < last:
                part = layers_of(weights, first, last)
                x, _ = scan_layers(block, x, part, self.config.remat, axes=axes, unroll=self.unroll)
            if number < len(self.config.deep):
                merger, each = nnx.split(self.deep_mergers)
                deep.append(nnx.merge(merger, layer_of(each, number))(x))
        tokens = self.merger(x)
        features = jnp.stack(deep, axis=2) if deep else tokens[:, :, None][:, :, :0]
        rows = dividing(len(images), *ROWS)
        return constrain(tokens, rows), constrain(features, rows)

    def patches(
        self, images: UInt8[Array, "b h w 3"] | Float32[Array, "b h w 3"]
    ) -> Float[Array, "b n d"]:
        """Patches in blocks, each as a vector of pixels from −1 to 1."""
        b, h, w, _ = images.shape
        p, m = self.config.patch, MERGE
        pixels = ((images.astype(jnp.float32) / 255 - 0.5) / 0.5).astype(self.dtype)
        cut = pixels.reshape(b, h // (m * p), m, p, w // (m * p), m, p, 3)
        return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(b, -1, 3 * p * p)

    def embedded(self, patches: Float[Array, "b n d"]) -> Float[Array, "b n w"]:
        """Patches of still pictures through a kernel that reads two frames: its halves' sum."""
        kernel: Any = self.embed.kernel
        frames = kernel[...].reshape(2, -1, self.config.width).sum(0).astype(self.dtype)
        bias: Any = self.embed.bias
        return patches @ frames + bias[...].astype(self.dtype)

    def positions(self, grid: tuple[int, int]) -> Float[Array, "n w"]:
        """The table interpolated to a grid of patches, corners on corners."""
        side, table = self.config.table, self.position[...]
        mixed = jnp.zeros((grid[0] * grid[1], table.shape[-1]))
        axes = [np.linspace(0, side - 1, n, dtype=np.float32) for n in grid]
        y, x = (axis[at] for axis, at in zip(axes, _patches_of(grid), strict=True))
        low_y, low_x = y.astype(np.int64), x.astype(np.int64)
        for dy in (0, 1):
            for dx in (0, 1):
                row, column = (np.minimum(n + d, side - 1) for n, d in ((low_y, dy), (low_x, dx)))
                weight = np.abs(1 - dy - (y - low_y)) * np.abs(1 - dx - (x - low_x))
                mixed = mixed + table[row * side + column] * weight[:, None]
        return mixed


class QwenVisionBlock(nnx.Module):
    """Pre-norm ViT block whose queries and keys are rotated; queries, keys and values are one
    projection."""

    def __init__(self, config: QwenVisionConfig, compute: Compute, rngs: nnx.Rngs):
        width, heads = config.width, config.heads
        dense = partial(Dense, bias=True, compute=compute, rngs=rngs, lora=config.lora)
        norm = partial(LayerNorm, width, epsilon=1e-6, dtype=jnp.dtype(compute.dtype), rngs=rngs)
        self.norm1, self.norm2, self.chunk = norm(), norm(), compute.chunk
        self.qkv = dense(width, (3 * heads, width // heads))
        self.out = dense((heads, width // heads), width)
        self.up, self.down = dense(width, config.hidden), dense(config.hidden, width)

    def __call__(
        self, x: Float[Array, "b n d"], angle: Float[Array, "1 n pairs"]
    ) -> Float[Array, "b n d"]:
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=2)
        axes = dividing(len(x), *ROWS, "context", "stage")
        x = x + self.out(attend_fully(turned(q, angle), turned(k, angle), v, axes))
        return x + feed_forward(self.up, self.down, self.norm2(x), self.chunk)


class Merger(nnx.Module):
    """Tokens from four patches each: a norm (of each patch, if `first`, or else of the four joined)
    and an MLP."""

    def __init__(self, width: int, first: bool, out: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.first, joined = first, width * MERGE**2
        self.norm = LayerNorm(width if first else joined, epsilon=1e-6, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(joined, joined, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(joined, out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b n w"]) -> Float[Array, "b m o"]:
        joined = len(x), -1, x.shape[-1] * MERGE**2
        x = self.norm(x).reshape(joined) if self.first else self.norm(x.reshape(joined))
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


def _patches_of(grid: tuple[int, int]) -> Int[np.ndarray, "2 n"]:
    """Row and column of each patch of a picture, in blocks."""
    m, (high, wide) = MERGE, grid
    at = np.indices((high, wide)).reshape(2, high // m, m, wide // m, m)
    return at.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def picture_places(batch: PackedBatch, grids: tuple[tuple[int, int], ...]) -> Int[Array, "r p 3"]:
    """Time, row and column of each place of the rows' prefixes, as M-RoPE counts them (Qwen2-VL,
    arXiv 2409.12191): a word counts one step on all three, a picture as many as its longer side.

    Args:
      grids: rows and columns of the tokens of a picture of each size, in the order of the batch's
        arrays of pictures.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(5)]
    (row, column, inside, last, saved), total = parts, 0
    for array, (high, wide) in zip((batch.images, *batch.more_images), grids, strict=False):
        slots, tokens = array.shape[1], high * wide
        token = np.tile(np.arange(tokens), slots)
        row.append(token // wide)
        column.append(token % wide)
        inside.append(token)
        last.append(total + tokens * np.arange(1, slots + 1) - 1)
        saved.append(np.full(slots, tokens - max(high, wide)))
        total += tokens * slots
    word = np.zeros(1, np.int32)
    tables = [np.concatenate([*each, word]).astype(np.int32) for each in (row, column, inside)]
    at = jnp.minimum(batch.prefix_source, total)
    down, right, within = (jnp.asarray(table)[at] for table in tables)
    segment, position = batch.prefix_segment[:, None], batch.prefix_position[:, None]
    ends = batch.prefix_source[:, None] == np.concatenate(last)[:, None]
    ends = ends & (segment > 0)
    owner = jnp.where(ends, segment, 0).max(-1, keepdims=True)
    behind = jnp.where(ends, position, -1).max(-1, keepdims=True) < position
    gone = jnp.where((owner == segment) & behind, np.concatenate(saved)[:, None], 0).sum(1)
    time = batch.prefix_position - within - gone
    return jnp.stack([time, time + down, time + right], axis=-1)
