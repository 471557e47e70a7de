"""SmolVLA (arXiv 2506.01844) as LeRobot 0.6.1 computes it: SmolVLM2's vision tower and the first
layers of its language model read pictures, words and state, and a small flow-matching expert reads
their keys and values.

Everything runs on packed rows, as in π0.5: the prefix runs once, and several noised chunks of a
sample share it. A picture's tokens are joined from squares of patches (pixel shuffle).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.attention.ring import deal
from models.families.smolvla.expert import LlamaExpert, LlamaPrefix, Read, crossing
from models.families.smolvla.inputs import Corner, TaskLine
from models.files.bounds import check_reading, check_size
from models.flow import flow
from models.flow.flow import Solver
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import Layout, PackedBatch, prefix_tokens
from models.inputs.processor import Processor
from models.inputs.tokenizer import SMALLEST_VOCABULARY, TextTokenizer
from models.layers.functional import Functional, Params
from models.layers.gemma import Cache, GemmaConfig
from models.layers.layers import Compute
from models.layers.recomputation import with_remat
from models.layers.siglip import Siglip, SiglipConfig
from models.model import ModelConfig, Stack
from models.sharding import Rules, look_up

TOWER = SiglipConfig(768, 12, 3072, 12, 16)
LANGUAGE = GemmaConfig(960, 16, 2560, 15, 5, 64)
EXPERT = GemmaConfig(720, 16, 2048, 15, 5, 64)
TEXT_LIMIT = 48
"""Most tokens of a prompt in LeRobot's default."""


@dataclass(frozen=True)
class SmolvlaConfig(ModelConfig, family="smolvla"):
    """Architecture; the defaults are those of lerobot/smolvla_base, with SmolVLM2-500M.

    `grid`: side, in patches, of the table of positions; 0 if the pictures have as many. `shuffle`:
    patches of a square of this side are one token. `self_attention_every`: which of the expert's
    layers, from the first on, also attend among actions (1: all, 0: none). An expert of fewer
    layers than the language model reads evenly spaced ones of it. `image_tokens`: ids that stand
    around each picture, SmolVLM's `<fake_token_around_image>` and `<global-img>`; () for none.
    `min_period` and `max_period`: of the flow time's sines. `chunks`: noised chunks per observation
    in training. `padded_loss`: the loss is the mean over all dims of the model and all steps, past
    the episode's end too, where its last action stands (LeRobot 0.4), not over the robot's own.
    `n_action_steps`: steps of a chunk that the robot is to execute.
    """

    vision: SiglipConfig = TOWER
    language: GemmaConfig = LANGUAGE
    expert: GemmaConfig = EXPERT
    image_size: int = 512
    grid: int = 0
    shuffle: int = 4
    vocabulary: int = 49_280
    image_tokens: tuple[int, ...] = ()
    self_attention_every: int = 2
    state_dim: int = 32
    action_dim: int = 32
    horizon: int = 50
    min_period: float = 4e-3
    max_period: float = 4.0
    chunks: int = 1
    euler_steps: int = 10
    solver: Solver = "euler"
    padded_loss: bool = False
    n_action_steps: int = 50
    compute: Compute = field(default_factory=Compute)

    state_input = "token"
    acting: ClassVar[tuple[str, ...]] = ("n_action_steps",)
    quantizable: ClassVar[str] = (
        r"^(vision/blocks|(language/layers|expert/layers/\d+)/(attention|mlp))/"
    )

    def __post_init__(self) -> None:
        check_reading(self)
        flow.check_solver("model.solver", self.solver)
        for name, least in (("self_attention_every", 0), ("grid", 0), ("shuffle", 1)):
            check_size(f"model.{name}", getattr(self, name), least=least)
        self.vision.check_image("model", self.image_size)
        language, expert, every = self.language, self.expert, self.self_attention_every
        heads = [(x.heads, x.kv_heads, x.head_dim) for x in (language, expert)]
        same = f"its heads, kv_heads and head_dim must be model.language's, {heads[0]}"
        fewer, rest = expert.depth < language.depth, language.depth % expert.depth
        side, tokens = self.image_size // self.vision.patch, self.image_tokens
        framed = len(tokens) in (0, 2) and all(0 <= x < self.vocabulary for x in tokens)
        for name, value, wrong, remedy in (
            ("expert", heads[1], heads[0] != heads[1], same),
            ("expert.width", expert.width, expert.width % 2, "it must be even"),
            ("expert.depth", expert.depth, rest, f"it must divide {language.depth} layers"),
            ("self_attention_every", every, fewer and every, "with fewer layers it must be 0"),
            ("shuffle", self.shuffle, side % self.shuffle, f"it must divide {side} patches"),
            ("image_tokens", tokens, not framed, f"give two ids below {self.vocabulary}, or none"),
            (
                *("vocabulary", self.vocabulary, self.vocabulary < SMALLEST_VOCABULARY),
                f"bytes and special tokens alone need {SMALLEST_VOCABULARY}",
            ),
        ):
            if wrong:
                raise ValueError(f"model.{name} is {value}; {remedy}.")

    @property
    def tokens_per_image(self) -> int:
        around = 3 if self.image_tokens else 0
        return self.vision.tokens(self.image_size) // self.shuffle**2 + around

    @property
    def crosses(self) -> tuple[bool, ...]:
        """Kinds of the expert's layers in a period, see `crossing`."""
        return crossing(self.expert.depth, self.self_attention_every)

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """SmolVLA's own preparation: the prompt and a new line, and pictures in the lower right
        corner of a black one."""
        made = super().processor(robots, tokenizer)
        return replace(
            made, prompts=TaskLine(tokenizer, TEXT_LIMIT), pictures=Corner(self.image_size)
        )

    def build(self) -> "Smolvla":
        return Smolvla(self)

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """Layers that a row passes through; the expert's tokens are those of all noised chunks."""
        vision, language, expert = self.vision, self.language, self.expert
        patches = layout.images * vision.tokens(self.image_size)
        keys = 2 * language.kv_heads * language.head_dim
        acting = layout.samples * self.chunks * self.horizon
        return (
            Stack(vision.depth, vision.width, patches, 0, staged=False),
            Stack(language.depth, language.width, layout.prefix, keys),
            Stack(expert.depth, expert.width, acting, 0, staged=False),
        )

    recomputing = with_remat


@dataclass(frozen=True)
class Smolvla:
    """The model as functions of (parameters, batch, key)."""

    config: SmolvlaConfig

    stacked = r"^(vision/blocks|language/layers|expert/layers/\d+)/"
    observing = r"^(vision|connector|embedding|language|state_in)(/|$)"
    groups: ClassVar[dict[str, str]] = {
        "vision": "vision|connector",
        "language": "embedding|language|state_in",
        "action": "expert|action|time",
    }

    @property
    def sharding_rules(self) -> Rules:
        return SHARDING_RULES

    def init(self, key: PRNGKeyArray) -> Params:
        return self._modules.init(key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Squared velocity error over valid action entries (with `padded_loss`, over all), averaged
        over a sample's chunks, and their weighted count."""
        config = self.config
        shape = (config.horizon, config.action_dim)
        time, noise = flow.draw(key, batch.sample_id, config.chunks, shape)
        actions, counted = batch.actions, batch.action_mask
        if config.padded_loss:
            steps = jnp.where(counted[..., 0], jnp.arange(config.horizon), 0)
            last = jax.lax.cummax(steps, axis=2)
            actions = jnp.take_along_axis(actions, last[..., None], axis=2)
            counted = jnp.ones_like(counted)
        noised, target = flow.interpolate(actions[:, :, None], noise, time)
        velocity = self.field(params, batch)(noised, time).velocity
        weight = counted * batch.weight[..., None, None]
        with jax.named_scope("loss"):
            error = ((velocity - target) ** 2).mean(2)
        return jnp.sum(error * weight), jnp.sum(weight)

    def observe(self, params: Params, batch: PackedBatch) -> Cache:
        """The language model's cache of the prefix; rows come before layers. Depends only on the
        parameters that `observing` names."""
        return self._modules.bind(params).read(batch).swapped()

    def field(
        self, params: Params, batch: PackedBatch, observed: Cache | None = None
    ) -> flow.Field:
        """The batch's velocity field. If `observed` is None, the observation is read once, here."""
        modules = self._modules.bind(params)
        cache = modules.read(batch) if observed is None else observed.swapped()
        return partial(modules.act, read=modules.expert.read(cache), kept=cache.segment)

    @property
    def feature_width(self) -> int:
        return self.config.expert.width

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
    ) -> Float[Array, "r k h a"]:
        """Normalised action chunks by `config.solver`, in `config.euler_steps` steps;
        `guidance` pulls them towards given actions."""
        field, config = self.field(params, batch), self.config
        ahead = self._modules.bind(params).ahead
        return flow.sample(field, noise, config.euler_steps, guidance, config.solver, ahead)

    @cached_property
    def _modules(self) -> "Functional[_Modules]":
        return Functional(partial(_Modules, self.config))


class _Modules(nnx.Module):
    def __init__(self, config: SmolvlaConfig, rngs: nnx.Rngs):
        self.config, compute = config, config.compute
        self.dtype = jnp.dtype(compute.dtype)
        width, acting = config.language.width, config.expert.width
        side = config.grid * config.vision.patch or config.image_size
        self.vision = Siglip(config.vision, side, None, film_width=None, compute=compute, rngs=rngs)
        square = config.vision.width * config.shuffle**2
        self.connector = nnx.Linear(square, width, use_bias=False, dtype=self.dtype, rngs=rngs)
        self.embedding = nnx.Param(
            nnx.initializers.normal(width**-0.5)(rngs.params(), (config.vocabulary, width))
        )
        self.state_in = nnx.Linear(config.state_dim, width, rngs=rngs)
        self.language = LlamaPrefix(config.language, compute, rngs)
        self.action_in = nnx.Linear(config.action_dim, acting, rngs=rngs)
        self.time_in = nnx.Linear(2 * acting, acting, rngs=rngs)
        self.time_out = nnx.Linear(acting, acting, rngs=rngs)
        self.expert = LlamaExpert(config.expert, config.crosses, compute, rngs)
        self.action_out = nnx.Linear(acting, config.action_dim, rngs=rngs)

    def read(self, batch: PackedBatch) -> Cache:
        """Keys and values of the prefix, in which the state reads all before it and is read by
        nothing but actions."""
        batch = deal(batch)
        scale = self.config.language.width**0.5
        images = self._pictures(batch.images.reshape(-1, *batch.images.shape[2:])) * scale
        if self.config.image_tokens:
            images = self._framed(images)
        words = look_up(self.embedding[...], batch.text) * scale
        state = self.state_in(batch.state)
        x = prefix_tokens(batch, *(y.astype(self.dtype) for y in (images, words, state)))
        before = batch.images.shape[1] * self.config.tokens_per_image + batch.text.shape[1]
        rank = (batch.prefix_source >= before).astype(jnp.int32)
        return self.language(
            x, batch.prefix_segment, batch.prefix_position, batch.weight.shape[1], rank
        )

    def act(
        self,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"],
        ahead: Float[Array, " w"] | None = None,
        *,
        read: Read,
        kept: Int[Array, "r p"],
    ) -> flow.Predicted:
        with jax.named_scope("action"):
            x = self.action_in(noised)
            embedded = self._embedded(time)[..., None, :] if ahead is None else ahead
            joined = jnp.concatenate([x, jnp.broadcast_to(embedded, x.shape)], axis=-1)
            x = self.time_out(jax.nn.silu(self.time_in(joined))).astype(self.dtype)
        features = self.expert(x, read, kept).astype(jnp.float32)
        with jax.named_scope("action"):
            return flow.Predicted(self.action_out(features), features)

    def ahead(self, time: Float[Array, " s"]) -> Float[Array, "s w"]:
        """Embeddings of a sampler's times 1 − i/s, each rounded once, as LeRobot counts them."""
        steps = len(time)
        return self._embedded(jnp.asarray(1 - np.arange(steps) / steps, jnp.float32))

    def _embedded(self, time: Float[Array, "*b"]) -> Float[Array, "*b w"]:
        config = self.config
        return time_embedding(time, config.expert.width, config.min_period, config.max_period)

    def _pictures(self, images: Array) -> Float[Array, "b n w"]:
        """Tokens of pictures, each of a square of patches, row by row in it and among them."""
        x, s = self.vision(images), self.config.shuffle
        side = math.isqrt(x.shape[1])
        x = x.reshape(len(x), side // s, s, side // s, s, -1).swapaxes(2, 3)
        return self.connector(x.reshape(len(x), (side // s) ** 2, -1))

    def _framed(self, images: Float[Array, "b n w"]) -> Float[Array, "b m w"]:
        """Tokens of pictures between two special tokens and one."""
        around, whole = self.embedding[...][jnp.asarray(self.config.image_tokens)]
        tokens = (jnp.broadcast_to(y, (len(images), 1, y.size)) for y in (around, whole, around))
        first, second, last = tokens
        return jnp.concatenate([first, second, images, last], axis=1)


def time_embedding(
    time: Float[Array, "*b"], width: int, least: float, most: float
) -> Float[Array, "*b w"]:
    """[sin, cos] of flow times at log-spaced periods, as LeRobot computes them in f64. Turns of up
    to 250 are multiplied in parts that f32 holds exactly, of which only the fractions count."""
    frequency = (least * (most / least) ** np.linspace(0, 1, width // 2)) ** -1.0
    step = np.exp2(np.floor(np.log2(frequency)) - 11)  # of numbers with 12 bits
    coarse = np.rint(frequency / step) * step
    high, low, all_ = (np.asarray(x, np.float32) for x in (coarse, frequency - coarse, frequency))
    near = jax.lax.reduce_precision(time[..., None], exponent_bits=8, mantissa_bits=11)
    whole = near * high
    turns = whole - jnp.round(whole) + (near * low + (time[..., None] - near) * all_)
    angle = turns * np.float32(2 * np.pi)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


_BLOCKS, _LAYERS = r"^vision/blocks/", r"^(language/layers|expert/layers/\d+)/(attention|mlp)/"
SHARDING_RULES: Rules = (
    (r"^embedding$", PartitionSpec(("tensor", "fsdp"))),
    (rf"({_BLOCKS}|{_LAYERS})(q|k|v|up|gate)/kernel(/q)?$", PartitionSpec(None, "fsdp")),
    (rf"({_BLOCKS}|{_LAYERS})out/kernel(/q)?$", PartitionSpec(None, None, None, "fsdp")),
    (rf"({_BLOCKS}|{_LAYERS})down/kernel(/q)?$", PartitionSpec(None, None, "fsdp")),
    (r"^connector/kernel$", PartitionSpec("fsdp")),
    (
        r"lora_[ab]$|/(scale|scale_step|scale_mean|fp8_history|bias)$|^vision/position$"
        r"|^(state_in|action_in|action_out|time_in|time_out)/kernel$|^vision/embed/kernel$",
        PartitionSpec(),
    ),
)
"""Sharding of each parameter; every parameter matches exactly one rule. Fifteen heads divide over
few numbers of devices, so "tensor" splits the embedding alone."""
