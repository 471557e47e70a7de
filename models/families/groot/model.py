"""GR00T-N1.5 (arXiv 2503.14734): a vision-language model, an adapter over its features, and a
flow-matching transformer with encoders and decoders of each embodiment's own.

The released model on packed rows: a sample costs only the views and tokens it has, nothing attends
to padding, and what the actions read of the observation is computed once. The release's flow time
runs from noise at 0 to data at 1; only `time_bucket` reverses it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from models.attention.ring import deal
from models.families.groot.eagle_turn import PICTURE, EagleTurn
from models.files.bounds import LARGEST_VOCABULARY, check_reading, check_size, check_sizes
from models.flow import flow
from models.flow.flow import Solver
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import Layout, PackedBatch, prefix_tokens
from models.inputs.processor import Processor
from models.inputs.tokenizer import TextTokenizer
from models.layers.dit import LOG_10000, Adapter, DiT, TransformerConfig, sinusoid
from models.layers.dropout import folded, sample_keys
from models.layers.functional import Functional, Params
from models.layers.gemma import Cache, Modulations
from models.layers.layers import Compute
from models.layers.pipeline import staged
from models.layers.qwen3 import Qwen, QwenConfig
from models.layers.recomputation import with_remat
from models.layers.siglip import Siglip, SiglipConfig
from models.layers.vision.film import image_prompts
from models.model import ModelConfig, Stack
from models.sharding import Rules, axis_size, keep_rows, look_up

TAGS: Mapping[str, int] = {
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "new_embodiment": 31,
    "so100": 2,
    "unitree_g1": 3,
}
"""Rows of the embodiments' tables by tag, as released; the last two are LeRobot's."""
_BUCKETS = 1000
_ADAPTER = TransformerConfig(depth=4, heads=32, head_dim=64)
_DIT = TransformerConfig(depth=16, heads=32, head_dim=48)


@dataclass(frozen=True)
class GrootConfig(ModelConfig, family="groot"):
    """Architecture; the defaults are the released 3B model's. `future_tokens`: learned tokens
    between state and actions. `positions`: rows of the table of action positions. `hidden`: width
    of the state encoder and action decoder of each embodiment. `image_token`: id of the token that
    stands for image features in a prompt. `projectors`: for each of the processor's robots, its row
    in the embodiments' tables; if empty, the robot's own number. `chunks`: noised chunks per
    observation in training. `euler_steps` and `solver`: those of the sampler, see `flow.integrate`.
    `film`: the prompt also enters the vision stem.

    `padding`: "masked" hides it. "released" does what the release does: its adapter and
    cross-attention see padded places, so that an action depends on how far its sample was padded.
    A row then holds one sample, and its padding has the tokens that `prefix_source` names.
    """

    vision: SiglipConfig = field(default_factory=SiglipConfig)
    language: QwenConfig = field(default_factory=QwenConfig)
    adapter: TransformerConfig = _ADAPTER
    dit: TransformerConfig = _DIT
    image_size: int = 224
    vocabulary: int = 151_680
    image_token: int = 151_669
    embodiments: int = 32
    projectors: tuple[int, ...] = ()
    state_dim: int = 64
    action_dim: int = 32
    horizon: int = 16
    future_tokens: int = 32
    positions: int = 1024
    hidden: int = 1024
    chunks: int = 1
    euler_steps: int = 4
    solver: Solver = "euler"
    film: bool = False
    padding: Literal["masked", "released"] = "masked"
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        check_reading(self)
        check_size("model.image_token", self.image_token, LARGEST_VOCABULARY, least=0)
        check_sizes("model", self, "embodiments", "future_tokens", "hidden", "positions")
        flow.check_solver("model.solver", self.solver)
        wrong = [row for row in self.projectors if not 0 <= row < self.embodiments]
        if wrong or len(set(self.projectors)) < len(self.projectors):
            raise ValueError(
                f"model.projectors is {list(self.projectors)}; give each robot a row of its own "
                f"from 0 to {self.embodiments - 1} (model.embodiments)."
            )
        if self.adapter.width != self.language.width:
            raise ValueError(
                f"model.adapter is {self.adapter.heads} heads of {self.adapter.head_dim}, "
                f"{self.adapter.width} in all, but model.language.width is {self.language.width}; "
                f"they must be equal."
            )
        if self.dit.depth % 2:
            raise ValueError(
                f"model.dit.depth is {self.dit.depth}; cross- and self-attention alternate, so it "
                f"must be even."
            )
        if self.horizon > self.positions:
            raise ValueError(
                f"model.horizon is {self.horizon} but there are {self.positions} action positions "
                f"(model.positions); shorten the horizon."
            )
        self.vision.check_image("model", self.image_size)

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """See `ModelConfig.processor`; with a BPE tokenizer, prompts are turns of Eagle's chat."""
        made = super().processor(robots, tokenizer)
        return (
            replace(made, prompts=EagleTurn(tokenizer)) if isinstance(tokenizer, ByteBpe) else made
        )

    def check_processor(self, processor: Processor) -> None:
        super().check_processor(processor)
        robots, prompts = len(processor.embodiments), processor.prompts
        if self.projectors and len(self.projectors) != robots:
            raise ValueError(
                f"there are {robots} embodiments, but model.projectors gives rows to "
                f"{len(self.projectors)}; give one to each."
            )
        if not isinstance(prompts, EagleTurn) or prompts.tokenizer is None:
            return
        if (id := prompts.picture_token) != self.image_token:
            raise ValueError(
                f"the tokenizer's {PICTURE} has the id {id}, but model.image_token is "
                f"{self.image_token}; give the tokenizer that the model was trained with."
            )

    def for_robots(self, names: Sequence[str]) -> "GrootConfig":
        """The same config for these robots. Each is given as a tag of the release (such as
        "new_embodiment") or as the number of its row.

        Raises:
          ValueError: a name is neither.
        """
        unknown = [name for name in names if name not in TAGS and not name.isdecimal()]
        if unknown:
            raise ValueError(
                f"GR00T has no embodiment '{unknown[0]}'; give --embodiment one of "
                f"{', '.join(TAGS)}, or the number of a row (0 to {self.embodiments - 1})."
            )
        rows = (TAGS[name] if name in TAGS else int(name) for name in names)
        return replace(self, projectors=tuple(rows))

    def with_rows_of(self, other: ModelConfig, foreign: str | None = None) -> "GrootConfig":
        """The same config with the rows of another, unless it has its own.

        Raises:
          ValueError: the other is of `foreign`, another code's checkpoint, which does not say whose
            rows it has.
        """
        if self.projectors:
            return self
        if foreign:
            raise ValueError(
                f"{foreign} has parameters of its own for each embodiment; say which embodiment "
                "the data is from: --embodiment new_embodiment, or a tag that it was trained with."
            )
        return replace(self, projectors=getattr(other, "projectors", ()))

    def robot(self, number: int) -> tuple[str, int]:
        """Tag, as `for_robots` takes it, and row of the processor's robot with that number."""
        row = self.projectors[number] if self.projectors else number
        return next((tag for tag, known in TAGS.items() if known == row), str(row)), row

    @property
    def tokens_per_image(self) -> int:
        return self.vision.tokens(self.image_size)

    def build(self) -> "Groot":
        return Groot(self)

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """Layers that a row passes through; the transformer's tokens are those of all noised
        chunks."""
        vision, language, adapter, dit = self.vision, self.language, self.adapter, self.dit
        pictures = layout.images * layout.tokens_per_image
        keys = 2 * language.kv_heads * language.head_dim
        acting = layout.samples * self.chunks * (1 + self.future_tokens + self.horizon)
        return (
            Stack(vision.depth, vision.width, pictures, 0, staged=False),
            Stack(language.depth, language.width, layout.prefix, keys),
            Stack(adapter.depth, adapter.width, layout.prefix, 2 * adapter.width),
            Stack(dit.depth, dit.width, acting, 0),
        )

    recomputing = with_remat

    @property
    def pipelined(self) -> tuple[int, ...]:
        """Depths of the stacks that stages share; the transformer's is in pairs of layers."""
        return self.language.depth, self.adapter.depth, self.dit.depth // 2

    state_input = "suffix"
    acting: ClassVar[tuple[str, ...]] = ("padding",)
    own_inputs: ClassVar[str] = "models.families.groot.inputs:groot_batch"
    dataset_cameras: ClassVar[str] = "models.families.groot.modality:dataset_cameras"
    quantizable: ClassVar[str] = (
        r"^(vision/blocks|language/layers/(attention|mlp)|adapter/blocks|dit/(cross|self)_blocks)"
        r"/(q|k|v|out|up|gate|down)/"
    )


@dataclass(frozen=True)
class Groot:
    """The model as functions of (parameters, batch, key)."""

    config: GrootConfig

    stacked = r"^(vision/blocks|language/layers|adapter/blocks|dit/(cross|self)_blocks)/"
    groups: ClassVar[dict[str, str]] = {
        "vision": "vision",
        "language": "embedding|language",
        "action": "adapter|dit|state_|action_|future_tokens|positions",
        "visual": "vision",
        "llm": "embedding|language",
        "projector": "state_|action_|positions",
        "diffusion_model": "dit",
    }

    @property
    def sharding_rules(self) -> Rules:
        return SHARDING_RULES

    def init(self, key: PRNGKeyArray) -> Params:
        return self._modules.init(key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed squared velocity error over valid action entries (averaged over a sample's chunks,
        weighted), and the weighted count of those entries; their ratio is the mean loss.

        Times have the release's density: t = s / 0.999 with s ~ Beta(1.5, 1), so a little past 1.
        """
        config = self.config
        shape = (config.horizon, config.action_dim)
        time, noise = flow.draw(key, batch.sample_id, config.chunks, shape)
        time = (time - 0.001) / 0.999**2  # `draw` gives 0.999 s + 0.001
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        velocity = self.field(params, batch, key=key)(noised, time).velocity
        error = (velocity - target) ** 2
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum(error.mean(2) * weight), jnp.sum(weight)

    def observe(self, params: Params, batch: PackedBatch) -> Float[Array, "r p w"]:
        """The language model's features of the prefix, for `field`. Depends only on the parameters
        that `observing` names."""
        return self._modules.bind(params).features(deal(batch))

    observing = r"^(vision|embedding|language)(/|$)"

    def field(
        self,
        params: Params,
        batch: PackedBatch,
        observed: Float[Array, "r p w"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> flow.Field:
        """The batch's velocity field. What `observed` does not provide is computed once, here. With
        `key`, dropout is applied as in training."""
        modules = self._modules.bind(params)
        dropping = key is not None and max(self.config.adapter.dropout, self.config.dit.dropout) > 0
        keys = sample_keys(key, batch.sample_id) if dropping and key is not None else None
        seen = modules.observe(batch, observed, keys)
        return partial(modules.act, observed=seen, robot=batch.embodiment, keys=keys)

    @property
    def feature_width(self) -> int:
        return self.config.hidden

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
    ) -> Float[Array, "r k h a"]:
        """Normalised action chunks by `config.solver`, in `config.euler_steps` steps;
        `guidance` pulls them towards given actions."""
        field, ahead = self.field(params, batch), self._modules.bind(params).ahead
        return flow.sample(
            field, noise, self.config.euler_steps, guidance, self.config.solver, ahead
        )

    def features(self, params: Params, batch: PackedBatch) -> Float[Array, "r p w"]:
        """The language model's features of the prefix, before the adapter."""
        return self._modules.bind(params).features(batch)

    @cached_property
    def _modules(self) -> "Functional[_Modules]":
        return Functional(partial(_Modules, self.config))


def time_bucket(time: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """Thousandths of the release's clock (1 − time), truncated towards zero; −1 to 1000.

    A time within rounding of a bucket's edge counts as on the edge. In f32, 1 − (1 − t) may fall
    short of t, and `flow.times` of a hundred steps may fall short by a thousandth of a bucket.
    """
    thousandths = (1 - time) * _BUCKETS
    edge = jnp.round(thousandths)
    on_edge = jnp.abs(thousandths - edge) < 1e-3
    return jnp.where(on_edge, edge, jnp.trunc(thousandths)).astype(jnp.int32)


class _Observed(NamedTuple):
    """All that the actions read of an observation."""

    cache: Cache
    state: Float[Array, "r k 1 w"]


class _Modules(nnx.Module):
    def __init__(self, config: GrootConfig, rngs: nnx.Rngs):
        self.config = config
        compute, width, action_width = config.compute, config.language.width, config.dit.width
        dtype = self.dtype = jnp.dtype(compute.dtype)

        def table(rows: int, width: int, scale: float = 0.02) -> nnx.Param:
            return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), (rows, width)))

        film_width = width if config.film else None
        self.vision = Siglip(
            config.vision,
            config.image_size,
            width,
            film_width=film_width,
            compute=compute,
            rngs=rngs,
        )
        self.embedding = table(config.vocabulary, width, width**-0.5)
        self.language = Qwen(config.language, compute, rngs)
        self.adapter = Adapter(config.adapter, compute, rngs)
        self.future_tokens = table(config.future_tokens, action_width)
        self.positions = table(config.positions, action_width)
        kinds, hidden = config.embodiments, config.hidden
        common = {"dtype": dtype, "rngs": rngs, "rows": config.projectors}
        self.state_encoder = EmbodimentMLP(kinds, config.state_dim, hidden, action_width, **common)
        self.action_encoder = ActionEncoder(kinds, config.action_dim, action_width, **common)
        self.action_decoder = EmbodimentMLP(kinds, hidden, hidden, config.action_dim, **common)
        self.dit = DiT(config.dit, width, hidden, compute, rngs)

    def features(self, batch: PackedBatch) -> Float[Array, "r p w"]:
        with jax.named_scope("embedding"):
            text = look_up(self.embedding[...], batch.text).astype(self.dtype)
        condition = self._prompts(batch, text) if self.config.film else None
        images = self.vision(batch.images.reshape(-1, *batch.images.shape[2:]), condition)
        x = prefix_tokens(batch, images, text)
        return self.language(x, batch.prefix_segment, batch.prefix_position)

    def _prompts(self, batch: PackedBatch, text: Float[Array, "r t w"]) -> Float[Array, "b w"]:
        """Each picture's prompt, scaled as in π: this embedding begins with variance 1/w."""
        return image_prompts(batch, text * text.shape[-1] ** 0.5, self.config.tokens_per_image)

    def observe(
        self,
        batch: PackedBatch,
        features: Float[Array, "r p w"] | None = None,
        keys: UInt32[Array, "r k d"] | None = None,
    ) -> _Observed:
        """Runs everything that does not depend on the actions."""
        batch = deal(batch)
        features = self.features(batch) if features is None else features
        segment = batch.prefix_segment
        if self.config.padding == "released":
            if batch.state.shape[1] != 1:
                raise ValueError(
                    f"model.padding is 'released', which needs one sample a row, but the batch has "
                    f"{batch.state.shape[1]} slots; use 'masked' for packed rows."
                )
            segment = jnp.ones_like(segment)
        if keys is not None:
            owner = jnp.maximum(batch.prefix_segment - 1, 0)
            keys = jnp.take_along_axis(keys, owner[..., None], axis=1)
            keys = folded(keys, batch.prefix_position)
        adapted = self.adapter(features, segment, keys, batch.weight.shape[1])
        cache = self.dit.observe(adapted, segment)
        state = batch.state[:, :, None].astype(self.dtype)
        return _Observed(cache, self.state_encoder(state, batch.embodiment))

    def ahead(self, time: Float[Array, " s"]) -> Modulations | None:
        """Modulations at flow times; None with stages, whose layers get what they read by rows."""
        return None if axis_size("stage") > 1 else self.dit.modulations(time_bucket(time))

    def act(
        self,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"],
        ahead: Modulations | None = None,
        *,
        observed: _Observed,
        robot: Int[Array, "r k"],
        keys: UInt32[Array, "r k d"] | None = None,
    ) -> flow.Predicted:
        horizon, bucket = self.config.horizon, time_bucket(time)
        actions = self.action_encoder(noised.astype(self.dtype), bucket, robot)
        actions = actions + self.positions[:horizon].astype(self.dtype)
        shared = (observed.state[:, :, None], self.future_tokens[...].astype(self.dtype))
        spread = [jnp.broadcast_to(x, (*time.shape, *x.shape[-2:])) for x in shared]
        x = jnp.concatenate([*spread, actions], -2)
        x = self.dit(x, bucket, observed.cache, horizon, keys, ahead)
        velocity = -self.action_decoder(x, robot).astype(jnp.float32)
        return flow.Predicted(velocity, x.astype(jnp.float32))


class EmbodimentLinear(nnx.Module):
    """A linear layer with separate weights for each embodiment. Robots use the weights in `rows`;
    if `rows` is empty, each robot uses those of its own number."""

    def __init__(
        self,
        kinds: int,
        inner: int,
        outer: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        rows: tuple[int, ...] = (),
    ):
        self.dtype, self.rows = dtype, rows
        begin = nnx.initializers.lecun_normal(batch_axis=0)
        self.kernel = nnx.Param(begin(rngs.params(), (kinds, inner, outer)))
        self.bias = nnx.Param(jnp.zeros((kinds, outer)))

    def __call__(
        self, x: Float[Array, "r k *b i"], robot: Int[Array, "r k"]
    ) -> Float[Array, "r k *b o"]:
        kernel, bias = self.of(robot)
        return _project(x, kernel) + bias.reshape(*bias.shape[:2], *[1] * (x.ndim - 3), -1)

    def of(self, robot: Int[Array, "r k"]) -> tuple[Float[Array, "s t i o"], Float[Array, "s t o"]]:
        """The kernel and the bias of each sample; [1, 1, ...] if there is one robot."""
        used = np.array(self.rows) if self.rows else slice(None)
        kernel, bias = (x[...][used].astype(self.dtype) for x in (self.kernel, self.bias))
        if len(kernel) == 1:
            return kernel[None], bias[None]
        return keep_rows((_chosen(kernel, robot), _chosen(bias, robot)))


class EmbodimentMLP(nnx.Module):
    """Two `EmbodimentLinear` with a ReLU between."""

    def __init__(self, kinds: int, inner: int, hidden: int, outer: int, **common: Any):
        self.hidden = EmbodimentLinear(kinds, inner, hidden, **common)
        self.out = EmbodimentLinear(kinds, hidden, outer, **common)

    @jax.named_scope("embodiment")
    def __call__(
        self, x: Float[Array, "r k *b i"], robot: Int[Array, "r k"]
    ) -> Float[Array, "r k *b o"]:
        return self.out(jax.nn.relu(self.hidden(x, robot)), robot)


class ActionEncoder(nnx.Module):
    """Encodes noised actions and their flow time as tokens."""

    def __init__(self, kinds: int, inner: int, width: int, **common: Any):
        self.action = EmbodimentLinear(kinds, inner, width, **common)
        self.mix = EmbodimentLinear(kinds, 2 * width, width, **common)
        self.out = EmbodimentLinear(kinds, width, width, **common)

    @jax.named_scope("embodiment")
    def __call__(
        self,
        x: Float[Array, "r k c h a"],
        bucket: Int[Array, "r k c"],
        robot: Int[Array, "r k"],
    ) -> Float[Array, "r k c h w"]:
        """`mix` reads [action, time]; the half that reads time runs once per chunk."""
        kernel, bias = self.mix.of(robot)
        from_action, from_time = jnp.split(kernel, 2, axis=-2)
        width = bias.shape[-1]
        decay = np.arange(width // 2, dtype=np.float32) * (LOG_10000 / np.float32(width // 2))
        time = sinusoid(bucket, decay).astype(kernel.dtype)
        time = _project(time, from_time) + bias[:, :, None]
        x = _project(self.action(x, robot), from_action) + time[..., None, :]
        return self.out(jax.nn.silu(x), robot)


def _chosen(table: Float[Array, " n *w"], robot: Int[Array, "r k"]) -> Float[Array, "r k *w"]:
    """`table[robot]`. Traced under a mesh of several devices, and where it is differentiated, it is
    a product with one-hot vectors, which is split like any other product: indexing would gather
    sharded weights in f32 and sum their gradients unsharded. Otherwise only the weights of these
    robots are read."""

    def product(table: Array, robot: Array) -> Array:
        one_hot = jax.nn.one_hot(robot, len(table), dtype=table.dtype)
        return jnp.einsum("rkn,n...->rk...", one_hot, table, precision="highest")

    if math.prod(get_abstract_mesh().shape.values()) > 1:
        return product(table, robot)
    chosen = jax.custom_vjp(lambda table, robot: table[robot])
    chosen.defvjp(partial(jax.vjp, product), lambda back, given: back(given))
    return chosen(table, robot)


def _project(
    x: Float[Array, "r k *b i"], kernel: Float[Array, "s t i o"]
) -> Float[Array, "r k *b o"]:
    """Products with each sample's kernel, or with the one that all share."""
    if kernel.shape[:2] == (1, 1):
        return x @ kernel[0, 0]
    return jnp.einsum("rk...i,rkio->rk...o", x, kernel)


_STACK = r"^(vision/blocks|language/layers/(attention|mlp)|adapter/blocks|dit/(cross|self)_blocks)/"

_RULES = (
    (r"^embedding$", PartitionSpec(("tensor", "fsdp"))),
    (
        r"/(scale|scale_step|scale_mean|fp8_history)$|^vision/position$|^positions$"
        r"|^future_tokens$",
        PartitionSpec(),
    ),
    (_STACK + r"(q|k|v|up|gate)/kernel(/q)?$", PartitionSpec(None, "fsdp", "tensor")),
    (_STACK + r"out/kernel(/q)?$", PartitionSpec(None, "tensor", None, "fsdp")),
    (_STACK + r"down/kernel(/q)?$", PartitionSpec(None, "tensor", "fsdp")),
    (
        _STACK + r"((q|k|v|out)/lora_[ab]|down/lora_a|(q|k|v|up)/bias)$",
        PartitionSpec(None, "tensor"),
    ),
    (_STACK + r"(up|gate)/lora_b$", PartitionSpec(None, None, "tensor")),
    (_STACK + r"((up|gate)/lora_a|down/lora_b)$", PartitionSpec()),
    (r"_blocks/modulation/kernel$", PartitionSpec(None, "fsdp")),
    (r"^vision/(embed|head)/kernel$", PartitionSpec(None, "fsdp")),
    (r"^vision/small/kernel$", PartitionSpec()),
    (r"^dit/(time_in|out)/kernel$", PartitionSpec(None, "fsdp")),
    (r"^dit/(time_out|modulation)/kernel$|^vision/film/kernel$", PartitionSpec("fsdp")),
    (
        r"^(state_encoder/.*|action_encoder/.*|action_decoder/hidden)/kernel$",
        PartitionSpec(None, None, "fsdp"),
    ),
    (r"^action_decoder/out/kernel$", PartitionSpec(None, "fsdp")),
    (rf"^(?!({_STACK[1:]})(q|k|v|up)/).*bias$", PartitionSpec()),
)
SHARDING_RULES = staged(_RULES, r"(language/layers|adapter/blocks|dit/(cross|self)_blocks)/")
"""Sharding of each parameter; every parameter matches exactly one rule. Heads and hidden units are
split over "tensor"."""
