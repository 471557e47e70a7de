"""π0.5 (arXiv 2504.16054): a vision tower and a language model for the prefix, a flow-matching
action expert.

Everything runs on packed rows: a sample pays for the images and tokens it has, and several noised
chunks of it share one prefix (Mini-Diffuser's level-2 minibatch, arXiv 2505.09430). `Pi` is pure
functions over a nested dict of parameters; the layers behind it are Flax nnx modules.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from models import flow
from models.attention import Implementation
from models.gemma import Cache, Expert, GemmaConfig, Prefix
from models.inputs import Layout, PackedBatch
from models.layers import sincos_embedding
from models.processor import StateInput
from models.siglip import Siglip, SiglipConfig
from models.tokenizer import SMALLEST_VOCABULARY

Params = dict[str, Any]


@dataclass(frozen=True)
class PiConfig:
    """Architecture. `chunks`: noised chunks per observation in training. `film`: the prompt also
    enters the vision stem. State as text is π0.5's; as a token it is one linear projection in the
    prefix."""

    vision: SiglipConfig
    language: GemmaConfig
    expert: GemmaConfig
    image_size: int = 224
    vocabulary: int = 257_152
    state_dim: int = 32
    action_dim: int = 32
    horizon: int = 50
    state_input: StateInput = "text"
    film: bool = False
    chunks: int = 1
    dtype: str = "bfloat16"
    attention: Implementation = "auto"

    def __post_init__(self) -> None:
        language, expert = self.language, self.expert
        for name in ("depth", "heads", "kv_heads", "head_dim"):
            if getattr(language, name) != getattr(expert, name):
                raise ValueError(
                    f"model.language.{name} is {getattr(language, name)} but model.expert.{name} "
                    f"is {getattr(expert, name)}; the expert attends to the language model's keys, "
                    f"so they must be equal."
                )
        if self.image_size % self.vision.patch:
            raise ValueError(
                f"model.image_size is {self.image_size}, which patches of "
                f"{self.vision.patch} (model.vision.patch) do not divide; change one of them."
            )
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise ValueError(
                f"model.vocabulary is {self.vocabulary}; bytes and special tokens alone need "
                f"{SMALLEST_VOCABULARY}."
            )

    def layout(self, *, prefix: int, samples: int, images: int, text: int | None = None) -> Layout:
        """Row sizes for this model; text fills at most the whole prefix unless said otherwise."""
        return Layout(
            prefix=prefix,
            images=images,
            samples=samples,
            text=prefix if text is None else text,
            image_size=self.image_size,
            tokens_per_image=self.vision.tokens(self.image_size),
            state_tokens=int(self.state_input == "token"),
            state_dim=self.state_dim,
            horizon=self.horizon,
            action_dim=self.action_dim,
        )


@dataclass(frozen=True)
class Pi:
    """The model as functions of (parameters, batch, key)."""

    config: PiConfig

    def init(self, key: PRNGKeyArray) -> Params:
        """Random parameters, f32, as a nested dict."""
        return nnx.to_pure_dict(nnx.state(_Modules(self.config, nnx.Rngs(params=key)), nnx.Param))

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed squared velocity error over valid action entries (averaged over a sample's chunks,
        weighted), and the weighted count of those entries; their ratio is the mean loss."""
        config = self.config
        shape = (config.horizon, config.action_dim)
        time, noise = flow.draw(key, batch.sample_id, config.chunks, shape)
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        error = (self.velocity(params, batch, noised, time) - target) ** 2
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum(error.mean(2) * weight), jnp.sum(weight)

    def velocity(
        self,
        params: Params,
        batch: PackedBatch,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"],
    ) -> Float[Array, "r k c h a"]:
        """Velocity of C noised chunks per sample at their own flow times, f32."""
        modules = self._bind(params)
        return modules.suffix(noised, time, modules.prefix_cache(batch), batch)

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        key: PRNGKeyArray,
        steps: int = 10,
        noise: Float[Array, "r k h a"] | None = None,
    ) -> Float[Array, "r k h a"]:
        """Normalised action chunks by Euler integration; the prefix is read once."""
        modules = self._bind(params)
        if noise is None:
            shape = (self.config.horizon, self.config.action_dim)
            noise = flow.draw(key, batch.sample_id, 1, shape)[1][:, :, 0]
        cache = modules.prefix_cache(batch)

        def velocity(x: Array, t: Array) -> Array:
            time = jnp.full((*x.shape[:2], 1), t)
            return modules.suffix(x[:, :, None], time, cache, batch)[:, :, 0]

        return flow.integrate(velocity, noise, steps)

    def _bind(self, params: Params) -> "_Modules":
        graph, shapes = self._abstract
        state = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    @cached_property
    def _abstract(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: _Modules(self.config, nnx.Rngs(0))))


class _Modules(nnx.Module):
    def __init__(self, config: PiConfig, rngs: nnx.Rngs):
        self.config = config
        dtype = self.dtype = jnp.dtype(config.dtype)
        width, action_width = config.language.width, config.expert.width
        self.vision = Siglip(
            config.vision,
            config.image_size,
            width,
            film_width=width if config.film else None,
            dtype=dtype,
            rngs=rngs,
        )
        self.embedding = nnx.Param(
            nnx.initializers.normal(width**-0.5)(rngs.params(), (config.vocabulary, width))
        )
        if config.state_input == "token":
            self.state_in = nnx.Linear(config.state_dim, width, dtype=dtype, rngs=rngs)
        self.language = Prefix(config.language, dtype, rngs)
        self.action_in = nnx.Linear(config.action_dim, action_width, dtype=dtype, rngs=rngs)
        self.time_in = nnx.Linear(action_width, action_width, dtype=dtype, rngs=rngs)
        self.time_out = nnx.Linear(action_width, action_width, dtype=dtype, rngs=rngs)
        self.expert = Expert(config.expert, dtype, rngs)
        self.action_out = nnx.Linear(action_width, config.action_dim, dtype=dtype, rngs=rngs)

    def prefix_cache(self, batch: PackedBatch) -> Cache:
        """Runs everything that does not depend on the actions."""
        config = self.config
        rows, slots = batch.images.shape[:2]
        places = config.vision.tokens(config.image_size)
        text = self.embedding[batch.text] * config.language.width**0.5
        text = text.astype(self.dtype)
        condition = self._image_text(batch, text) if config.film else None
        images = self.vision(batch.images.reshape(-1, *batch.images.shape[2:]), condition)
        tokens = [images.reshape(rows, slots * places, -1), text]
        if config.state_input == "token":
            tokens.append(self.state_in(batch.state.astype(self.dtype)))
        every = jnp.concatenate(tokens, axis=1)
        x = jnp.take_along_axis(every, batch.prefix_source[..., None], axis=1)
        return self.language(x, batch.prefix_segment, batch.prefix_position, config.attention)

    def suffix(
        self,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"],
        cache: Cache,
        batch: PackedBatch,
    ) -> Float[Array, "r k c h a"]:
        """Velocity, f32."""
        embedded = sincos_embedding(time, self.config.expert.width).astype(self.dtype)
        condition = jax.nn.swish(self.time_out(jax.nn.swish(self.time_in(embedded))))[..., None, :]
        x = self.action_in(noised.astype(self.dtype))
        x = self.expert(x, condition, cache, batch.prefix_segment, self.config.attention)
        return self.action_out(x).astype(jnp.float32)

    def _image_text(self, batch: PackedBatch, text: Float[Array, "r t w"]) -> Float[Array, "b w"]:
        """Mean embedding of the prompt of the sample that each image slot belongs to."""
        slots, samples = batch.images.shape[1], batch.state.shape[1]
        places = self.config.vision.tokens(self.config.image_size)
        total = slots * places + text.shape[1] + samples
        owner = jnp.zeros((text.shape[0], total), jnp.int32)
        row = jnp.arange(text.shape[0])[:, None]
        owner = owner.at[row, batch.prefix_source].max(batch.prefix_segment)
        image_owner = owner[:, : slots * places : places]
        text_owner = owner[:, slots * places : slots * places + text.shape[1]]
        same = (image_owner[:, :, None] == text_owner[:, None]) & (image_owner[:, :, None] > 0)
        share = same / jnp.maximum(same.sum(-1, keepdims=True), 1)
        return jnp.einsum("rit,rtw->riw", share.astype(text.dtype), text).reshape(
            -1, text.shape[-1]
        )


_STACK = r"^(vision/blocks|language/layers|expert/layers)/(.*/)?"

SHARDING_RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"^embedding$", PartitionSpec("fsdp")),
    (r"(^|/)(bias|scale)$|^vision/position$", PartitionSpec()),
    (_STACK + r"(q|k|v|up|gate|down|modulation)/kernel$", PartitionSpec(None, "fsdp")),
    (_STACK + r"out/kernel$", PartitionSpec(None, None, None, "fsdp")),
    (r"^vision/(embed|film|head)/kernel$|^expert/norm/.*kernel$", PartitionSpec(None, "fsdp")),
    (r"^(action_in|action_out|time_in|time_out|state_in)/kernel$", PartitionSpec()),
)
"""Where each parameter is cut; every parameter matches exactly one rule."""
