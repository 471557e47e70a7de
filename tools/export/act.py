"""A policy's whole act as one pure function of arrays: the robot's observations in, actions in its
units out.

The function includes what `Policy.act` does on the host: tables made from `Policy.rows`, with one
line for each length of the prompt, lay out a row, and scaling is part of the program. Only reading
words and fitting pictures to the size that the model sees stay outside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.attention.target import compiling_for
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import PackedBatch, Sample
from models.inputs.processor import Processor
from models.model import bind_processor
from models.policy import Policy
from models.robot_policy import processor_of
from models.sharding import path_name

Specs = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of arrays by name."""

_LAID = ("prefix_source", "prefix_segment", "prefix_position")
_PROMPTS = "a", "put the other block into the box"


@dataclass(frozen=True, eq=False)
class Act:
    """`policy` for `batch` observations with a picture of each of `cameras`, in this order.

    Raises:
      ValueError: the policy came without its processor, lacks a camera or needs one more, or writes
        subtasks.
    """

    policy: Policy
    cameras: tuple[str, ...]
    batch: int = 1

    def __post_init__(self) -> None:
        robot, processor = self.robot, self.processor
        unknown = sorted(set(self.cameras) - set(robot.cameras))
        missing = sorted(set(robot.cameras) - set(self.cameras) - set(robot.absent))
        if unknown or missing or not self.cameras or self.batch < 1:
            raise ValueError(
                f"cameras are {list(self.cameras)} and batch is {self.batch}; expected some of "
                f"the policy's cameras {list(robot.cameras)}, of which only "
                f"{list(robot.absent)} may be left out, and a batch of at least 1."
            )
        if self.policy.session().remembers:
            raise ValueError(
                "The policy reads past observations or takes the mean of overlapping chunks, which "
                "one exported program cannot do; use tools.serve."
            )
        if self.policy.predicts_subtasks:
            raise ValueError(
                "The policy writes a subtask before it acts (processor.subtask_limit is "
                f"{processor.subtask_limit}), which cannot be exported as one program; export a "
                "policy without subtasks, or use tools.serve."
            )

    @property
    def processor(self) -> Processor:
        """The policy's processor."""
        return processor_of(self.policy, "an exported policy's robot")

    @property
    def robot(self) -> Embodiment:
        """The policy's robot."""
        return self.processor.embodiments[self.policy.embodiment]

    @property
    def inputs(self) -> Specs:
        """Arrays that one call takes besides the weights, in order."""
        robot, processor, config = self.robot, self.processor, self.policy.model.config
        rows = self.batch
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {
            **{
                name: ((len(cameras), *shape, 3), processor.image_dtype)
                for name, shape, cameras in self.pictures
            },
            "state": ((len(robot.state.offset),), np.float32),
            "tokens": ((self._table.text.shape[1],), np.int32),
            "length": ((), np.int32),
            "noise": ((processor.horizon, config.action_dim), np.float32),
        }
        if not self.longest:
            del kinds["tokens"], kinds["length"]
        return {
            name: jax.ShapeDtypeStruct((rows, *shape), np.dtype(dtype))
            for name, (shape, dtype) in kinds.items()
        }

    @property
    def pictures(self) -> list[tuple[str, tuple[int, int], list[str]]]:
        """Inputs with pictures, one for each size: name, height and width, and cameras."""
        robot, sizes = self.robot, self.processor.image_sizes
        fits = {camera: self.processor.fit(robot.cameras.index(camera)) for camera in self.cameras}
        return [
            (
                "images" if not number else f"images_{number + 1}",
                shape,
                [camera for camera in self.cameras if fits[camera].shape == shape],
            )
            for number, shape in enumerate(sizes)
        ]

    @property
    def outputs(self) -> Specs:
        """Arrays that one call returns."""
        steps = len(self.policy.model.config.answered)
        shape = self.batch, steps, len(self.robot.actions.offset)
        return {"actions": jax.ShapeDtypeStruct(shape, np.dtype(np.float32))}

    @cached_property
    def weights(self) -> dict[str, Array]:
        """The policy's parameters by path."""
        leaves = jax.tree_util.tree_flatten_with_path(self.policy.params)[0]
        return {path_name(path): leaf for path, leaf in leaves}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, 0 for a policy without language."""
        return self.processor.text_limit

    def __call__(
        self, weights: Mapping[str, Array], inputs: Mapping[str, Array]
    ) -> Float[Array, "b h a"]:
        """Actions in the robot's units; to be traced."""
        params = jax.tree.unflatten(
            jax.tree.structure(self.policy.params), [weights[name] for name in self.weights]
        )
        batch = self._batch(**inputs)
        model, noise = bind_processor(self.policy.model, self.processor), inputs["noise"][:, None]
        with compiling_for("any"):
            chunk = model.sample_actions(params, batch, noise)[:, 0]
        steps = model.config.answered
        return self._acted(chunk[:, steps.start : steps.stop], inputs["state"])

    def _batch(
        self, state: Any, noise: Any, tokens: Any = None, length: Any = 1, **pictures: Any
    ) -> PackedBatch:
        table, rows = self._table, self.batch
        at = jnp.broadcast_to(jnp.clip(length, 1, max(self.longest, 1)) - 1, rows)
        first = {
            name: jnp.broadcast_to(value[:1], (rows, *value.shape[1:]))
            for name, value in vars(table).items()
            if isinstance(value, np.ndarray) and name not in ("images", *_LAID)
        }
        shown = [self._shown(pictures[name], cameras) for name, _, cameras in self.pictures]
        laid = {name: jnp.asarray(getattr(table, name))[at] for name in _LAID}
        scaled = _scaled(self.robot.converted(state), self.robot)
        padding = self.processor.state_dim - scaled.shape[-1]
        changed = {
            "images": shown[0],
            "more_images": tuple(shown[1:]),
            "state": jnp.pad(scaled, ((0, 0), (0, padding)))[:, None],
        }
        if tokens is not None:
            written = jnp.arange(tokens.shape[1]) < length[:, None]
            changed["text"] = jnp.where(written, tokens, 0)
        values: dict[str, Any] = first | laid | changed
        return PackedBatch(**values)

    def _shown(self, images: Array, cameras: Sequence[str]) -> Array:
        """Pictures of one size that the model sees; those of absent cameras may be black."""
        names, fit = self.robot.cameras, self.processor.fit
        seen = [names[i] for i in self._sample.cameras if fit(i).shape == images.shape[2:4]]
        if seen == list(cameras):
            return images
        black = jnp.zeros_like(images[:, 0])
        at = {camera: images[:, i] for i, camera in enumerate(cameras)}
        return jnp.stack([at.get(camera, black) for camera in seen], axis=1)

    def _acted(self, chunk: Array, state: Array) -> Array:
        robot = self.robot
        if robot.own is not None:
            raise ValueError(
                f"'{robot.name}' has units of its family's own ({robot.own.kind}), which are not "
                "exported; serve the policy (tools.serve)."
            )
        offset, scale = (np.asarray(x) for x in (robot.actions.offset, robot.actions.scale))
        actions = chunk[..., : len(offset)] * scale.astype(np.float32) + offset.astype(np.float32)
        if robot.relative:
            measured = np.asarray(robot.relative)
            origin = robot.converted(state)[:, np.maximum(measured, 0)]
            actions += jnp.where(measured >= 0, origin, 0)[:, None]
        return actions if robot.units is None else robot.units.acted(actions)

    @cached_property
    def _sample(self) -> Sample:
        """An observation with the longest prompt and blank pictures."""
        return self._of(self.longest)

    @cached_property
    def _table(self) -> PackedBatch:
        """A row for each length of the prompt, from one token on; one without language."""
        samples = [self._of(n) for n in range(min(1, self.longest), self.longest + 1)]
        return self.policy.rows(samples)

    def _of(self, length: int) -> Sample:
        processor, robot = self.processor, self.robot
        at = self._image_at
        sample = processor.sample(
            [
                processor.blank(i) if camera in self.cameras else None
                for i, camera in enumerate(robot.cameras)
            ],
            np.zeros(len(robot.state.offset), np.float32),
            np.zeros(max(length, *at, 1), np.int32) if at else np.zeros(length, np.int32),
            embodiment=self.policy.embodiment,
        )
        return replace(sample, image_at=at)

    @cached_property
    def _image_at(self) -> tuple[int, ...]:
        """Places of the pictures between the words of a chat; no prompt moves them."""
        prompts = self.processor.prompts
        if prompts is None or not prompts.shows_pictures:
            return ()
        still, pictures = np.zeros(self.processor.state_dim, np.float32), len(self.cameras)
        dims = len(self.robot.state.offset)
        places = {prompts.read(words, still, dims, pictures)[1] for words in _PROMPTS}
        if len(places) > 1:
            raise ValueError(
                f"The images' places depend on the prompt ({sorted(places)}), which one "
                "exported program cannot handle; use tools.serve."
            )
        return places.pop()


def whole(policy: Policy, cameras: Sequence[str] = (), batch: int = 1) -> Act:
    """The act of a policy that sees these of its cameras, or all if none are named.

    Raises:
      ValueError: as `Act`.
    """
    robot = processor_of(policy, "an exported policy's robot").embodiments[policy.embodiment]
    return Act(policy, tuple(cameras) or robot.cameras, batch)


def _scaled(state: Float[Array, "b s"], robot: Embodiment) -> Float[Array, "b s"]:
    """The state in the model's units. The host computes in 64 bits; here the offset is the sum of
    two f32, so that a dim that hardly moves keeps its digits. The barrier keeps a compiler from
    adding the two."""
    offset = np.asarray(robot.state.offset)
    high = offset.astype(np.float32)
    low = (offset - high).astype(np.float32)
    near = jax.lax.optimization_barrier(state - high)
    return (near - low) / np.asarray(robot.state.scale).astype(np.float32)
