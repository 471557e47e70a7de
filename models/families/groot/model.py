"""GR00T-N1.5 (arXiv 2503.14734): a vision-language model whose features the head reads.

The released model on packed rows: a sample costs only the views and tokens it has, and nothing
attends to padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.families.groot.eagle_turn import PICTURE, EagleTurn
from models.families.groot.head import Head, HeadConfig, HeadModel, table
from models.files.bounds import LARGEST_VOCABULARY, check_size, check_sizes
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import Layout, PackedBatch, prefix_tokens
from models.inputs.processor import Processor
from models.inputs.tokenizer import TextTokenizer
from models.layers.functional import Functional, Params
from models.layers.qwen.qwen3 import Qwen, QwenConfig
from models.layers.siglip import Siglip, SiglipConfig
from models.layers.vision.film import image_prompts
from models.model import Stack
from models.sharding import look_up

TAGS: Mapping[str, int] = {
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "new_embodiment": 31,
    "so100": 2,
    "unitree_g1": 3,
}
"""Rows of the embodiments' tables by tag, as released; the last two are LeRobot's."""


@dataclass(frozen=True)
class GrootConfig(HeadConfig, family="groot"):
    """Architecture; the defaults are the released 3B model's. `image_token`: id of the token that
    stands for image features in a prompt. `film`: the prompt also enters the vision stem.

    `padding`: "masked" hides it. "released" does what the release does: its adapter and
    cross-attention see padded places, so that an action depends on how far its sample was padded.
    A row then holds one sample, and its padding has the tokens that `prefix_source` names.
    """

    vision: SiglipConfig = field(default_factory=SiglipConfig)
    language: QwenConfig = field(default_factory=QwenConfig)
    image_size: int = 224
    vocabulary: int = 151_680
    image_token: int = 151_669
    future_tokens: int = 32
    film: bool = False
    padding: Literal["masked", "released"] = "masked"

    tags: ClassVar[Mapping[str, int]] = TAGS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("model.image_token", self.image_token, LARGEST_VOCABULARY, least=0)
        check_sizes("model", self, "future_tokens")
        self.check_adapter(self.language.width)
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
        prompts = processor.prompts
        if not isinstance(prompts, EagleTurn) or prompts.tokenizer is None:
            return
        if (id := prompts.picture_token) != self.image_token:
            raise ValueError(
                f"the tokenizer's {PICTURE} has the id {id}, but model.image_token is "
                f"{self.image_token}; give the tokenizer that the model was trained with."
            )

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

    @property
    def pipelined(self) -> tuple[int, ...]:
        """Depths of the stacks that stages share; the transformer's is in pairs of layers."""
        return self.language.depth, self.adapter.depth, self.dit.depth // 2

    acting: ClassVar[tuple[str, ...]] = ("padding",)
    own_inputs: ClassVar[str] = "models.families.groot.inputs:groot_batch"
    dataset_cameras: ClassVar[str] = "models.families.groot.modality:dataset_cameras"
    quantizable: ClassVar[str] = (
        r"^(vision/blocks|language/layers/(attention|mlp)|adapter/blocks|dit/(cross|self)_blocks)"
        r"/(q|k|v|out|up|gate|down)/"
    )


@dataclass(frozen=True)
class Groot(HeadModel):
    """The model as functions of (parameters, batch, key)."""

    config: GrootConfig

    def times(self, drawn: Float[Array, "r k c"]) -> Float[Array, "r k c"]:
        """Flow times as in the release: s / 0.999 with s ~ Beta(1.5, 1), so a little past 1."""
        return (drawn - 0.001) / 0.999**2

    def features(self, params: Params, batch: PackedBatch) -> Float[Array, "r p w"]:
        """The language model's features of the prefix, before the adapter."""
        return self._modules.bind(params).features(batch)

    @cached_property
    def _modules(self) -> "Functional[_Modules]":
        return Functional(partial(_Modules, self.config))


class _Modules(Head):
    def __init__(self, config: GrootConfig, rngs: nnx.Rngs):
        compute, width = config.compute, config.language.width
        film_width = width if config.film else None
        self.vision = Siglip(
            config.vision,
            config.image_size,
            width,
            film_width=film_width,
            compute=compute,
            rngs=rngs,
        )
        self.embedding = table(config.vocabulary, width, rngs, width**-0.5)
        self.language = Qwen(config.language, compute, rngs)
        super().__init__(config, width, rngs)

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

    def owners(self, batch: PackedBatch) -> Int[Array, "r p"]:
        if self.config.padding == "masked":
            return batch.prefix_segment
        if batch.state.shape[1] != 1:
            raise ValueError(
                f"model.padding is 'released', which needs one sample a row, but the batch has "
                f"{batch.state.shape[1]} slots; use 'masked' for packed rows."
            )
        return jnp.ones_like(batch.prefix_segment)
