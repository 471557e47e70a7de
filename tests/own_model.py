"""A small diffusion policy on vision features alone, as VO-DP: no language, no state.

A vision tower makes tokens of the pictures; a transformer that reads them denoises chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention.attention import attend
from models.flow import flow
from models.layers import layers, stack
from models.layers.functional import Functional
from models.layers.layers import Compute, Dense, feed_forward
from models.layers.siglip import Siglip, SiglipConfig
from models.model import ModelConfig, Stack
from parallel.optimizer import OptimizerConfig
from tools.recipes.presets import RowsConfig, RunConfig

CAMERAS, TOWER = 8, SiglipConfig(width=64, depth=2, hidden=128, heads=4, patch=8)


@dataclass(frozen=True)
class SightConfig(ModelConfig, family="sight"):
    vision: SiglipConfig = TOWER
    width: int = 64
    depth: int = 4
    heads: int = 4
    image_size: int = 48
    state_dim: int = 8
    action_dim: int = 8
    horizon: int = 8
    chunks: int = 3
    euler_steps: int = 10
    compute: Compute = field(default_factory=lambda: Compute(dtype="float32"))

    tokens_per_image = property(lambda self: self.vision.tokens(self.image_size))
    quantizable = r"^blocks/(up|down)/"

    def build(self):
        return Sight(self)

    def stacks(self, layout):
        pictures = layout.images * layout.tokens_per_image
        acting = layout.samples * self.chunks * self.horizon
        tower = Stack(self.vision.depth, self.vision.width, pictures, 0)
        return tower, Stack(self.depth, self.width, acting, 0)


@dataclass(frozen=True)
class Sight:
    config: SightConfig

    groups: ClassVar[Mapping] = {"vision": "vision|camera", "action": "action|time|blocks|position"}
    observing = r"^(vision|camera)(/|$)"
    feature_width = property(lambda self: self.config.width)

    def init(self, key):
        return self._modules.init(key)

    def loss(self, params, batch, key):
        shape = batch.actions.shape[2:]
        time, noise = flow.draw(key, batch.sample_id, self.config.chunks, shape)
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        error = (self.field(params, batch)(noised, time).velocity - target) ** 2
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum(error.mean(2) * weight), jnp.sum(weight)

    def sample_actions(self, params, batch, noise, guidance=None):
        return flow.sample(self.field(params, batch), noise, self.config.euler_steps, guidance)

    def observe(self, params, batch):
        return self._modules.bind(params).observe(batch)

    def field(self, params, batch, observed=None):
        observed = self.observe(params, batch) if observed is None else observed
        return partial(self._modules.bind(params).act, observed=observed)

    @cached_property
    def _modules(self):
        return Functional(partial(Modules, self.config))


class Modules(nnx.Module):
    def __init__(self, config, rngs):
        width, compute, draw = config.width, config.compute, nnx.initializers.normal(0.02)
        tower = partial(Siglip, film_width=None, compute=compute, rngs=rngs)
        self.vision = tower(config.vision, config.image_size, width)
        self.camera = nnx.Param(draw(rngs.params(), (CAMERAS, width)))
        self.position = nnx.Param(draw(rngs.params(), (config.horizon, width)))
        self.action_in = nnx.Linear(config.action_dim, width, rngs=rngs)
        self.time_in = nnx.Linear(width, width, rngs=rngs)
        self.blocks = stack.stack_layers(lambda r: Block(config, r), config.depth, rngs)
        self.action_out = nnx.Linear(width, config.action_dim, rngs=rngs)

    def observe(self, batch):
        rows, slots = batch.images.shape[:2]
        images = self.vision(batch.images.reshape(-1, *batch.images.shape[2:]))
        images = images.reshape(rows, slots, -1, images.shape[-1])
        images = (images + self.camera[batch.image_camera][:, :, None]).astype(images.dtype)
        images = images.reshape(rows, -1, images.shape[-1])
        pictured = batch.prefix_source < images.shape[1]  # pictures first, then text
        at = jnp.where(pictured, batch.prefix_source, 0)
        tokens = jnp.take_along_axis(images, at[..., None], axis=1)
        return tokens, jnp.where(pictured, batch.prefix_segment, 0)

    def act(self, noised, time, observed):
        embedded = jax.nn.swish(self.time_in(layers.sincos_embedding(time, self.position.shape[1])))
        x = self.action_in(noised) + self.position[...] + embedded[..., None, :]
        graph, weights = nnx.split(self.blocks)
        layer = lambda x, weights, *rows: (nnx.merge(graph, weights)(x, *rows), None)  # noqa: E731
        x, _ = stack.scan_layers(layer, x.astype(observed[0].dtype), weights, rows=observed)
        features = x.astype(jnp.float32)
        return flow.Predicted(self.action_out(features), features)


class Block(nnx.Module):
    """A chunk's actions read their sample's pictures, then each other."""

    def __init__(self, config, rngs):
        width, heads = config.width, (config.heads, config.width // config.heads)
        dense = partial(Dense, compute=config.compute, rngs=rngs)
        self.norm1, self.norm2, self.norm3 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(3))
        self.q, self.k, self.v = (dense(width, heads) for _ in range(3))
        self.own_q, self.own_k, self.own_v = (dense(width, heads) for _ in range(3))
        self.out, self.own_out = dense(heads, width), dense(heads, width)
        self.up, self.down = dense(width, 4 * width), dense(4 * width, width)

    def __call__(self, x, tokens, segment):
        q = self.q(self.norm1(x))
        flat = q.reshape(len(q), -1, *q.shape[4:])
        whose = jnp.repeat(jnp.arange(1, x.shape[1] + 1), flat.shape[1] // x.shape[1])
        whose = jnp.broadcast_to(whose, flat.shape[:2])
        seen = attend(flat, self.k(tokens), self.v(tokens), whose, segment).out
        x = x + self.out(seen.reshape(q.shape))
        y = self.norm2(x).reshape(-1, *x.shape[3:])
        own = jax.nn.dot_product_attention(self.own_q(y), self.own_k(y), self.own_v(y))
        x = x + self.own_out(own).reshape(x.shape)
        return x + feed_forward(self.up, self.down, self.norm3(x), 0)


SIGHT = RunConfig(SightConfig(), RowsConfig(16, 2), optimizer=OptimizerConfig(learning_rate=1e-3))
