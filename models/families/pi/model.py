"""π0 (arXiv 2410.24164) and π0.5 (arXiv 2504.16054): a vision tower and a language model for the
prefix, a flow-matching action expert.

Everything runs on packed rows: a sample costs only the images and tokens it has, and several noised
chunks of it share one prefix (Mini-Diffuser's level-2 minibatch, arXiv 2505.09430). `Pi` consists
of pure functions over a nested dict of parameters; the layers behind it are Flax nnx modules.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.attention.ring import deal
from models.families.pi import targets
from models.files.bounds import LARGEST_HORIZON, check_reading, check_size
from models.flow import flow
from models.flow.flow import Solver
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.packed_batch import (
    ACTION_TOKENS,
    SUBTASK,
    Layout,
    PackedBatch,
    prefix_tokens,
)
from models.inputs.prompts import StateInput
from models.inputs.tokenizer import SMALLEST_VOCABULARY
from models.layers.functional import Functional, Params
from models.layers.gemma import (
    GEMMA_2B,
    GEMMA_300M,
    Cache,
    Expert,
    GemmaConfig,
    Modulations,
    Prefix,
)
from models.layers.layers import Compute, sincos_embedding
from models.layers.pipeline import staged
from models.layers.recomputation import with_remat
from models.layers.siglip import Siglip, SiglipConfig
from models.layers.vision.film import image_prompts
from models.model import ModelConfig, Stack
from models.sharding import Rules, axis_size, look_up

_KINDS = {"text": SUBTASK, "action_tokens": ACTION_TOKENS}


@dataclass(frozen=True)
class PiConfig(ModelConfig, family="pi"):
    """Architecture; the defaults are π0.5's, and `PI0` is π0's.

    `state_input`: the state is text (π0.5), a token that the expert reads ("suffix", π0), a token
    in the prefix ("token"), or left out ("none"). `time`: the flow time modulates the expert's
    norms (π0.5) or is joined to its input (π0). `film`: the prompt also enters the vision stem, as
    the mean of its words' embeddings; with `film_order`, each is first rotated by its place in the
    prompt. `chunks`: noised chunks per observation in training. `euler_steps` and `solver`: those
    of the sampler, see `flow.integrate`.

    Knowledge insulation (arXiv 2505.23705): with `insulate`, no gradient passes from the expert
    into what it reads. Beside flow matching, the language model learns from cross-entropies: of
    subtask text with weight `text_loss`, and of FAST action tokens with weight `action_token_loss`.
    `targets` is the number of places that a sample has for both; with 0, training takes as many as
    its data need.

    Trained real-time chunking (arXiv 2512.05964): with `rtc_max_delay`, a chunk's first steps, from
    0 to `rtc_max_delay` of them, are given in training as they are. Each step has its own flow time
    (0 for a given step), and the loss is of the other steps only. The policy can then be told the
    actions that will be executed before its chunk arrives (docs/chunking.md).
    """

    vision: SiglipConfig = field(default_factory=SiglipConfig)
    language: GemmaConfig = GEMMA_2B
    expert: GemmaConfig = GEMMA_300M
    image_size: int = 224
    vocabulary: int = 257_152
    state_dim: int = 32
    action_dim: int = 32
    horizon: int = 50
    state_input: StateInput = "text"
    time: Literal["modulation", "input"] = "modulation"
    film: bool = False
    film_order: bool = False
    chunks: int = 1
    euler_steps: int = 10
    solver: Solver = "euler"
    insulate: bool = False
    text_loss: float = 0.0
    action_token_loss: float = 0.0
    targets: int = 0
    rtc_max_delay: int = 0
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        check_reading(self)
        flow.check_solver("model.solver", self.solver)
        check_size("model.targets", self.targets, least=0)
        check_size("model.rtc_max_delay", self.rtc_max_delay, LARGEST_HORIZON, least=0)
        if self.rtc_max_delay >= self.horizon:
            raise ValueError(
                f"model.rtc_max_delay is {self.rtc_max_delay} with chunks of {self.horizon} steps "
                f"(model.horizon); a chunk whose every step is given leaves nothing to learn, so "
                f"it must be below the horizon."
            )
        language, expert = self.language, self.expert
        for name in ("depth", "heads", "kv_heads", "head_dim"):
            if getattr(language, name) != getattr(expert, name):
                raise ValueError(
                    f"model.language.{name} is {getattr(language, name)} but model.expert.{name} "
                    f"is {getattr(expert, name)}; the expert attends to the language model's keys, "
                    f"so they must be equal."
                )
        self.vision.check_image("model", self.image_size)
        if self.film_order and not self.film:
            raise ValueError(
                "model.film_order is true but model.film is false; the order of the prompt's words "
                "matters only where they enter the vision stem: set both, or neither."
            )
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise ValueError(
                f"model.vocabulary is {self.vocabulary}; bytes and special tokens alone need "
                f"{SMALLEST_VOCABULARY}."
            )
        for name in ("text_loss", "action_token_loss"):
            weight = getattr(self, name)
            if weight < 0 or (weight > 0 and self.targets == 1):
                raise ValueError(
                    f"model.{name} is {weight} with model.targets {self.targets}; a weight is at "
                    f"least 0, and one above 0 needs places for the tokens to predict: 2 or more, "
                    f"or 0 for as many as the data need."
                )

    @property
    def cross_entropies(self) -> dict[str, float]:
        """Weights of the losses of targets that are not 0."""
        weights = {"text": self.text_loss, "action_tokens": self.action_token_loss}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def tokens_per_image(self) -> int:
        return self.vision.tokens(self.image_size)

    def build(self) -> "Pi":
        return Pi(self)

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """Layers that a row passes through; the expert's tokens are those of all noised chunks."""
        vision, language, expert = self.vision, self.language, self.expert
        pictures = layout.images * layout.tokens_per_image
        keys = 2 * language.kv_heads * language.head_dim
        acting = layout.samples * self.chunks * self.horizon
        return (
            Stack(vision.depth, vision.width, pictures, 0, staged=False),
            Stack(language.depth, language.width, layout.prefix, keys),
            Stack(expert.depth, expert.width, acting, 0),
        )

    recomputing = with_remat

    @property
    def pipelined(self) -> tuple[int, ...]:
        """Depths of the stacks that stages share."""
        return (self.language.depth,)

    quantizable: ClassVar[str] = r"^(vision/blocks|(language|expert)/layers/(attention|mlp))/"


@dataclass(frozen=True)
class Pi:
    """The model as functions of (parameters, batch, key)."""

    config: PiConfig

    stacked = r"^(vision/blocks|(language|expert)/layers)/"
    groups: ClassVar[dict[str, str]] = {
        "vision": "vision",
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
        """The weighted sum of `terms`, and the weighted count of valid action entries; their ratio
        is the mean loss."""
        total, (count, _) = self.losses(params, batch, key)
        return total, count

    def losses(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]:
        """`loss` with its `terms`: the sum, then the count and each term."""
        terms, count = self.terms(params, batch, key)
        total = terms["flow"]
        for name, weight in self.config.cross_entropies.items():
            total += weight * terms[name]
        return total, (count, terms)

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of `terms`; empty if there is only one."""
        several = self.config.cross_entropies
        return ("flow", *several) if several else ()

    def terms(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[dict[str, Float[Array, ""]], Float[Array, ""]]:
        """The loss's terms, each as a sum, and the count that divides them.

        "flow": squared velocity error over valid action entries, averaged over a sample's chunks.
        With `rtc_max_delay`, only entries that are not given are in the error and in the count.
        "text" and "action_tokens", if their weight is not 0: a sample's cross-entropy, in nats per
        token, times its number of valid action entries. So each term divided by the count is a mean
        over samples, and a sample has the same weight in every term, whatever it is packed with.

        Raises:
          ValueError: a cross-entropy has a weight, but the batch's layout has no targets.
        """
        config = self.config
        modules = self._modules.bind(params)
        hidden, cache = modules.read(batch)
        shape = (config.horizon, config.action_dim)
        time, noise = flow.draw(key, batch.sample_id, config.chunks, shape)
        learnt = None
        if config.rtc_max_delay:
            delay = flow.delays(key, batch.sample_id, config.chunks, config.rtc_max_delay)
            learnt = jnp.arange(config.horizon) >= delay[..., None]
            time = jnp.where(learnt, time[..., None], 0)
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        velocity = modules.act(noised, time, cache=modules.shown(batch, cache)).velocity
        with jax.named_scope("loss"):
            error = (velocity - target) ** 2
        weight = batch.action_mask * batch.weight[..., None, None]
        if learnt is None:
            terms = {"flow": jnp.sum(error.mean(2) * weight)}
        else:
            terms = {"flow": jnp.sum((error * learnt[..., None]).mean(2) * weight)}
            weight *= learnt.mean(2)[..., None]
        if config.cross_entropies:
            kinds = {name: _KINDS[name] for name in config.cross_entropies}
            means = targets.cross_entropies(hidden, modules.embedding[...], batch, kinds)
            terms |= {name: jnp.sum(mean * weight.sum((2, 3))) for name, mean in means.items()}
        return terms, jnp.sum(weight)

    def observe(self, params: Params, batch: PackedBatch) -> Cache:
        """The language model's cache of the prefix, and of the subtask if the batch has one, for
        `field`; rows come before layers. Depends only on the parameters that `observing` names."""
        return self._modules.bind(params).read(batch)[1].swapped()

    @property
    def observing(self) -> str:
        state = "|state_in" if self.config.state_input == "token" else ""
        return rf"^(vision|embedding|language{state})(/|$)"

    def field(
        self, params: Params, batch: PackedBatch, observed: Cache | None = None
    ) -> flow.Field:
        """The batch's velocity field. If `observed` is None, the observation is read once, here."""
        modules = self._modules.bind(params)
        cache = modules.read(batch)[1] if observed is None else observed.swapped()
        return partial(modules.act, cache=modules.shown(batch, cache))

    @property
    def feature_width(self) -> int:
        return self.config.expert.width

    def predict_text(
        self,
        params: Params,
        batch: PackedBatch,
        length: int,
        begin: int,
        end: int,
        below: int | None = None,
    ) -> Int[Array, "r k length"]:
        """The likeliest next tokens after `begin`, one by one (greedy), up to `length` tokens.

        They end at `end`, which fills the rest. `begin=tokenizer.begin` asks for the subtask,
        `begin=tokenizer.end` for FAST action tokens, which see the subtask if the batch has one.
        Only ids less than `below` are chosen: `below=tokenizer.size` restricts a subtask to words.
        """
        modules = self._modules.bind(params)
        _, cache = modules.read(batch)
        return targets.greedy(
            modules.language, modules.embedded, modules.embedding[...], cache,
            slots=batch.state.shape[1], length=length, begin=begin, end=end, below=below,
        )  # fmt: skip

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
    ) -> Float[Array, "r k h a"]:
        """Normalised action chunks by `config.solver`, in `config.euler_steps` steps;
        `guidance` pulls them towards given actions, or makes them begin with these."""
        field, ahead = self.field(params, batch), self._modules.bind(params).ahead
        return flow.sample(
            field, noise, self.config.euler_steps, guidance, self.config.solver, ahead
        )

    @cached_property
    def _modules(self) -> "Functional[_Modules]":
        return Functional(partial(_Modules, self.config))


class _Modules(nnx.Module):
    def __init__(self, config: PiConfig, rngs: nnx.Rngs):
        self.config = config
        compute = config.compute
        self.dtype = jnp.dtype(compute.dtype)
        width, action_width = config.language.width, config.expert.width
        self.vision = Siglip(
            config.vision,
            config.image_size,
            width,
            film_width=width if config.film else None,
            compute=compute,
            rngs=rngs,
        )
        self.embedding = nnx.Param(
            nnx.initializers.normal(width**-0.5)(rngs.params(), (config.vocabulary, width))
        )
        if config.state_input in ("token", "suffix"):
            state_width = width if config.state_input == "token" else action_width
            self.state_in = nnx.Linear(config.state_dim, state_width, rngs=rngs)
        self.language = Prefix(config.language, compute, rngs)
        time_width = action_width * (2 if config.time == "input" else 1)
        self.action_in = nnx.Linear(config.action_dim, action_width, rngs=rngs)
        self.time_in = nnx.Linear(time_width, action_width, rngs=rngs)
        self.time_out = nnx.Linear(action_width, action_width, rngs=rngs)
        self.expert = Expert(config.expert, config.time == "modulation", compute, rngs)
        self.action_out = nnx.Linear(action_width, config.action_dim, rngs=rngs)

    def read(self, batch: PackedBatch) -> tuple[Float[Array, "r k l w"] | None, Cache]:
        """Runs the language model over prefix and targets. Returns the targets' last hidden states,
        and the keys and values of the prefix and of the subtask among the targets."""
        config, batch = self.config, deal(batch)
        rows = batch.images.shape[0]
        places = config.vision.tokens(config.image_size)
        text = self.embedded(batch.text)
        condition = None
        if config.film:
            condition = image_prompts(batch, text, places, ordered=config.film_order)
        images = self.vision(batch.images.reshape(-1, *batch.images.shape[2:]), condition)
        more = [text]
        if config.state_input == "token":
            more.append(self.state_in(batch.state).astype(self.dtype))
        x = prefix_tokens(batch, images, *more)
        segment, position = batch.prefix_segment, batch.prefix_position
        cache = self.language(x, segment, position, batch.weight.shape[1])
        if not batch.targets.shape[2]:
            return None, cache
        hidden, (k, v) = self.language.read(self.embedded(batch.targets), cache)
        slot = jnp.arange(1, batch.targets.shape[1] + 1)[:, None]
        segment = jnp.where(batch.target_kind == SUBTASK, slot, 0).reshape(rows, -1)
        k, v = (z.reshape(*z.shape[:2], -1, *z.shape[4:]) for z in (k, v))
        return hidden, cache.extend(Cache(k, v, segment))

    def shown(self, batch: PackedBatch, cache: Cache) -> Cache:
        """Cache that the expert reads: the language model's cache, and π0's state token."""
        if self.config.insulate:
            cache = jax.lax.stop_gradient(cache)
        if self.config.state_input == "suffix":
            state = self.state_in(batch.state).astype(self.dtype)[:, :, None, None]
            cache = cache.extend(self.expert(state, None, cache)[1])
        return cache

    @jax.named_scope("embedding")
    def embedded(self, tokens: Int[Array, "*b t"]) -> Float[Array, "*b t w"]:
        x = look_up(self.embedding[...], tokens) * self.config.language.width**0.5
        return x.astype(self.dtype)

    def act(
        self,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"] | Float[Array, "r k c h"],
        ahead: Modulations | None = None,
        *,
        cache: Cache,
    ) -> flow.Predicted:
        x, condition = self._entered(noised, time)
        x, _ = self.expert(x, condition, cache, ahead)
        features = x.astype(jnp.float32)
        with jax.named_scope("action"):
            return flow.Predicted(self.action_out(features), features)

    def ahead(self, time: Float[Array, " s"]) -> Modulations | None:
        """Modulations at flow times; None where time enters otherwise, and on a mesh with stages,
        whose layers are given what they read by rows."""
        if self.config.time != "modulation" or axis_size("stage") > 1:
            return None
        return self.expert.modulations(self._condition(time))

    @jax.named_scope("action")
    def _entered(
        self,
        noised: Float[Array, "r k c h a"],
        time: Float[Array, "r k c"] | Float[Array, "r k c h"],
    ) -> tuple[Float[Array, "r k c h w"], Float[Array, "r k c #h w"] | None]:
        """The expert's input, and what modulates its norms."""
        time = time if time.ndim == noised.ndim - 1 else time[..., None]
        x, condition = self.action_in(noised), None
        if self.config.time == "modulation":
            condition = self._condition(time)
        else:
            embedded = sincos_embedding(time, self.config.expert.width)
            joined = jnp.concatenate([x, jnp.broadcast_to(embedded, x.shape)], axis=-1)
            x = self.time_out(jax.nn.swish(self.time_in(joined)))
        return x.astype(self.dtype), condition

    @jax.named_scope("action")
    def _condition(self, time: Float[Array, "*b"]) -> Float[Array, "*b w"]:
        embedded = sincos_embedding(time, self.config.expert.width)
        hidden = self.time_out(jax.nn.swish(self.time_in(embedded)))
        return jax.nn.swish(hidden).astype(self.dtype)


_VISION, _LAYERS = r"^vision/blocks/", r"^(language|expert)/layers/(attention|mlp)/"

_RULES = (
    (r"^embedding$", PartitionSpec(("tensor", "fsdp"))),
    (r"/(scale|scale_step|scale_mean|fp8_history)$|^vision/position$", PartitionSpec()),
    (
        rf"({_VISION}(q|k|v|up)|{_LAYERS}(q|up|gate))/kernel(/q)?$",
        PartitionSpec(None, "fsdp", "tensor"),
    ),
    (rf"{_LAYERS}(k|v)/kernel(/q)?$|/norm[12]/modulation/kernel$", PartitionSpec(None, "fsdp")),
    (rf"({_VISION}|{_LAYERS})out/kernel(/q)?$", PartitionSpec(None, "tensor", None, "fsdp")),
    (rf"({_VISION}|{_LAYERS})down/kernel(/q)?$", PartitionSpec(None, "tensor", "fsdp")),
    (
        rf"{_LAYERS}((q|out)/lora_[ab]|down/lora_a)$"
        rf"|{_VISION}((q|k|v|out)/lora_[ab]|down/lora_a|(q|k|v|up)/bias)$",
        PartitionSpec(None, "tensor"),
    ),
    (rf"{_LAYERS}(up|gate)/lora_b$|{_VISION}up/lora_b$", PartitionSpec(None, None, "tensor")),
    (rf"{_LAYERS}((k|v)/lora_[ab]|(up|gate)/lora_a|down/lora_b)$", PartitionSpec()),
    (rf"{_VISION}(up/lora_a|down/lora_b)$", PartitionSpec()),
    (r"^vision/(embed|head)/kernel$", PartitionSpec(None, "fsdp")),
    (r"^vision/film/kernel$|^expert/norm/.*kernel$", PartitionSpec("fsdp")),
    (r"^(action_in|action_out|time_in|time_out|state_in|vision/small)/kernel$", PartitionSpec()),
    (rf"^(?!{_VISION[1:]}(q|k|v|up)/).*bias$", PartitionSpec()),
)
SHARDING_RULES = staged(_RULES, r"(language|expert)/layers/")
"""Sharding of each parameter; every parameter matches exactly one rule. Heads and hidden units are
split over "tensor", except the one key-value head that all queries share."""

PI0 = PiConfig(state_input="suffix", time="input")
"""π0's architecture at its released sizes."""
