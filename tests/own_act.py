"""A small policy as ACT (arXiv 2304.13705) without its style variable: no language, no flow. A
residual tower sees the cameras, an encoder mixes what they show with the state, and a decoder reads
a whole chunk from it at once. It has files of its own, and pictures of its own."""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image

from models.attention.attention import attend
from models.checkpoints.layout import exported
from models.checkpoints.rename import Rule, Table
from models.checkpoints.safetensors_format import new_model, write_file
from models.checkpoints.sources import open_safetensors
from models.config import from_json, to_json
from models.formats import CheckpointFormat, CheckpointInfo, register
from models.inputs.packed_batch import ImageSlots, image_segments, prefix_tokens
from models.inputs.pictures import PictureFit
from models.inputs.processor import Processor
from models.layers import stack
from models.layers.batch_norm import BatchNorm
from models.layers.functional import Functional
from models.layers.layers import Compute, Dense, feed_forward
from models.model import ModelConfig, Stack
from parallel.optimizer import OptimizerConfig
from tools.recipes.presets import RowsConfig, RunConfig


@dataclass(frozen=True)
class Stretched(PictureFit, kind="act-stretched"):
    """Pictures without their aspect."""

    def __call__(self, image):
        return np.asarray(Image.fromarray(image).resize(self.shape[::-1], Image.BILINEAR))


@dataclass(frozen=True)
class ActConfig(ModelConfig, family="small-act"):
    widths: tuple[int, ...] = (16, 32, 64)
    width: int = 64
    depth: int = 2
    heads: int = 4
    cameras: int = 4
    image_size: int = 48
    wrist: tuple[int, ...] = ()  # height and width of the pictures of all cameras but the first
    state_dim: int = 8
    action_dim: int = 8
    horizon: int = 8
    state_input: str = "token"
    compute: Compute = field(default_factory=lambda: Compute(dtype="float32"))

    @property
    def pictures(self):
        sizes = (self.image_size,) * 2, *([self.wrist] if self.wrist else [])
        halved = 2 ** len(self.widths)
        return tuple(ImageSlots(h, w, -(-h // halved) * -(-w // halved)) for h, w in sizes)

    quantizable = r"^(encoder|decoder)/.*(up|down)/kernel$"

    def build(self):
        return Act(self)

    def stacks(self, layout):
        acting = layout.samples * self.horizon
        return tuple(Stack(self.depth, self.width, n, 0) for n in (layout.prefix, acting))

    def processor(self, robots, tokenizer=None):
        sizes = self.state_dim, self.action_dim, self.horizon
        fits = Stretched(self.image_size), Stretched(self.wrist or self.image_size)
        cameras = max(len(robot.cameras) for robot in robots)
        fits = tuple(fits[min(i, 1)] for i in range(cameras)) if self.wrist else fits[0]
        return Processor(*sizes, "token", tuple(robots), None, fits)


@dataclass(frozen=True)
class Act:
    config: ActConfig

    def init(self, key):
        return self._modules.init(key)

    def loss(self, params, batch, key):
        weight = batch.action_mask * batch.weight[..., None, None]
        error = jnp.abs(self._modules.bind(params)(batch) - batch.actions)
        return jnp.sum(error * weight), jnp.sum(weight)

    def sample_actions(self, params, batch, noise, guidance=None):
        return self._modules.bind(params)(batch)

    @cached_property
    def _modules(self):
        return Functional(partial(Modules, self.config))


class Modules(nnx.Module):
    def __init__(self, config, rngs):
        self.config, width = config, config.width
        draw = partial(nnx.initializers.normal(0.02), rngs.params())
        pairs = zip((3, *config.widths), config.widths, strict=False)
        self.tower = nnx.List([Residual(*pair, rngs) for pair in pairs])
        self.proj = nnx.Linear(config.widths[-1], width, rngs=rngs)
        self.state = nnx.Linear(config.state_dim, width, rngs=rngs)
        self.places = nnx.List([nnx.Param(draw((x.tokens, width))) for x in config.pictures])
        self.camera = nnx.Param(draw((config.cameras, width)))
        self.query = nnx.Param(draw((config.horizon, width)))
        self.encoder = stack.stack_layers(lambda r: Layer(config, r), config.depth, rngs)
        self.decoder = stack.stack_layers(lambda r: Layer(config, r), config.depth, rngs)
        self.out = nnx.Linear(width, config.action_dim, rngs=rngs)

    def __call__(self, batch):
        rows, samples = batch.state.shape[:2]
        owner = image_segments(batch, [x.tokens for x in self.config.pictures])
        x, begin = [], 0
        for images, places in zip((batch.images, *batch.more_images), self.places, strict=True):
            slots = slice(begin, begin := begin + images.shape[1])
            seen = images.reshape(-1, *images.shape[2:]).astype(jnp.float32) / 127.5 - 1
            for block in self.tower:
                seen = block(seen, owner[:, slots].reshape(-1) > 0)
            seen = self.proj(seen.reshape(*images.shape[:2], -1, seen.shape[-1])) + places[...]
            seen += self.camera[batch.image_camera[:, slots]][:, :, None]
            x.append(seen.reshape(rows, -1, self.config.width))
        x = jnp.concatenate(x, axis=1)
        text = jnp.zeros((*batch.text.shape, self.config.width))
        x, segment = prefix_tokens(batch, x, text, self.state(batch.state)), batch.prefix_segment
        seen = through(self.encoder, x, segment, lambda x: x, segment)
        query = jnp.broadcast_to(self.query[...], (rows, samples, *self.query.shape))
        owner = jnp.repeat(jnp.arange(1, samples + 1), self.config.horizon)[None]
        owner = jnp.broadcast_to(owner, (rows, owner.shape[1]))
        x = query.reshape(rows, -1, self.config.width)
        x = through(self.decoder, x, owner, lambda x: seen, segment)
        return self.out(x).reshape(*batch.actions.shape)


def through(layers, x, segment, read, others):
    graph, weights = nnx.split(layers)
    layer = lambda x, w: (nnx.merge(graph, w)(x, segment, read(x), others), None)  # noqa: E731
    return stack.scan_layers(layer, x, weights)[0]


class Residual(nnx.Module):
    """A block of a ResNet that halves the sides of its pictures."""

    def __init__(self, inner, outer, rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.conv1 = conv(inner, outer, (3, 3), 2)
        self.conv2 = conv(outer, outer, (3, 3))
        self.short = conv(inner, outer, (1, 1), 2)
        self.bn1, self.bn2, self.bn3 = (BatchNorm(outer) for _ in range(3))

    def __call__(self, x, present):
        y = jax.nn.relu(self.bn1(self.conv1(x), present))
        y = self.bn2(self.conv2(y), present)
        return jax.nn.relu(y + self.bn3(self.short(x), present))


class Layer(nnx.Module):
    """Attention of `x` to what it reads in its segment, then a feed-forward layer."""

    def __init__(self, config, rngs):
        width, heads = config.width, (config.heads, config.width // config.heads)
        dense = partial(Dense, compute=config.compute, rngs=rngs)
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (dense(width, heads) for _ in range(3))
        self.join, self.up, self.down = dense(heads, width), dense(width, 512), dense(512, width)

    def __call__(self, x, segment, read, others):
        q, k, v = self.q(self.norm1(x)), self.k(read), self.v(read)
        x = x + self.join(attend(q, k, v, segment, others).out)
        return x + feed_forward(self.up, self.down, self.norm2(x), 0)


def table(config):
    """Our names with dots; kernels of convolutions are laid out as PyTorch's."""
    shapes = jax.eval_shape(config.build().init, jax.random.key(0))
    rules = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        ours = jax.tree_util.keystr(path, simple=True, separator="/")
        kernel = re.search("(conv.|short)/kernel", ours)
        axes = "h w i o" if kernel else " ".join("abcd"[: leaf.ndim])
        theirs = "o i h w" if kernel else axes
        rules.append(Rule(ours, ours.replace("/", "."), f"{theirs} -> {axes}"))
    return Table(tuple(rules))


def told(path):
    return json.loads((path / "act.json").read_text())


def inspect(path):
    config = from_json(ModelConfig, told(path)["model"], str(path))
    source = open_safetensors(path / "model.safetensors")
    return CheckpointInfo(config, None, source, table(config), FORMAT)


def processor(path):
    return from_json(Processor, told(path)["processor"], str(path))


def write(policy, folder):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = exported(policy.params, table(policy.model.config), "small-act")
    write_file(new_model(folder), arrays, np.dtype(np.float32), {})
    facts = {"model": to_json(policy.model.config), "processor": to_json(policy.processor)}
    (folder / "act.json").write_text(json.dumps(facts))


FORMAT = CheckpointFormat(
    "small-act",
    ("small-act",),
    recognises=lambda path: (Path(path) / "act.json").is_file(),
    inspect=inspect,
    acts=lambda path, info, _: (info.config, processor(path)),
    prepares=lambda path, info, config: processor(path),
    write=write,
)
register(FORMAT)
ACT = RunConfig(ActConfig(), RowsConfig(16, 2), optimizer=OptimizerConfig(learning_rate=1e-3))
