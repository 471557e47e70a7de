"""The action head that GR00T-N1.5 and N1.7 share (arXiv 2503.14734): an adapter over a
vision-language model's features, and a flow-matching transformer with encoders and decoders of each
embodiment's own.

What the actions read of an observation is computed once. The release's flow time runs from noise at
0 to data at 1; only `time_bucket` reverses it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from models.attention.ring import deal
from models.files.bounds import check_reading, check_sizes
from models.flow import flow
from models.flow.flow import Solver
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.packed_batch import PackedBatch
from models.inputs.processor import Processor
from models.layers.dit import LOG_10000, Adapter, DiT, TransformerConfig, sinusoid
from models.layers.dropout import drop, folded, sample_keys
from models.layers.functional import Functional, Params
from models.layers.gemma import Cache, Modulations
from models.layers.layers import Compute
from models.layers.pipeline import staged
from models.layers.recomputation import with_remat
from models.model import ModelConfig
from models.sharding import Rules, axis_size, keep_rows

Config = TypeVar("Config", bound="HeadConfig")
_BUCKETS = 1000
_ADAPTER = TransformerConfig(depth=4, heads=32, head_dim=64)
_DIT = TransformerConfig(depth=16, heads=32, head_dim=48)
_STATE_SITE = 2**30
"""Site of `state_dropout`, beyond those of any layer."""


@dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """Sizes of the head. `positions`: rows of the table of action positions. `hidden`: width of the
    state encoder and action decoder of each embodiment. `projectors`: for each of the processor's
    robots, its row in the embodiments' tables; if empty, the robot's own number. `future_tokens`:
    learned tokens between state and actions. `state_dropout`: share of samples whose state is
    hidden in training. `chunks`: noised chunks per observation in training. `euler_steps` and
    `solver`: those of the sampler, see `flow.integrate`.
    """

    adapter: TransformerConfig = _ADAPTER
    dit: TransformerConfig = _DIT
    embodiments: int = 32
    projectors: tuple[int, ...] = ()
    state_dim: int = 64
    action_dim: int = 32
    horizon: int = 16
    future_tokens: int = 0
    positions: int = 1024
    hidden: int = 1024
    state_dropout: float = 0.0
    chunks: int = 1
    euler_steps: int = 4
    solver: Solver = "euler"
    compute: Compute = field(default_factory=Compute)

    tags: ClassVar[Mapping[str, int]] = {}
    """Rows of the embodiments' tables by tag, as released."""

    def __post_init__(self) -> None:
        check_reading(self)
        check_sizes("model", self, "embodiments", "hidden", "positions")
        flow.check_solver("model.solver", self.solver)
        wrong = [row for row in self.projectors if not 0 <= row < self.embodiments]
        if wrong or len(set(self.projectors)) < len(self.projectors):
            raise ValueError(
                f"model.projectors is {list(self.projectors)}; give each robot a row of its own "
                f"from 0 to {self.embodiments - 1} (model.embodiments)."
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
        if not 0 <= self.state_dropout < 1:
            raise ValueError(
                f"model.state_dropout is {self.state_dropout}; give a share from 0 to less than 1."
            )

    def check_adapter(self, width: int) -> None:
        """Raises ValueError unless the adapter is as wide as the language model."""
        if self.adapter.width != width:
            raise ValueError(
                f"model.adapter is {self.adapter.heads} heads of {self.adapter.head_dim}, "
                f"{self.adapter.width} in all, but model.language.width is {width}; they must be "
                "equal."
            )

    def check_processor(self, processor: Processor) -> None:
        super().check_processor(processor)
        robots = len(processor.embodiments)
        if self.projectors and len(self.projectors) != robots:
            raise ValueError(
                f"there are {robots} embodiments, but model.projectors gives rows to "
                f"{len(self.projectors)}; give one to each."
            )

    def for_robots(self: Config, names: Sequence[str]) -> Config:
        """The same config for these robots. Each is given as a tag of the release (such as
        "new_embodiment") or as the number of its row.

        Raises:
          ValueError: a name is neither.
        """
        unknown = [name for name in names if name not in self.tags and not name.isdecimal()]
        if unknown:
            raise ValueError(
                f"GR00T has no embodiment '{unknown[0]}'; give --embodiment one of "
                f"{', '.join(self.tags)}, or the number of a row (0 to {self.embodiments - 1})."
            )
        rows = (self.tags[name] if name in self.tags else int(name) for name in names)
        return replace(self, projectors=tuple(rows))

    def with_rows_of(self: Config, other: ModelConfig, foreign: str | None = None) -> Config:
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
        return next((tag for tag, known in self.tags.items() if known == row), str(row)), row

    recomputing = with_remat

    state_input = "suffix"


@dataclass(frozen=True)
class HeadModel:
    """A model with the head, as functions of (parameters, batch, key)."""

    config: Any

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
    observing = r"^(vision|embedding|language)(/|$)"

    @property
    def sharding_rules(self) -> Rules:
        return SHARDING_RULES

    @property
    def feature_width(self) -> int:
        return int(self.config.hidden)

    def init(self, key: PRNGKeyArray) -> Params:
        return self._modules.init(key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed squared velocity error over valid action entries (averaged over a sample's chunks,
        weighted), and the weighted count of those entries; their ratio is the mean loss.

        Times have the release's density, see `times`.
        """
        config = self.config
        shape = (config.horizon, config.action_dim)
        time, noise = flow.draw(key, batch.sample_id, config.chunks, shape)
        time = self.times(time)
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        velocity = self.field(params, batch, key=key)(noised, time).velocity
        error = (velocity - target) ** 2
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum(error.mean(2) * weight), jnp.sum(weight)

    def times(self, drawn: Float[Array, "r k c"]) -> Float[Array, "r k c"]:
        """Flow times in training from 0.999 s + 0.001, s ~ Beta(1.5, 1)."""
        return drawn

    def observe(self, params: Params, batch: PackedBatch) -> Float[Array, "r p w"]:
        """The language model's features of the prefix, for `field`. Depends only on the parameters
        that `observing` names."""
        return self._modules.bind(params).features(deal(batch))

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
        dropping = key is not None and self._drops
        keys = sample_keys(key, batch.sample_id) if dropping and key is not None else None
        seen = modules.observe(batch, observed, keys)
        return partial(modules.act, observed=seen, robot=batch.embodiment, keys=keys)

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

    @property
    def _drops(self) -> bool:
        config = self.config
        return max(config.adapter.dropout, config.dit.dropout, config.state_dropout) > 0

    @property
    def _modules(self) -> "Functional[Any]":
        raise NotImplementedError


def time_bucket(time: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """Thousandths of the release's clock (1 − time), truncated towards zero; −1 to 1000.

    A time within rounding of a bucket's edge counts as on the edge. In f32, 1 − (1 − t) may fall
    short of t, and `flow.times` of a hundred steps may fall short by a thousandth of a bucket.
    """
    thousandths = (1 - time) * _BUCKETS
    edge = jnp.round(thousandths)
    on_edge = jnp.abs(thousandths - edge) < 1e-3
    return jnp.where(on_edge, edge, jnp.trunc(thousandths)).astype(jnp.int32)


class Observed(NamedTuple):
    """All that the actions read of an observation."""

    cache: Cache
    state: Float[Array, "r k 1 w"]


class Head(nnx.Module):
    """The head's modules. A model's own modules derive from it, begin with its backbone's, and say
    which features the actions read of a batch."""

    def __init__(self, config: Any, width: int, rngs: nnx.Rngs, text_every: int = 0):
        """`width`: of the features; `text_every`: see `DiT`."""
        compute, action_width = config.compute, config.dit.width
        dtype = self.dtype = jnp.dtype(compute.dtype)
        self.config = config
        self.adapter = Adapter(config.adapter, compute, rngs)
        if config.future_tokens:
            self.future_tokens = table(config.future_tokens, action_width, rngs)
        self.positions = table(config.positions, action_width, rngs)
        kinds, hidden = config.embodiments, config.hidden
        common = {"dtype": dtype, "rngs": rngs, "rows": config.projectors}
        self.state_encoder = EmbodimentMLP(kinds, config.state_dim, hidden, action_width, **common)
        self.action_encoder = ActionEncoder(kinds, config.action_dim, action_width, **common)
        self.action_decoder = EmbodimentMLP(kinds, hidden, hidden, config.action_dim, **common)
        self.dit = DiT(config.dit, width, hidden, compute, rngs, text_every)

    def features(self, batch: PackedBatch) -> Float[Array, "r p w"]:
        """The backbone's features of the prefix."""
        raise NotImplementedError

    def owners(self, batch: PackedBatch) -> Int[Array, "r p"]:
        """The sample that each place of the features belongs to."""
        return batch.prefix_segment

    def pictured(self, batch: PackedBatch) -> Bool[Array, "r p"]:
        """Places of pictures' tokens, for a head that tells them from words."""
        raise NotImplementedError

    def observe(
        self,
        batch: PackedBatch,
        features: Float[Array, "r p w"] | None = None,
        keys: UInt32[Array, "r k d"] | None = None,
    ) -> Observed:
        """Runs everything that does not depend on the actions."""
        batch = deal(batch)
        features = self.features(batch) if features is None else features
        segment, samples = self.owners(batch), keys
        if keys is not None:
            owner = jnp.maximum(batch.prefix_segment - 1, 0)
            keys = jnp.take_along_axis(keys, owner[..., None], axis=1)
            keys = folded(keys, batch.prefix_position)
        adapted = self.adapter(features, segment, keys, batch.weight.shape[1])
        pictured = self.pictured(batch) if self.dit.text_every else None
        cache = self.dit.observe(adapted, segment, pictured)
        state = self.state_encoder(batch.state[:, :, None].astype(self.dtype), batch.embodiment)
        if samples is not None and (rate := self.config.state_dropout):
            there = drop(jnp.ones(samples.shape[:2]), samples, _STATE_SITE, rate) > 0
            state = state * there[..., None, None].astype(state.dtype)
        return Observed(cache, state)

    def ahead(self, time: Float[Array, " s"]) -> Modulations | None:
        """Modulations at flow times; None with stages, whose layers get what they read by rows."""
        return None if axis_size("stage") > 1 else self.dit.modulations(time_bucket(time))

    def act(
        self,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"],
        ahead: Modulations | None = None,
        *,
        observed: Observed,
        robot: Int[Array, "r k"],
        keys: UInt32[Array, "r k d"] | None = None,
    ) -> flow.Predicted:
        horizon, bucket = self.config.horizon, time_bucket(time)
        actions = self.action_encoder(noised.astype(self.dtype), bucket, robot)
        actions = actions + self.positions[:horizon].astype(self.dtype)
        shared = [observed.state[:, :, None]]
        if self.config.future_tokens:
            shared.append(self.future_tokens[...].astype(self.dtype))
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


def table(rows: int, width: int, rngs: nnx.Rngs, scale: float = 0.02) -> nnx.Param:
    """Random rows of that scale."""
    return nnx.Param(nnx.initializers.normal(scale)(rngs.params(), (rows, width)))


_STACK = r"^(vision/blocks|language/layers/(attention|mlp)|adapter/blocks|dit/(cross|self)_blocks)/"

_RULES = (
    (r"^embedding$", PartitionSpec(("tensor", "fsdp"))),
    (
        r"/(scale|scale_step|scale_mean|fp8_history)$|^vision/position$|^positions$"
        r"|^future_tokens$",
        PartitionSpec(),
    ),
    (_STACK + r"(q|k|v|qkv|up|gate)/kernel(/q)?$", PartitionSpec(None, "fsdp", "tensor")),
    (_STACK + r"out/kernel(/q)?$", PartitionSpec(None, "tensor", None, "fsdp")),
    (_STACK + r"down/kernel(/q)?$", PartitionSpec(None, "tensor", "fsdp")),
    (
        _STACK + r"((q|k|v|qkv|out)/lora_[ab]|down/lora_a|(q|k|v|qkv|up)/bias)$",
        PartitionSpec(None, "tensor"),
    ),
    (_STACK + r"(up|gate)/lora_b$", PartitionSpec(None, None, "tensor")),
    (_STACK + r"((up|gate)/lora_a|down/lora_b)$", PartitionSpec()),
    (r"_blocks/modulation/kernel$", PartitionSpec(None, "fsdp")),
    (r"^vision/(embed|head)/kernel$", PartitionSpec(None, "fsdp")),
    (r"^vision/small/kernel$", PartitionSpec()),
    (r"^vision/merger/(up|down)/kernel$", PartitionSpec("fsdp")),
    (r"^vision/deep_mergers/(up|down)/kernel$", PartitionSpec(None, "fsdp")),
    (r"^dit/(time_in|out)/kernel$", PartitionSpec(None, "fsdp")),
    (r"^dit/(time_out|modulation)/kernel$|^vision/film/kernel$", PartitionSpec("fsdp")),
    (
        r"^(state_encoder/.*|action_encoder/.*|action_decoder/hidden)/kernel$",
        PartitionSpec(None, None, "fsdp"),
    ),
    (r"^action_decoder/out/kernel$", PartitionSpec(None, "fsdp")),
    (rf"^(?!({_STACK[1:]})(q|k|v|qkv|up)/).*bias$", PartitionSpec()),
)
SHARDING_RULES = staged(_RULES, r"(language/layers|adapter/blocks|dit/(cross|self)_blocks)/")
"""Sharding of each parameter; every parameter matches exactly one rule. Heads and hidden units are
split over "tensor"."""
