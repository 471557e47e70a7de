"""A small policy with language, flow and memory in one file, as a user would write it: a prefix of
pictures, words and state, and an action expert that reads it, beside past states and pictures.

Its preparation is its own, in the manner of SmolVLA (arXiv 2506.01844): prompts end with a new
line, and pictures stand in the lower right corner of a black one. Its
checkpoints are a format of its own too, `smol.npz`; it reads no file of LeRobot's SmolVLA.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from models.attention.attention import attend
from models.checkpoints.rename import Rule, Table
from models.checkpoints.sources import CheckpointSource
from models.config import from_json, model_config, to_json
from models.flow import flow
from models.formats import CheckpointFormat, CheckpointInfo, register
from models.inputs.history import NOW, History
from models.inputs.packed_batch import image_segments, prefix_tokens
from models.inputs.pictures import PictureFit, resize_with_pad
from models.inputs.processor import Processor
from models.inputs.prompts import PromptReader
from models.layers import stack
from models.layers.functional import Functional
from models.layers.layers import Compute, Dense, feed_forward, sincos_embedding
from models.layers.siglip import Siglip, SiglipConfig
from models.model import ModelConfig
from parallel.optimizer import OptimizerConfig
from tools.recipes.presets import RowsConfig, RunConfig

TOWER = SiglipConfig(width=64, depth=2, hidden=128, heads=4, patch=8)


@dataclass(frozen=True)
class Line(PromptReader, kind="smol_line"):
    """The prompt and a new line."""

    def tokens(self, prompt, state, pictures):
        return self.found().encode(prompt.strip() + "\n"), ()


@dataclass(frozen=True)
class Corner(PictureFit, kind="smol_corner"):
    """openpi's resize, with the black border above and on the left."""

    def __call__(self, image):
        shown = resize_with_pad(np.full_like(image, 255), self.size)[..., 0] > 0
        rows, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
        down, across = self.shape[0] - 1 - rows[-1], self.shape[1] - 1 - columns[-1]
        return np.roll(resize_with_pad(image, self.size), (down, across), (0, 1))


@dataclass(frozen=True)
class SmolConfig(ModelConfig, family="smol"):
    vision: SiglipConfig = TOWER
    width: int = 64
    depth: int = 4
    heads: int = 4
    image_size: int = 48
    vocabulary: int = 512
    state_dim: int = 8
    action_dim: int = 8
    horizon: int = 8
    memory: tuple[int, ...] = (1, 2, 3)
    euler_steps: int = 10
    compute: Compute = field(default_factory=lambda: Compute(dtype="float32"))

    state_input = "token"
    quantizable = r"/(up|down)/"
    tokens_per_image = property(lambda self: self.vision.tokens(self.image_size))

    @property
    def observed(self):
        ago = (("state", self.memory), ("images", self.memory[-1:]))
        return History(ago, padding="mask") if self.memory else NOW

    def processor(self, robots, tokenizer=None):
        sizes = self.state_dim, self.action_dim, self.horizon, self.state_input, tuple(robots)
        fit = Corner(self.image_size)
        return Processor(*sizes, Line(tokenizer, 48), fit, observed=self.observed)

    def build(self):
        return Smol(self)


@dataclass(frozen=True)
class Smol:
    config: SmolConfig

    groups: ClassVar[Mapping] = {"vision": "vision", "action": "action"}
    observing = r"^(?!action)"
    feature_width = property(lambda self: self.config.width)

    def init(self, key):
        return self._modules.init(key)

    def loss(self, params, batch, key):
        time, noise = flow.draw(key, batch.sample_id, 1, batch.actions.shape[2:])
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        error = (self.field(params, batch)(noised, time).velocity - target) ** 2
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum(error[:, :, 0] * weight), jnp.sum(weight)

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
        self.config, width, draw = config, config.width, nnx.initializers.normal(0.02)
        tower = partial(Siglip, film_width=None, compute=config.compute, rngs=rngs)
        self.vision = tower(config.vision, config.image_size, width)
        self.words = nnx.Param(draw(rngs.params(), (config.vocabulary, width)))
        self.age = nnx.Param(draw(rngs.params(), (len(config.memory) + 1, width)))
        self.state_in = nnx.Linear(config.state_dim, width, rngs=rngs)
        self.blocks = stack.stack_layers(lambda r: Block(config, r), config.depth, rngs)
        self.action_position = nnx.Param(draw(rngs.params(), (config.horizon, width)))
        self.action_in = nnx.Linear(config.action_dim, width, rngs=rngs)
        self.action_time = nnx.Linear(width, width, rngs=rngs)
        self.action_blocks = stack.stack_layers(lambda r: Block(config, r), config.depth, rngs)
        self.action_out = nnx.Linear(width, config.action_dim, rngs=rngs)

    def observe(self, batch):
        """The prefix, past states and past pictures, which the expert reads, and whose they are."""
        rows, slots = batch.state.shape[:2]
        x = prefix_tokens(
            batch, self._seen(batch.images), self.words[batch.text], self.state_in(batch.state)
        )
        whose = batch.prefix_segment
        read, owners = [_through(self.blocks, x, whose, x, whose)], [whose]
        if self.config.memory:
            states = self.state_in(batch.past_state) + self.age[1:]
            own = jnp.arange(1, slots + 1)[:, None] * batch.past_state_mask
            read.append(states.reshape(rows, -1, x.shape[-1]))
            owners.append(own.reshape(rows, -1))
            (earlier,), now = batch.more_images, batch.images.shape[1]
            seen = self._seen(earlier).mean(1).reshape(rows, earlier.shape[1], -1)
            read.append(seen + self.age[0])
            owners.append(image_segments(batch, [self.config.tokens_per_image])[:, now:])
        return jnp.concatenate(read, axis=1), jnp.concatenate(owners, axis=1)

    def act(self, noised, time, observed):
        read, whose = observed
        rows, slots, copies, horizon, _ = noised.shape
        embedded = jax.nn.swish(self.action_time(sincos_embedding(time, read.shape[-1])))
        x = self.action_in(noised) + self.action_position[...] + embedded[..., None, :]
        flat = x.swapaxes(1, 2).reshape(rows * copies, slots * horizon, -1)
        own = jnp.broadcast_to(jnp.repeat(jnp.arange(1, slots + 1), horizon), flat.shape[:2])
        read, whose = (jnp.repeat(y, copies, axis=0) for y in (read, whose))
        features = _through(self.action_blocks, flat, own, read, whose)
        features = features.reshape(rows, copies, slots, horizon, -1).swapaxes(1, 2)
        return flow.Predicted(self.action_out(features), features)

    def _seen(self, images):
        return self.vision(images.reshape(-1, *images.shape[2:]))


class Block(nnx.Module):
    """Attention to the tokens that are read and among each other, within a sample."""

    def __init__(self, config, rngs):
        width, heads = config.width, (config.heads, config.width // config.heads)
        dense = partial(Dense, compute=config.compute, rngs=rngs)
        self.norm, self.norm_read, self.norm_up = (nnx.RMSNorm(width, rngs=rngs) for _ in range(3))
        self.q, self.k, self.v = (dense(width, heads) for _ in range(3))
        self.out, self.up, self.down = (
            dense(heads, width), dense(width, 4 * width), dense(4 * width, width)
        )  # fmt: skip

    def __call__(self, x, own, read, whose):
        y, z = self.norm(x), self.norm_read(read)
        keys, owners = jnp.concatenate([z, y], axis=1), jnp.concatenate([whose, own], axis=1)
        x = x + self.out(attend(self.q(y), self.k(keys), self.v(keys), own, owners).out)
        return x + feed_forward(self.up, self.down, self.norm_up(x), 0)


def _through(blocks, x, own, read, whose):
    graph, weights = nnx.split(blocks)
    layer = lambda x, weights, *rows: (nnx.merge(graph, weights)(x, *rows), None)  # noqa: E731
    return stack.scan_layers(layer, x, weights, rows=(own, read, whose))[0]


def write(policy, target):
    """A folder with arrays by path, and the config and preparation as JSON."""
    target.mkdir()
    np.savez(target / "smol.npz", **flatten_dict(jax.device_get(policy.params), sep="/"))
    told = {"model": to_json(policy.model.config), "processor": to_json(policy.processor)}
    (target / "smol.json").write_text(json.dumps(told))


def inspect(path):
    with np.load(path / "smol.npz") as file:
        arrays = dict(file)
    config = model_config(json.loads((path / "smol.json").read_text())["model"])
    shapes = flatten_dict(jax.eval_shape(config.build().init, jax.random.key(0)), sep="/")
    table = Table(tuple(Rule(name, name, _axes(x.ndim)) for name, x in shapes.items()))
    return CheckpointInfo(config, None, CheckpointSource(str(path), arrays), table, FORMAT)


def _axes(ndim):
    return " ".join("abcdef"[:ndim]) + " -> " + " ".join("abcdef"[:ndim])


def prepares(path, info, config):
    told = json.loads((path / "smol.json").read_text())["processor"]
    return from_json(Processor, told)


def acts(path, info, told):
    return info.config, prepares(path, info, info.config)


FORMAT = CheckpointFormat(
    *("smol-npz", ("smol",), lambda path: (path / "smol.npz").is_file(), inspect, acts, prepares),
    write=write,
)
register(FORMAT)
SMOL = RunConfig(SmolConfig(), RowsConfig(16, 2), optimizer=OptimizerConfig(learning_rate=1e-3))
