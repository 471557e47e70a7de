"""ACT (Zhao et al. 2023, arXiv 2304.13705) as LeRobot has it: a ResNet sees each camera, an encoder
mixes its places with the state and a latent, and a decoder reads a whole chunk from them at once.
In training, the latent is that of a VAE which reads the chunk; in acting it is zero.

A row's samples are taken apart: attention is among one sample's tokens, so neither masks nor
dropout know what it is packed with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray, UInt32

from models.attention.attention import attend
from models.checkpoints.rename import Table
from models.checkpoints.resnet_file import open_resnet
from models.checkpoints.sources import CheckpointSource
from models.files.bounds import LARGEST_DIMS, check_size, check_sizes
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.packed_batch import ImageSlots, Layout, PackedBatch, image_segments
from models.inputs.pictures import Antialiased, Size, shape_of
from models.inputs.processor import Processor
from models.inputs.tokenizer import TextTokenizer
from models.layers.dropout import drop, sample_keys
from models.layers.functional import Functional, Params
from models.layers.layers import Compute, Dense, LayerNorm
from models.layers.stack import scan_layers, stack_layers
from models.layers.vision.resnet import IMAGENET, Resnet, ResnetConfig, standardised
from models.model import ModelConfig, Stack
from models.sharding import Rules

_Placed = tuple[Array, Array]
"""Tokens [b, t, w] and their positions [t, w]."""
Dropped = Callable[[Array, int], Array] | None
"""Dropout at a site of a layer; None outside of training."""
_STACKS = "^(encoder|decoder|vae/encoder)/"
_SITES = 8
"""Sites of dropout in a layer, at most."""


@dataclass(frozen=True)
class ActConfig(ModelConfig, family="act"):
    """ACT's architecture, as large as LeRobot's default.

    `image_size`: height and width of the pictures of all `cameras`, the most that a sample shows;
    `camera_sizes`: those of each camera, where they differ, in place of both. `picture_scales`:
    mean and deviation of each camera's channels from 0 to 1; one for all, or () for none.
    `environment_dim`: the last dims of the state, which are the environment's and not the robot's;
    with `state_input` "none", the model reads no state. `loss_mean`: the absolute error's, over
    valid steps, or over all steps, as LeRobot 0.4 has it. `kl_weight`: of the latent's divergence
    from unit noise. `n_action_steps`: steps of a chunk that are answered, at most; ensembles need
    whole chunks.
    `temporal_ensemble_coeff`: see `RobotSession.answered`; None, each chunk replaces the last.
    `tower_weights`: a file with which the ResNet of a run from nothing begins, see `open_resnet`.
    """

    tower: ResnetConfig = field(default_factory=ResnetConfig)
    tower_weights: str = ""
    width: int = 512
    heads: int = 8
    hidden: int = 3200
    activation: Literal["relu", "gelu"] = "relu"
    pre_norm: bool = False
    encoder_depth: int = 4
    decoder_depth: int = 1
    vae: bool = True
    vae_depth: int = 4
    latent: int = 32
    kl_weight: float = 10.0
    loss_mean: Literal["valid", "all"] = "valid"
    dropout: float = 0.1
    image_size: Size = (480, 640)
    cameras: int = 2
    camera_sizes: tuple[tuple[int, int], ...] = ()
    picture_scales: tuple[Normalizer, ...] = (IMAGENET,)
    state_dim: int = 14
    environment_dim: int = 0
    action_dim: int = 14
    horizon: int = 100
    n_action_steps: int = 100
    temporal_ensemble_coeff: float | None = None
    state_input: Literal["suffix", "none"] = "suffix"
    compute: Compute = field(default_factory=lambda: Compute(dtype="float32"))

    quantizable: ClassVar[str] = r"^(encoder|decoder)/.*(q|k|v|out|up|down)/kernel$"
    acting: ClassVar[tuple[str, ...]] = ("n_action_steps", "temporal_ensemble_coeff")

    def __post_init__(self) -> None:
        depths = ("encoder_depth", "decoder_depth", "vae_depth", "horizon", "n_action_steps")
        check_sizes("model", self, "width", "heads", "hidden", "latent", *depths)
        check_sizes("model", self, "state_dim", "action_dim", most=LARGEST_DIMS)
        check_size("model.cameras", self.cameras, least=0)
        w, e, d, a = self.width, self.environment_dim, self.dropout, self.activation
        scales, seen = len(self.picture_scales), len(self.sizes)
        act_on = seen or (e and self.state_input != "none")
        for right, told in (
            (not w % 4 and not w % self.heads, f"width is {w}; give a multiple of 4 and of heads"),
            (0 <= e <= self.state_dim, f"environment_dim is {e}; give at most model.state_dim"),
            (act_on, "cameras is 0, and environment_dim too; give one to act on"),
            (scales in (0, 1, seen), f"picture_scales has {scales} entries; give 0, 1 or {seen}"),
            (a in ("relu", "gelu"), f"activation is '{a}'; give 'relu' or 'gelu'"),
            (0 <= d < 1, f"dropout is {d}; give a share below 1"),
        ):
            if not right:
                raise ValueError(f"model.{told}.")

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each camera's pictures."""
        return self.camera_sizes or (shape_of(self.image_size),) * self.cameras

    @property
    def robot_dim(self) -> int:
        """State dims of the robot itself that the model reads."""
        return self.state_dim - self.environment_dim if self.state_input != "none" else 0

    @property
    def pictures(self) -> tuple[ImageSlots, ...]:
        places = {size: self.tower.places(*size) for size in self.sizes}
        return tuple(ImageSlots(*size, h * w) for size, (h, w) in places.items())

    @property
    def answered(self) -> range:
        whole = self.temporal_ensemble_coeff is not None
        return range(self.horizon if whole else min(self.n_action_steps, self.horizon))

    def build(self) -> "ActModel":
        return ActModel(self)

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """The preparation for robots: pictures keep their aspect in the size of their camera.

        Raises:
          ValueError: a robot has more cameras than the model, or other dims of state where some
            are the environment's.
        """
        for robot in robots:
            if len(robot.cameras) > len(self.sizes) > 0:
                raise ValueError(
                    f"Embodiment '{robot.name}' has cameras {list(robot.cameras)}, but the model "
                    f"reads {len(self.sizes)}; raise --model.cameras."
                )
            if self.environment_dim and len(robot.state.offset) != self.state_dim:
                raise ValueError(
                    f"Embodiment '{robot.name}' has {len(robot.state.offset)} state dims; give "
                    f"exactly model.state_dim, {self.state_dim}, of which the last "
                    f"{self.environment_dim} are the environment's."
                )
        fits = tuple(Antialiased(size) for size in self.sizes)
        pictures = fits if self.camera_sizes or not fits else fits[0]
        sizes = self.state_dim, self.action_dim, self.horizon
        return Processor(*sizes, self.state_input, tuple(robots), None, pictures)

    def pretrained(self) -> tuple[CheckpointSource, Table] | None:
        """Arrays with which a run from nothing begins, see `open_resnet`."""
        return open_resnet(self.tower_weights, self.tower, "tower") if self.sizes else None

    def with_rows_of(self, other: ModelConfig, foreign: str | None = None) -> "ActConfig":
        """The config with the scales of pictures that the policy to start from has."""
        scales = getattr(other, "picture_scales", self.picture_scales)
        return self.changed(picture_scales=scales)

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """Layers that a row passes through: each sample's tokens, then those of its chunk."""
        places = {group.shape: group.tokens for group in self.pictures}
        pictures = sum(places[size] for size in self.sizes)
        tokens, keys = 1 + bool(self.robot_dim) + bool(self.environment_dim), 2 * self.width
        return (
            Stack(self.encoder_depth, self.width, layout.samples * (tokens + pictures), keys),
            Stack(self.decoder_depth, self.width, layout.samples * self.horizon, keys),
        )


@dataclass(frozen=True)
class ActModel:
    """The policy as pure functions, see `models.model.Model`."""

    config: ActConfig

    groups: ClassVar[Mapping[str, str]] = {
        "backbone": "tower",
        "vision": "tower|picture_in",
        "action": "(?!tower|picture_in)",
    }
    stacked: ClassVar[str] = _STACKS
    term_names: ClassVar[tuple[str, ...]] = ("l1", "kl")
    sharding_rules: ClassVar[Rules] = (
        (rf"{_STACKS}.*(q|k|v)/kernel$", PartitionSpec(None, "fsdp", "tensor")),
        (rf"{_STACKS}.*out/kernel$", PartitionSpec(None, "tensor", None, "fsdp")),
        (rf"{_STACKS}up/kernel$", PartitionSpec(None, "fsdp", "tensor")),
        (rf"{_STACKS}down/kernel$", PartitionSpec(None, "tensor", "fsdp")),
        (r"^tower/.*kernel$", PartitionSpec(None, None, None, "fsdp")),
        (rf"^(?!tower/.*kernel$)(?!{_STACKS}.*kernel$)", PartitionSpec()),
    )

    def init(self, key: PRNGKeyArray) -> Params:
        return self._modules.init(key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The absolute error over valid action entries, with the weighted divergence, and their
        count, see `losses`."""
        total, (count, _) = self.losses(params, batch, key)
        return total, count

    def losses(
        self,
        params: Params,
        batch: PackedBatch,
        key: PRNGKeyArray,
        noise: Float[Array, "r k l"] | None = None,
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]:
        """The loss's sum, then the count that divides it and each term's sum.

        The divergence is a mean over the batch's samples, so its sum is times their mean count:
        this alone depends on the other samples, on how many valid steps they have.

        Args:
          noise: the latent's; drawn by the samples' ids if None.
        """
        config = self.config
        keys = sample_keys(key, batch.sample_id)
        if noise is None:
            noise = _noise(keys, config.latent)
        modules = self._modules.bind(params)
        found, divergence = modules(batch, keys if config.dropout else None, noise)
        with jax.named_scope("loss"):
            weight = batch.action_mask * batch.weight[..., None, None]
            padded = batch.action_mask.any(2, keepdims=True) * batch.weight[..., None, None]
            every = jnp.sum(padded) * config.horizon
            count = jnp.sum(weight) if config.loss_mean == "valid" else every
            error = jnp.sum(jnp.abs(found - batch.actions) * weight)
            samples = jnp.maximum(batch.weight.sum(), 1e-9)
            terms = {"l1": error, "kl": jnp.sum(divergence * batch.weight) * count / samples}
        return error + config.kl_weight * terms["kl"], (count, terms)

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
    ) -> Float[Array, "r k h a"]:
        """The chunk of a zero latent; `noise` is not read.

        Raises:
          ValueError: there is `guidance`, which needs a velocity field.
        """
        if guidance is not None:
            raise ValueError(
                "Models of family 'act' have no velocity field to guide, so chunks cannot be "
                "continued; leave out continues and previous."
            )
        return self._modules.bind(params)(batch)[0]

    @cached_property
    def _modules(self) -> Functional["_Modules"]:
        return Functional(partial(_Modules, self.config))


class _Modules(nnx.Module):
    """All layers; R rows of K samples become B = R · K."""

    def __init__(self, config: ActConfig, rngs: nnx.Rngs):
        self.config, width = config, config.width
        linear = partial(nnx.Linear, dtype=jnp.dtype(config.compute.dtype), rngs=rngs)
        draw = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape))  # noqa: E731
        if config.sizes:
            self.tower = Resnet(config.tower, config.compute.dtype, rngs)
            self.picture_in = linear(config.tower.channels, width)
        self.latent_in = linear(config.latent, width)
        if config.robot_dim:
            self.state_in = linear(config.robot_dim, width)
        if config.environment_dim and config.state_input != "none":
            self.environment_in = linear(config.environment_dim, width)
        single = 1 + hasattr(self, "state_in") + hasattr(self, "environment_in")
        self.position = draw(single, width)
        self.encoder = _stacked(config, config.encoder_depth, False, rngs)
        self.decoder = _stacked(config, config.decoder_depth, True, rngs)
        if config.pre_norm:
            self.encoder_norm = _norm(config, rngs)
        self.decoder_norm = _norm(config, rngs)
        self.query = draw(config.horizon, width)
        self.action_out = nnx.Linear(width, config.action_dim, rngs=rngs)
        if config.vae:
            self.vae = _Vae(config, rngs)

    def __call__(
        self,
        batch: PackedBatch,
        keys: UInt32[Array, "r k d"] | None = None,
        noise: Float[Array, "r k l"] | None = None,
    ) -> tuple[Float32[Array, "r k h a"], Float32[Array, "r k"]]:
        """Chunks, and the divergence of each sample's latent; without `noise` the latent is 0."""
        config, (rows, samples) = self.config, batch.state.shape[:2]
        count = rows * samples
        keys = None if keys is None else keys.reshape(count, -1)
        state = batch.state.reshape(count, -1)
        robot = state[:, : config.robot_dim]
        latent, divergence = jnp.zeros((count, config.latent)), jnp.zeros(count)
        if noise is not None and config.vae:
            chunk = batch.actions.reshape(count, config.horizon, -1)
            valid = batch.action_mask.any(-1).reshape(count, -1)
            latent, divergence = self.vae(robot, chunk, valid, noise.reshape(count, -1), keys)
        tokens = [self.latent_in(latent)]
        if hasattr(self, "state_in"):
            tokens.append(self.state_in(robot))
        if hasattr(self, "environment_in"):
            tokens.append(self.environment_in(state[:, -config.environment_dim :]))
        x, position = jnp.stack(tokens, 1), self.position[...]
        there = jnp.ones(x.shape[:2], bool)
        if config.sizes:
            seen, place, shown = self._pictures(batch)
            x = jnp.concatenate([x, seen.astype(x.dtype)], 1)
            position = jnp.concatenate([position, place])
            there = jnp.concatenate([there, shown], 1)
        first = range(config.encoder_depth)
        memory = _through(self.encoder, config, (x, position), there, keys, first)
        if config.pre_norm:
            memory = self.encoder_norm(memory)
        blank = jnp.zeros((count, config.horizon, config.width), memory.dtype)
        then = range(config.encoder_depth, config.encoder_depth + config.decoder_depth)
        asking, read = (blank, self.query[...]), (memory, position)
        y = _through(self.decoder, config, asking, there, keys, then, read)
        actions = self.action_out(self.decoder_norm(y).astype(jnp.float32))
        return actions.reshape(rows, samples, *actions.shape[1:]), divergence.reshape(rows, samples)

    def _pictures(
        self, batch: PackedBatch
    ) -> tuple[Float[Array, "b n w"], Float[Array, "n w"], Bool[Array, "b n"]]:
        """Tokens of each sample's pictures, size by size, their positions, and which are there."""
        config, (rows, samples) = self.config, batch.state.shape[:2]
        owner = image_segments(batch, [group.tokens for group in config.pictures])
        tokens, positions, there, begin = [], [], [], 0
        arrays = (batch.images, *batch.more_images)
        for group, images in zip(config.pictures, arrays, strict=True):
            slots = slice(begin, begin := begin + images.shape[1])
            own, camera = owner[:, slots], batch.image_camera[:, slots].reshape(-1)
            flat = images.reshape(-1, *group.shape, 3)
            seen = standardised(flat, camera, config.picture_scales)
            seen = self.tower(seen, own.reshape(-1) > 0)
            seen = self.picture_in(seen.reshape(rows, -1, group.tokens, seen.shape[-1]))
            most = min(sum(size == group.shape for size in config.sizes), images.shape[1])
            rank = jnp.tril(own[:, :, None] == own[:, None], -1).sum(-1)
            wanted = jnp.arange(1, samples + 1)[:, None, None], jnp.arange(most)[:, None]
            found = (own[:, None, None] == wanted[0]) & (rank[:, None, None] == wanted[1])
            at = found.argmax(-1).reshape(rows, -1, 1, 1)
            seen = jnp.take_along_axis(seen, at, axis=1)
            tokens.append(seen.reshape(rows * samples, -1, config.width))
            grid = _grid(*config.tower.places(*group.shape), config.width)
            positions.append(np.tile(grid, (most, 1)))
            shown = found.any(-1).reshape(rows * samples, -1)
            there.append(jnp.repeat(shown, group.tokens, axis=1))
        place = jnp.asarray(np.concatenate(positions))
        return jnp.concatenate(tokens, 1), place, jnp.concatenate(there, 1)


class _Vae(nnx.Module):
    """Reads a chunk, beside the robot's state, as a distribution of the latent."""

    def __init__(self, config: ActConfig, rngs: nnx.Rngs):
        self.config, width = config, config.width
        linear = partial(nnx.Linear, dtype=jnp.dtype(config.compute.dtype), rngs=rngs)
        self.cls = nnx.Param(jax.random.normal(rngs.params(), (1, width)))
        if config.robot_dim:
            self.state_in = linear(config.robot_dim, width)
        self.action_in = linear(config.action_dim, width)
        self.encoder = _stacked(config, config.vae_depth, False, rngs)
        if config.pre_norm:
            self.norm = _norm(config, rngs)
        self.latent_out = nnx.Linear(width, 2 * config.latent, rngs=rngs)

    def __call__(
        self, robot: Array, chunk: Array, valid: Array, noise: Array, keys: Array | None
    ) -> tuple[Float[Array, "b l"], Float[Array, " b"]]:
        """A draw of the latent, and its divergence from unit noise."""
        config, actions = self.config, self.action_in(chunk)
        first = self.cls[...].astype(actions.dtype)
        parts = [jnp.broadcast_to(first, (len(chunk), 1, config.width))]
        if hasattr(self, "state_in"):
            parts.append(self.state_in(robot)[:, None])
        whole = jnp.ones((len(chunk), len(parts)), bool)
        x, there = jnp.concatenate([*parts, actions], 1), jnp.concatenate([whole, valid], 1)
        begin = config.encoder_depth + config.decoder_depth
        numbers, place = range(begin, begin + config.vae_depth), line(x.shape[1], config.width)
        x = _through(self.encoder, config, (x, jnp.asarray(place)), there, keys, numbers)
        x = self.norm(x[:, 0]) if config.pre_norm else x[:, 0]
        mean, spread = jnp.split(self.latent_out(x.astype(jnp.float32)), 2, axis=-1)
        divergence = -0.5 * jnp.sum(1 + spread - mean**2 - jnp.exp(spread), axis=-1)
        return mean + jnp.exp(spread / 2) * noise, divergence


class _Layer(nnx.Module):
    """Attention among a sample's tokens, in a decoder also to what it reads, and an MLP; each with
    a norm before it, or after its residual sum."""

    def __init__(self, config: ActConfig, cross: bool, rngs: nnx.Rngs):
        self.config = config
        self.attention = _Attention(config, rngs)
        self.norm1, self.norm2 = _norm(config, rngs), _norm(config, rngs)
        if cross:
            self.cross, self.norm3 = _Attention(config, rngs), _norm(config, rngs)
        dense = partial(Dense, bias=True, compute=config.compute, rngs=rngs)
        self.up = dense(config.width, config.hidden)
        self.down = dense(config.hidden, config.width)

    def __call__(
        self, x: Array, position: Array, there: Array, read: _Placed | None, dropped: Dropped
    ) -> Float[Array, "b t w"]:
        """`there`: tokens that count, of the memory `read` where it is given."""

        def added(x: Array, norm: Any, part: Callable[[Array], Array], site: int) -> Array:
            y = part(norm(x) if self.config.pre_norm else x)
            x = x + (y if dropped is None else dropped(y, site))
            return x if self.config.pre_norm else norm(x)

        def among(y: Array) -> Array:
            own = there if read is None else jnp.ones(y.shape[:2], bool)
            return self.attention((y, position), (y, position), own, dropped, 1)

        x, norm = added(x, self.norm1, among, 0), self.norm2
        if read is not None:
            cross = lambda y: self.cross((y, position), read, there, dropped, 3)  # noqa: E731
            x, norm = added(x, self.norm2, cross, 2), self.norm3

        def mlp(y: Array) -> Array:
            y = self.up(y)
            relu = self.config.activation == "relu"
            y = jax.nn.relu(y) if relu else jax.nn.gelu(y, approximate=False)
            return self.down(y if dropped is None else dropped(y, 5))

        return added(x, norm, mlp, 4)


class _Attention(nnx.Module):
    """Attention whose positions are added to queries and keys, and not to values."""

    def __init__(self, config: ActConfig, rngs: nnx.Rngs):
        width, heads = config.width, (config.heads, config.width // config.heads)
        dense = partial(Dense, bias=True, compute=config.compute, rngs=rngs)
        self.q, self.k, self.v = (dense(width, heads) for _ in range(3))
        self.out, self.implementation = dense(heads, width), config.compute.attention

    def __call__(
        self, asking: _Placed, asked: _Placed, there: Array, dropped: Dropped, site: int
    ) -> Float[Array, "b t w"]:
        q, k, v = self.q(asking[0] + asking[1]), self.k(asked[0] + asked[1]), self.v(asked[0])
        if dropped is None:
            one, segment = jnp.ones(q.shape[:2], jnp.int32), there.astype(jnp.int32)
            seen = attend(q, k, v, one, segment, implementation=self.implementation).out
            return self.out(seen)
        with jax.named_scope("attention"):
            logits = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32)
            logits = jnp.where(there[:, None, None], logits * q.shape[-1] ** -0.5, -jnp.inf)
            weights = dropped(jax.nn.softmax(logits), site).astype(v.dtype)
            return self.out(jnp.einsum("bnts,bsnd->btnd", weights, v))


def line(count: int, width: int) -> Float32[np.ndarray, "n w"]:
    """Fixed positions of tokens in a line."""
    return _waves(np.arange(count), width)


def _grid(high: int, wide: int, width: int) -> Float32[np.ndarray, "n w"]:
    """Fixed positions of a picture's places, row by row: half the channels are those of the row,
    half those of the column, each from just above 0 to 2π."""
    rows, columns = (
        _waves(np.arange(1, count + 1) / (count + 1e-6) * 2 * np.pi, width // 2)
        for count in (high, wide)
    )
    return np.concatenate([rows.repeat(wide, axis=0), np.tile(columns, (high, 1))], axis=1)


def _waves(value: np.ndarray, width: int) -> Float32[np.ndarray, "n w"]:
    """Sines of a value in even channels, cosines in odd ones, at frequencies from 1 to 1/10,000."""
    angle = value[:, None] / 10_000.0 ** (np.arange(width) // 2 * 2 / width)
    return np.where(np.arange(width) % 2, np.cos(angle), np.sin(angle)).astype(np.float32)


def _through(
    layers: nnx.Module,
    config: ActConfig,
    tokens: _Placed,
    there: Bool[Array, "b s"],
    keys: UInt32[Array, "b d"] | None,
    numbers: range,
    read: _Placed | None = None,
) -> Float[Array, "b t w"]:
    """A stack whose layers have these numbers and drop out by the samples' `keys`."""
    graph, weights = nnx.split(layers)
    (x, position), place = tokens, None if read is None else read[1]

    def layer(x: Array, own: Any, there: Array, *rest: Array) -> tuple[Array, None]:
        def dropped(y: Array, site: int) -> Array:
            return drop(y, rest[0], own[1] * _SITES + site, config.dropout)

        drops = None if keys is None else dropped
        memory = None if place is None else (rest[-1], place)
        return nnx.merge(graph, own[0])(x, position, there, memory, drops), None

    rows = (there, *(() if keys is None else (keys,)), *(() if read is None else (read[0],)))
    unroll = config.compute.unroll
    return scan_layers(layer, x, (weights, jnp.asarray(numbers)), rows=rows, unroll=unroll)[0]


def _stacked(config: ActConfig, depth: int, cross: bool, rngs: nnx.Rngs) -> nnx.Module:
    return stack_layers(lambda r: _Layer(config, cross, r), depth, rngs)


def _norm(config: ActConfig, rngs: nnx.Rngs) -> LayerNorm:
    dtype = jnp.dtype(config.compute.dtype)
    return LayerNorm(config.width, epsilon=1e-5, dtype=dtype, use_fast_variance=False, rngs=rngs)


def _noise(keys: UInt32[Array, "r k d"], count: int) -> Float[Array, "r k l"]:
    """Unit noise of each sample's own."""
    fold = lambda data: jax.random.fold_in(jax.random.wrap_key_data(data), 2**31)  # noqa: E731
    one = lambda data: jax.random.normal(fold(data), (count,))  # noqa: E731
    return jax.vmap(jax.vmap(one))(keys)
