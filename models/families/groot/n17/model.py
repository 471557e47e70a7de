"""GR00T-N1.7: Qwen3-VL cut to its first layers, whose features the head reads, words and pictures
in turn.

A picture has as many tokens as its size asks for, so the model takes pictures of any size; nothing
attends to padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from models.families.groot.head import Head, HeadConfig, HeadModel, table
from models.families.groot.n17.qwen_turn import QwenTurn
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.inputs.history import NOW, History
from models.inputs.packed_batch import ImageSlots, Layout, PackedBatch, prefix_tokens
from models.inputs.pictures import Antialiased, Size, shape_of
from models.inputs.processor import Processor
from models.inputs.tokenizer import TextTokenizer
from models.layers.dit import TransformerConfig
from models.layers.functional import Functional
from models.layers.qwen.qwen3 import Qwen, QwenConfig
from models.layers.qwen.vision import QwenVision, QwenVisionConfig, picture_places
from models.model import Stack
from models.sharding import ROWS, constrain, look_up

TAGS: Mapping[str, int] = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}
"""Rows of the embodiments' tables by tag, where a checkpoint does not say them."""

_LANGUAGE = QwenConfig(depth=16, base=5e6, sections=(24, 20, 20), normed=False)
_DIT = TransformerConfig(depth=32, heads=32, head_dim=48)


@dataclass(frozen=True)
class Groot17Config(HeadConfig, family="groot17"):
    """Architecture; the defaults are the released 3B model's. `more_sizes`: of pictures of further
    cameras, in the order of the cameras; if empty, all have `image_size`. `text_every`: every so
    many cross-attentions of the head read words, and the others pictures; 0: each reads all.
    """

    vision: QwenVisionConfig = field(default_factory=QwenVisionConfig)
    language: QwenConfig = _LANGUAGE
    dit: TransformerConfig = _DIT
    image_size: Size = 256
    more_sizes: tuple[Size, ...] = ()
    vocabulary: int = 151_936
    state_dim: int = 132
    action_dim: int = 132
    horizon: int = 40
    text_every: int = 2
    observed: History = NOW

    tags: ClassVar[Mapping[str, int]] = TAGS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_adapter(self.language.width)
        edge = self.vision.edge
        for size in (self.image_size, *self.more_sizes):
            if any(side % edge for side in shape_of(size)):
                raise ValueError(
                    f"model.image_size is {size}, but the tower reads tokens of {edge} × {edge} "
                    f"pixels; give multiples of {edge}."
                )

    @property
    def pictures(self) -> tuple[ImageSlots, ...]:
        shapes = dict.fromkeys(map(shape_of, (self.image_size, *self.more_sizes)))
        grids = map(self.vision.grid, shapes)
        return tuple(
            ImageSlots(*shape, rows * columns)
            for shape, (rows, columns) in zip(shapes, grids, strict=True)
        )

    @property
    def tokens_per_image(self) -> int:
        return self.pictures[0].tokens

    def for_pictures(self, shapes: Sequence[tuple[int, int]]) -> "Groot17Config":
        """The same model for pictures of these heights and widths."""
        if not shapes:
            return self
        return replace(self, image_size=shapes[0], more_sizes=tuple(shapes[1:]))

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """See `ModelConfig.processor`; with a BPE tokenizer, prompts are turns of Qwen's chat."""
        made = super().processor(robots, tokenizer)
        if isinstance(tokenizer, ByteBpe):
            made = replace(made, prompts=QwenTurn(tokenizer))
        if self.more_sizes:
            sizes = (self.image_size, *self.more_sizes)
            made = replace(made, pictures=tuple(map(Antialiased, sizes)))
        return made

    def build(self) -> "Groot17":
        return Groot17(self)

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """Layers that a row passes through, in the order of N1.5's."""
        vision, language, adapter, dit = self.vision, self.language, self.adapter, self.dit
        patches = 4 * layout.image_places
        keys = 2 * language.kv_heads * language.head_dim
        acting = layout.samples * self.chunks * (1 + self.future_tokens + self.horizon)
        return (
            Stack(vision.depth, vision.width, patches, 0, staged=False),
            Stack(language.depth, language.width, layout.prefix, keys),
            Stack(adapter.depth, adapter.width, layout.prefix, 2 * adapter.width),
            Stack(dit.depth, dit.width, acting, 0),
        )

    @property
    def pipelined(self) -> tuple[int, ...]:
        """Depths of the stacks that stages share; the transformer's is in pairs of layers."""
        return self.language.depth, self.adapter.depth, self.dit.depth // 2

    own_inputs: ClassVar[str] = "models.families.groot.n17.inputs:groot17_batch"
    quantizable: ClassVar[str] = (
        r"^(vision/blocks|language/layers/(attention|mlp)|adapter/blocks|dit/(cross|self)_blocks)"
        r"/(q|k|v|qkv|out|up|gate|down)/"
    )


@dataclass(frozen=True)
class Groot17(HeadModel):
    """The model as functions of (parameters, batch, key)."""

    config: Groot17Config

    @cached_property
    def _modules(self) -> "Functional[_Modules]":
        return Functional(partial(_Modules, self.config))


class _Modules(Head):
    def __init__(self, config: Groot17Config, rngs: nnx.Rngs):
        compute, width = config.compute, config.language.width
        self.vision = QwenVision(config.vision, width, compute, rngs)
        self.embedding = table(config.vocabulary, width, rngs, width**-0.5)
        self.language = Qwen(config.language, compute, rngs)
        super().__init__(config, width, rngs, config.text_every)

    def features(self, batch: PackedBatch) -> Float[Array, "r p w"]:
        config, rows = self.config, len(batch.text)
        with jax.named_scope("embedding"):
            text = look_up(self.embedding[...], batch.text).astype(self.dtype)
        arrays = _arrays(batch)
        seen = [self.vision(x.reshape(-1, *x.shape[2:])) for x in arrays]
        tokens, deep = (
            jnp.concatenate([x.reshape(rows, -1, *x.shape[2:]) for x in each], axis=1)
            for each in zip(*seen, strict=True)
        )
        x = prefix_tokens(batch, tokens, text)
        rope = None
        if config.language.sections:
            grids = tuple(config.vision.grid(x.shape[2:4]) for x in arrays)
            rope = config.language.pairs(picture_places(batch, grids))
        added = None
        if config.vision.deep:
            at = jnp.minimum(batch.prefix_source, tokens.shape[1] - 1)[..., None, None]
            added = jnp.take_along_axis(deep, at, axis=1)
            added = constrain(added * self.pictured(batch)[..., None, None], ROWS, "context")
        return self.language(x, batch.prefix_segment, batch.prefix_position, rope, added)

    def pictured(self, batch: PackedBatch) -> Bool[Array, "r p"]:
        grids = [(x.shape[1], *self.config.vision.grid(x.shape[2:4])) for x in _arrays(batch)]
        return batch.prefix_source < sum(n * high * wide for n, high, wide in grids)


def _arrays(batch: PackedBatch) -> tuple[Array, ...]:
    return batch.images, *batch.more_images
