"""π0-FAST (arXiv 2501.09747): a vision tower and a language model that writes the action chunk
itself, one FAST token after the other.

Pictures and prompt are a prefix with bidirectional attention, the written tokens are causal, and
the loss is their cross-entropy. Sampling reads the prefix once and keeps every token's keys and
values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.attention.ring import deal
from models.families.pi import targets
from models.families.pi.fast.grammar import Grammar
from models.families.pi.fast.written import WrittenTokens, opening
from models.families.pi.model import SHARDING_RULES
from models.files.bounds import check_reading, check_size
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.action_tokens import last_free
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import ACTION_TOKENS, Layout, PackedBatch, prefix_tokens
from models.inputs.processor import Processor
from models.inputs.prompts import TASK_AND_STATE, TemplatePrompt
from models.inputs.tokenizer import SentencePiece, TextTokenizer
from models.layers.functional import Functional, Params
from models.layers.gemma import GEMMA_2B, Cache, GemmaConfig, Prefix
from models.layers.layers import Compute
from models.layers.recomputation import with_remat
from models.layers.siglip import Siglip, SiglipConfig
from models.model import ModelConfig, Stack
from models.sharding import Rules, look_up

Writing = Literal["plain", "openpi", "lerobot"]


@dataclass(frozen=True)
class Pi0FastConfig(ModelConfig, family="pi0_fast"):
    """Architecture; the defaults are openpi's.

    `max_decoding_steps`: largest number of FAST tokens in a chunk when acting. `targets`: places in
    training for a chunk's tokens and those around them; 0 leaves the number to the data.
    `temperature`: that of sampling a token; 0 takes the likeliest. `writing`: "plain" acts exactly
    as it was trained. The authors' implementations differ a little: "openpi" leaves out a position
    before the first token that it writes when acting, and in "lerobot" the prefix sees its last
    token only when acting. `head`: tokens are scored by a separate table, not by the embedding.
    """

    vision: SiglipConfig = field(default_factory=SiglipConfig)
    language: GemmaConfig = GEMMA_2B
    image_size: int = 224
    vocabulary: int = 257_152
    state_dim: int = 32
    action_dim: int = 32
    horizon: int = 32
    max_decoding_steps: int = 256
    targets: int = 0
    temperature: float = 0.0
    writing: Writing = "openpi"
    head: bool = False
    compute: Compute = field(default_factory=Compute)

    state_input = "text"
    acting: ClassVar[tuple[str, ...]] = ("max_decoding_steps",)
    renamed: ClassVar[Mapping[str, str]] = {"steps": "max_decoding_steps"}

    def __post_init__(self) -> None:
        check_reading(self, "max_decoding_steps")
        check_size("model.targets", self.targets, least=0)
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"model.temperature is {self.temperature}; expected 0 to 100.")
        self.vision.check_image("model", self.image_size)

    @property
    def tokens_per_image(self) -> int:
        return self.vision.tokens(self.image_size)

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """See `ModelConfig.processor`; the prompt ends after the state, in the text format of
        `writing`: "openpi" has the prompt in lower case, with its line breaks, "lerobot" the token
        that begins a text at its end."""
        return replace(
            super().processor(robots, tokenizer),
            prompts=TemplatePrompt(
                tokenizer,
                template=(TASK_AND_STATE,),
                normalize="lower" if self.writing == "openpi" else "spaces",
                begin_last=self.writing == "lerobot",
            ),
            targets=WrittenTokens(None, last_free(self.vocabulary, tokenizer)),
        )

    def check_processor(self, processor: Processor) -> None:
        super().check_processor(processor)
        text = None if processor.prompts is None else processor.prompts.tokenizer
        own, reader = self.processor(processor.embodiments, text), processor.prompts
        if own.prompts is None or reader != replace(own.prompts, limit=processor.text_limit):
            raise ValueError(
                f"its prompts are read by {reader and replace(reader, tokenizer=None)!r}, but "
                f"model.writing is '{self.writing}'; a policy's inputs must be prepared as they "
                "were in training."
            )
        if not isinstance(processor.targets, WrittenTokens):
            raise ValueError(
                "its chunks are not written as action tokens, as this model writes them."
            )
        if isinstance(text, SentencePiece) and text.size != self.vocabulary:
            raise ValueError(
                f"the tokenizer has {text.size} ids, but model.vocabulary is {self.vocabulary}, "
                "and FAST's tokens are counted down from its end; give the tokenizer that the "
                "model was trained with."
            )

    @property
    def cross_entropies(self) -> dict[str, float]:
        return {"action_tokens": 1.0}

    def build(self) -> "Pi0Fast":
        return Pi0Fast(self)

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """Layers that a row passes through; written tokens pass the language model's too."""
        vision, language = self.vision, self.language
        pictures = layout.images * layout.tokens_per_image
        places = layout.prefix + layout.samples * layout.targets
        keys = 2 * language.kv_heads * language.head_dim
        return (
            Stack(vision.depth, vision.width, pictures, 0, staged=False),
            Stack(language.depth, language.width, places, keys),
        )

    recomputing = with_remat
    quantizable: ClassVar[str] = r"^(vision/blocks|language/layers/(attention|mlp))/"


@dataclass(frozen=True)
class Pi0Fast:
    """The model as functions of (parameters, batch, key). Only a model that `reading` returned for
    a `Processor` can write: `grammar` is the grammar of its chunks, `top` the id of FAST's token 0
    and `opening` the ids of the tokens before a chunk."""

    config: Pi0FastConfig
    grammar: Grammar | None = None
    top: int = 0
    opening: tuple[int, ...] = ()

    groups: ClassVar[dict[str, str]] = {"vision": "vision", "language": "embedding|head|language"}

    stacked = r"^(vision/blocks|language/layers)/"

    @property
    def sharding_rules(self) -> Rules:
        return (*SHARDING_RULES, (r"^head$", PartitionSpec(("tensor", "fsdp"))))

    def reading(self, processor: Processor) -> "Pi0Fast":
        """The model that writes chunks that `processor` can read.

        Raises:
          ValueError: `processor` has no tokenizer for actions or for text, or a chunk takes more
            tokens than `config.max_decoding_steps`.
        """
        dims = tuple(len(robot.actions.offset) for robot in processor.embodiments)
        config = self.config
        tokens = processor.action_tokens
        grammar = Grammar(tokens.found(), config.horizon, dims, config.max_decoding_steps)
        before = tuple(opening(processor.tokenizer).tolist())
        return replace(self, grammar=grammar, top=tokens.top, opening=before)

    def init(self, key: PRNGKeyArray) -> Params:
        return self._modules.init(key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sum over samples of the cross-entropy, in nats per token, times the (weighted) number of
        valid action entries; and the total of those numbers.

        Raises:
          ValueError: the batch has no places for targets.
        """
        modules = self._modules.bind(params)
        hidden = modules.written(batch) if batch.targets.shape[2] else None
        kinds = {"action_tokens": ACTION_TOKENS}
        means = targets.cross_entropies(hidden, modules.scorer, batch, kinds)
        weight = (batch.action_mask * batch.weight[..., None, None]).sum((2, 3))
        return jnp.sum(means["action_tokens"] * weight), jnp.sum(weight)

    def write(
        self, params: Params, batch: PackedBatch, noise: Float[Array, "r k h a"]
    ) -> tuple[Int[Array, "r k n"], Int[Array, "r k"]]:
        """FAST tokens that spell exactly one chunk, and their number.

        At each step, only tokens after which a chunk can still be finished are allowed. The
        likeliest of them is taken, or one is sampled at `config.temperature`; all randomness comes
        from the bits of the sample's `noise`.

        Raises:
          ValueError: the model was given no processor.
        """
        grammar = self._grammar
        config, modules = self.config, self._modules.bind(params)
        cache, last = modules.begun(batch)
        opening = jnp.asarray(self.opening, jnp.int32)
        opening = jnp.broadcast_to(opening, (*last.shape, len(opening)))
        first = jnp.concatenate([last[..., None], opening], axis=-1)
        depth, rows, _, *heads = cache.k.shape
        room = first.shape[2] + config.max_decoding_steps
        past = jnp.zeros((depth, rows, last.shape[1], room, *heads), cache.k.dtype)
        size = grammar.fast.size
        table = modules.scorer[self.top - size + 1 : self.top + 1][::-1].astype(past.dtype)
        seeds = jax.lax.bitcast_convert_type(noise[..., 0, 0], jnp.uint32)
        keys = jax.vmap(jax.vmap(jax.random.key))(seeds)

        def choose(hidden: Array, rest: Any, at: Array | int) -> Array:
            scores = targets.logits(hidden, table)
            if config.temperature:
                each = jax.vmap(jax.vmap(lambda k: jax.random.fold_in(k, at)))(keys)
                drawn = jax.vmap(jax.vmap(lambda k: jax.random.gumbel(k, (size,))))(each)
                scores = scores / config.temperature + drawn
            allowed = grammar.allowed(rest, config.max_decoding_steps - at)
            return jnp.argmax(jnp.where(allowed, scores, -jnp.inf), axis=-1).astype(jnp.int32)

        def read(tokens: Array, own: Any, start: Array | int) -> tuple[Array, Any]:
            shift = jnp.where(start + jnp.arange(tokens.shape[2]) > 0, self._gap, 0)
            hidden, own = modules.language.read(
                modules.embedded(tokens), cache, own, start, shift=shift
            )
            return hidden[:, :, -1], own

        def take(i: Array | int, hidden: Array, state: tuple) -> tuple:
            token, written, count, rest, done = state
            token = choose(hidden, rest, i)
            written = written.at[:, :, i].set(jnp.where(done, 0, token))
            after = grammar.read(rest, token)
            rest = jax.tree.map(lambda old, new: jnp.where(done, old, new), rest, after)
            return token, written, count + ~done, rest, done | (rest.coefficients == 0)

        def step(state: tuple) -> tuple:
            i, own, so_far = state
            token = so_far[0]
            hidden, own = read((self.top - token)[..., None], own, first.shape[2] + i - 1)
            return i + 1, own, take(i, hidden, so_far)

        hidden, own = read(first, (past, past), 0)
        nothing = jnp.zeros(last.shape, jnp.int32)
        written = jnp.zeros((*last.shape, config.max_decoding_steps), jnp.int32)
        rest, empty = grammar.begin(batch.embodiment), jnp.asarray(batch.weight) == 0
        begun = jnp.int32(1), own, take(0, hidden, (nothing, written, nothing, rest, empty))
        _, _, (_, written, count, *_) = jax.lax.while_loop(lambda s: ~s[2][4].all(), step, begun)
        return written, count

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
    ) -> Float[Array, "r k h a"]:
        """Normalised action chunks, with as many dims as the robot has; 0 in the others.

        Raises:
          ValueError: the model was given no processor, or there is a chunk to continue.
        """
        if guidance is not None:
            raise ValueError(
                "π0-FAST writes a chunk token by token, so it cannot continue the previous chunk "
                "(real-time chunking); leave out the previous chunk."
            )
        written, count = self.write(params, batch, noise)
        chunks = jax.vmap(jax.vmap(self._grammar.chunk))(written, count, batch.embodiment)
        dims = batch.actions.shape[-1] - chunks.shape[-1]
        return jnp.pad(chunks, ((0, 0), (0, 0), (0, 0), (0, dims)))

    @property
    def _grammar(self) -> Grammar:
        if self.grammar is None:
            raise ValueError(
                "This π0-FAST has no FAST tokenizer with which to write chunks; act through a "
                "Policy whose processor has one."
            )
        return self.grammar

    @property
    def _gap(self) -> int:
        """Number of positions skipped before the first written token."""
        return int(self.config.writing == "openpi")

    @cached_property
    def _modules(self) -> "Functional[_Modules]":
        return Functional(partial(_Modules, self.config))


class _Modules(nnx.Module):
    def __init__(self, config: Pi0FastConfig, rngs: nnx.Rngs):
        self.config = config
        compute, width = config.compute, config.language.width
        self.dtype = jnp.dtype(compute.dtype)
        self.vision = Siglip(
            config.vision, config.image_size, width, film_width=None, compute=compute, rngs=rngs
        )

        def table() -> nnx.Param:
            begin = nnx.initializers.normal(width**-0.5)
            return nnx.Param(begin(rngs.params(), (config.vocabulary, width)))

        self.embedding = table()
        if config.head:
            self.head = table()
        self.language = Prefix(config.language, compute, rngs)

    @property
    def scorer(self) -> Float[Array, "v w"]:
        """The table by which words are scored."""
        return self.head[...] if self.config.head else self.embedding[...]

    def begun(self, batch: PackedBatch, *, blind: bool = False) -> tuple[Cache, Int[Array, "r k"]]:
        """The language model's cache of each prefix without its last token, and that token, from
        which writing continues. When read again, that token attends to the others and itself as it
        did in the prefix.

        Args:
          blind: the prefix does not see its last token.
        """
        config, batch = self.config, deal(batch)
        pictured = batch.images.shape[1] * config.vision.tokens(config.image_size)
        images = self.vision(batch.images.reshape(-1, *batch.images.shape[2:]), None)
        x = prefix_tokens(batch, images, self.embedded(batch.text))
        slot = jnp.arange(1, batch.state.shape[1] + 1)[:, None]
        whose = batch.prefix_segment[:, None] == slot
        length = whose.sum(-1, keepdims=True)
        ends = whose & (batch.prefix_position[:, None] == length - 1)
        before = jnp.where(ends.any(1), 0, batch.prefix_segment)
        seen = before if blind else batch.prefix_segment
        cache = self.language(x, seen, batch.prefix_position, len(slot))
        at = jnp.where(ends, batch.prefix_source[:, None], 0).max(-1) - pictured
        last = jnp.take_along_axis(batch.text, jnp.maximum(at, 0), axis=1)
        return cache._replace(segment=before), last

    def written(self, batch: PackedBatch) -> Float[Array, "r k l w"]:
        """Last hidden states of the targets, the first of which is the prefix's last token."""
        cache, last = self.begun(batch, blind=self.config.writing == "lerobot")
        continued = jnp.asarray(batch.targets).at[:, :, 0].set(last)
        return self.language.read(self.embedded(continued), cache)[0]

    def embedded(self, tokens: Int[Array, "*b t"]) -> Float[Array, "*b t w"]:
        x = look_up(self.embedding[...], tokens) * self.config.language.width**0.5
        return x.astype(self.dtype)
