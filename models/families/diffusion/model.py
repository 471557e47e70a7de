"""Diffusion Policy (Chi et al., arXiv 2303.04137) as LeRobot has it: a U-Net denoises a chunk of
actions, given one vector of what the last observations show.

A chunk begins with the steps of the past observations, which are learnt and denoised with the
others but not answered. Every picture passes a ResNet, in whose last features each keypoint's place
is read (spatial softmax, Levine et al., arXiv 1504.00702).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models.families.diffusion.noise import NoiseConfig, StepNoise, denoise, draw, noised
from models.families.diffusion.unet import Unet, UnetConfig
from models.files.bounds import check_size, check_sizes
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.history import NOW, History
from models.inputs.packed_batch import Layout, PackedBatch, pictures_by_sample
from models.inputs.pictures import Size, shape_of
from models.inputs.processor import Processor
from models.inputs.tokenizer import TextTokenizer
from models.layers.functional import Functional, Params
from models.layers.layers import Compute
from models.layers.vision.resnet import IMAGENET, Resnet, ResnetConfig, standardised
from models.model import ModelConfig, Stack
from models.sharding import Rules

_CROPS = 2**31
"""Number folded into a step's key, so that crops are drawn independently of times and noise."""


@dataclass(frozen=True)
class DiffusionConfig(ModelConfig, family="diffusion"):
    """Architecture; the defaults are LeRobot 0.6's.

    `observations`: that are read, the present one and those of the steps before it. `cameras`: of
    every robot; `separate`: each has an encoder of its own. `keypoints`: of a picture. A picture of
    `image_size`, its levels from 0 to 1 scaled by `picture_scales` (one for all cameras, one for
    each, or none), is resized to `resize` and cut to `crop_ratio` of it, or else cut to `crop`, in
    training at random with `random_crop`; () leaves it whole. `environment`: dims at the state's
    end that describe the environment.
    `action_steps`: of a chunk that are answered; `euler_steps`: of the sampler. `padding`: steps
    outside of the episode show its nearest action, which is "learnt" as others are or "masked" out
    of the loss; "masked-0.4" counts them in its mean, as LeRobot 0.4 did.

    Raises:
      ValueError: a size is out of bounds or does not fit another.
    """

    resnet: ResnetConfig = field(default_factory=lambda: ResnetConfig(norm="running"))
    unet: UnetConfig = field(default_factory=UnetConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    observations: int = 2
    cameras: int = 1
    separate: bool = True
    keypoints: int = 32
    image_size: Size = 96
    picture_scales: tuple[Normalizer, ...] = (IMAGENET,)
    resize: tuple[int, ...] = ()
    crop_ratio: float = 1.0
    crop: tuple[int, ...] = ()
    random_crop: bool = True
    state_dim: int = 8
    environment: int = 0
    action_dim: int = 8
    horizon: int = 64
    action_steps: int = 32
    padding: Literal["learnt", "masked", "masked-0.4"] = "learnt"
    chunks: int = 1
    euler_steps: int = 100
    compute: Compute = field(default_factory=lambda: Compute(dtype="float32"))

    acting: ClassVar[tuple[str, ...]] = ("euler_steps", "action_steps")
    state_input, tokens_per_image = "suffix", 1

    def __post_init__(self) -> None:
        check_sizes("model", self, "state_dim", "action_dim", "horizon", "chunks")
        check_sizes("model", self, "cameras", "keypoints")
        check_size("model.environment", self.environment, self.state_dim, least=0)
        check_size("model.euler_steps", self.euler_steps, self.noise.times)
        check_size("model.observations", self.observations, self.horizon)
        check_size("model.action_steps", self.action_steps, self.horizon - self.observations + 1)
        levels = len(self.unet.widths)
        if self.horizon % 2**levels:
            raise ValueError(
                f"model.horizon is {self.horizon}; give a multiple of {2**levels} for the {levels} "
                "levels of model.unet.widths."
            )
        whole, kept = shape_of(self.image_size), self.crop_ratio
        cut = any(a > b for a, b in zip(self.crop, whole, strict=False))
        if not {len(self.crop), len(self.resize)} <= {0, 2} or cut or not 0 < kept <= 1:
            raise ValueError(
                f"model.resize is {self.resize}, crop_ratio {kept} and crop {self.crop} for "
                f"pictures of {whole}; give heights and widths, or (), and a ratio up to 1."
            )
        if len(self.picture_scales) not in (0, 1, self.cameras):
            raise ValueError(
                f"model.picture_scales are {len(self.picture_scales)} for {self.cameras} cameras; "
                "give one for all, or one for each."
            )

    @property
    def observed(self) -> History:
        ago = tuple(range(1, self.observations))
        columns = ("state", "images") if self.image_size else ("state",)
        return History(tuple((name, ago) for name in columns)) if ago else NOW

    @property
    def answered(self) -> range:
        return range(self.observations - 1, self.observations - 1 + self.action_steps)

    @property
    def seen(self) -> tuple[int, ...]:
        """Height and width of what the encoder sees of a picture."""
        if self.resize:
            return tuple(int(side * self.crop_ratio) for side in self.resize)
        return self.crop or shape_of(self.image_size)

    def build(self) -> "Diffusion":
        return Diffusion(self)

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """π0's pictures, and chunks that hold an episode's first and last action."""
        return replace(super().processor(robots), held=True)

    def check_processor(self, processor: Processor) -> None:
        super().check_processor(processor)
        for robot in processor.embodiments if self.image_size else ():
            if len(robot.cameras) != self.cameras:
                raise ValueError(
                    f"embodiment '{robot.name}' has cameras {list(robot.cameras)}, but "
                    f"model.cameras is {self.cameras}; give --model.cameras {len(robot.cameras)}, "
                    "or choose cameras in a mixture."
                )

    def with_rows_of(self, other: ModelConfig, foreign: str | None = None) -> "DiffusionConfig":
        """With the scales of pictures with which the policy to start from was trained."""
        return replace(self, picture_scales=getattr(other, "picture_scales", self.picture_scales))

    def stacks(self, layout: Layout) -> tuple[Stack, ...]:
        """The U-Net's levels, each with two blocks down and two up."""
        places, widths = layout.samples * self.chunks * self.horizon, self.unet.widths
        return tuple(Stack(4, width, places >> i, 0, False) for i, width in enumerate(widths))


@dataclass(frozen=True)
class Diffusion:
    """The model as functions of (parameters, batch, key)."""

    config: DiffusionConfig

    groups: ClassVar[Mapping[str, str]] = {"vision": "encoders", "action": "unet"}
    sharding_rules: ClassVar[Rules] = (
        (r"^unet/.*(conv|shrink/\d+)/kernel$", PartitionSpec(None, None, "fsdp")),
        (r"^unet/(.*film|grow/\d+)/kernel$", PartitionSpec(None, "fsdp")),
        (r"^(?!unet/.*(conv|film|(shrink|grow)/\d+)/kernel$)", PartitionSpec()),
    )

    def init(self, key: PRNGKeyArray) -> Params:
        return self._modules.init(key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The squared error of what the network tells of noised chunks, summed, and the weighted
        count of the entries that it is the mean of."""
        config = self.config
        shape = batch.actions.shape[2:]
        time, noise = draw(key, batch.sample_id, config.chunks, shape, config.noise.times)
        return self.loss_at(params, batch, time, noise, jax.random.fold_in(key, _CROPS))

    def loss_at(
        self,
        params: Params,
        batch: PackedBatch,
        time: Int[Array, "r k c"],
        noise: Float[Array, "r k c h a"],
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """`loss` at these times and this noise; `key` is that of random crops, None for the middle
        of each picture."""
        mixed, target = noised(self.config.noise, batch.actions[:, :, None], noise, time)
        modules = self._modules.bind(params)
        told = modules(mixed, time, modules.observe(batch, key))
        error = ((told - target) ** 2).mean(2)
        every = jnp.ones_like(error)
        valid = jnp.where(batch.action_mask.any(-1, keepdims=True), every, 0)
        learnt = every if self.config.padding == "learnt" else valid
        counted = valid if self.config.padding == "masked" else every
        weight = batch.weight[..., None, None]
        return jnp.sum(error * learnt * weight), jnp.sum(counted * weight)

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
        step_noise: StepNoise | None = None,
    ) -> Float[Array, "r k h a"]:
        """Whole chunks, which begin with the steps of the past observations; see `denoise`."""
        modules = self._modules.bind(params)
        observed = modules.observe(batch)

        def predict(x: Array, time: Array) -> Array:
            times = jnp.broadcast_to(time, (*x.shape[:2], 1))
            return modules(x[:, :, None], times, observed)[:, :, 0]

        return denoise(self.config.noise, predict, noise, self.config.euler_steps, step_noise)

    @cached_property
    def _modules(self) -> Functional["Modules"]:
        return Functional(partial(Modules, self.config))


class Modules(nnx.Module):
    """The encoders of pictures, and the U-Net."""

    def __init__(self, config: DiffusionConfig, rngs: nnx.Rngs) -> None:
        self.config, cameras = config, config.cameras if config.image_size else 0
        encoders = cameras if config.separate else min(cameras, 1)
        self.encoders = nnx.List([Encoder(config, rngs) for _ in range(encoders)])
        width = config.observations * (config.state_dim + cameras * 2 * config.keypoints)
        self.unet = Unet(config.unet, config.action_dim, width, config.compute.dtype, rngs)

    def __call__(
        self,
        noised: Float[Array, "r k c h a"],
        time: Int[Array, "r k c"],
        observed: Float[Array, "r k w"],
    ) -> Float[Array, "r k c h a"]:
        """Predictions for noised chunks, f32."""
        given = jnp.broadcast_to(observed[:, :, None], (*time.shape, observed.shape[-1]))
        flat = noised.reshape(-1, *noised.shape[3:]), time.reshape(-1)
        return self.unet(*flat, given.reshape(-1, given.shape[-1])).reshape(noised.shape)

    def observe(self, batch: PackedBatch, key: PRNGKeyArray | None = None) -> Float[Array, "r k w"]:
        """For each step, the oldest first: state, what the cameras show, environment."""
        config, states = self.config, batch.state[:, :, None]
        if batch.past_state is not None:
            states = jnp.concatenate([batch.past_state[:, :, ::-1], states], axis=2)
        robot = config.state_dim - config.environment
        parts = [states[..., :robot], states[..., robot:]]
        if config.image_size:
            parts.insert(1, self._pictured(batch, key))
        return jnp.concatenate(parts, axis=-1).reshape(*batch.state.shape[:2], -1)

    def _pictured(self, batch: PackedBatch, key: PRNGKeyArray | None) -> Float[Array, "r k t f"]:
        """Keypoints of all cameras' pictures; 0 for an absent one."""
        config = self.config
        pictures, present = pictures_by_sample(batch, config.cameras)
        camera = jnp.broadcast_to(jnp.arange(config.cameras)[:, None], present.shape)
        flat = pictures.reshape(-1, *pictures.shape[4:])
        x = standardised(flat, camera.reshape(-1), config.picture_scales)
        if config.resize:
            shape = len(x), *config.resize, 3
            x = jax.image.resize(x, shape, "linear", antialias=True)
        x = x.reshape(*present.shape, *x.shape[1:])
        x = cropped(x, config.seen, batch.sample_id, key if config.random_crop else None)
        groups = [(x, present)]
        if config.separate:
            groups = [(x[:, :, i], present[:, :, i]) for i in range(config.cameras)]
        found = [
            encoder(x.reshape(-1, *x.shape[-3:]), there.reshape(-1)).reshape(*there.shape, -1)
            for encoder, (x, there) in zip(self.encoders, groups, strict=True)
        ]
        features = jnp.stack(found, axis=2) if config.separate else found[0]
        features = jnp.where(present[..., None], features, 0).swapaxes(2, 3)
        return features.reshape(*features.shape[:3], -1)


class Encoder(nnx.Module):
    """A ResNet, keypoints, and a layer that mixes their places."""

    def __init__(self, config: DiffusionConfig, rngs: nnx.Rngs) -> None:
        dtype, count = config.compute.dtype, config.keypoints
        self.backbone = Resnet(config.resnet, dtype, rngs)
        self.keypoints = nnx.Linear(config.resnet.channels, count, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(2 * count, 2 * count, rngs=rngs)

    @jax.named_scope("encoder")
    def __call__(
        self, x: Float[Array, "n height width 3"], present: Bool[Array, " n"]
    ) -> Float[Array, "n f"]:
        heat = self.keypoints(self.backbone(x, present)).astype(jnp.float32)
        share = jax.nn.softmax(heat.reshape(len(x), -1, heat.shape[-1]), axis=1)
        places = jnp.einsum("npk,pd->nkd", share, grid(*heat.shape[1:3]))
        return jax.nn.relu(self.out(places.reshape(len(x), -1)))


def grid(height: int, width: int) -> Float[np.ndarray, "places 2"]:
    """x and y of each place of a picture's features, row by row, from -1 to 1."""
    x, y = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
    return np.stack([x, y], axis=-1).reshape(-1, 2).astype(np.float32)


def cropped(
    pictures: Float[Array, "r k c t height width 3"],
    size: tuple[int, ...],
    sample_id: Int[Array, "r k"],
    key: PRNGKeyArray | None,
) -> Float[Array, "r k c t _height _width 3"]:
    """Parts of pictures: the middle, or one that is drawn for each sample and camera."""
    room = np.array(pictures.shape[4:6]) - np.array(size)
    if key is None or not room.any():
        top, left = (round(side / 2) for side in room.tolist())
        return pictures[..., top : top + size[0], left : left + size[1], :]

    def one(pictures: Array, id: Array, camera: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, id), camera)
        at = jax.random.randint(own, (2,), 0, jnp.asarray(room) + 1)
        shape = (len(pictures), *size, 3)
        return jax.lax.dynamic_slice(pictures, (0, *at, 0), shape)

    by_camera = jax.vmap(one, (0, None, 0))
    numbers = jnp.broadcast_to(jnp.arange(pictures.shape[2]), pictures.shape[:3])
    return jax.vmap(jax.vmap(by_camera))(pictures, sample_id, numbers)
