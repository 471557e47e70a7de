"""A policy bound to the robot that it acts for: a simulated robot of a suite, or the robot of a
server's clients. Evaluation, recordings, RL and serving all prepare observations and read actions
here.

On the host, `Processor.sample` prepares each row. Inside a traced program, the same numbers come
from tables: prompts are few, so each is tokenised and laid out once, and each row gathers its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from models.inputs.camera_names import find_camera
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.observation import RobotObservation
from models.inputs.packed_batch import PackedBatch, pack
from models.inputs.pictures import sizes_told
from models.inputs.processor import Processor
from models.policy import Policy
from models.requests import Request
from models.session import RobotSession


class RobotSpec(Protocol):
    """Cameras, state and actions of a robot; `sim.protocol.Spec` is one."""

    @property
    def name(self) -> str:
        """Name of the suite, for messages."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Cameras in the order of observed pictures."""

    @property
    def picture(self) -> tuple[int, int]:
        """Height and width of observed pictures, pixels."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's dims."""

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of an action's dims."""

    @property
    def prompts(self) -> tuple[tuple[str, ...], ...]:
        """Wordings of each goal."""


@dataclass(frozen=True)
class RobotPolicy:
    """A policy for one robot, made by `in_suite` or `for_clients`, which check that it fits the
    robot.

    `cameras`: for each of the policy's cameras, in its order, the index of its picture among the
    observed ones; None if the robot has no such camera, which costs nothing. `picture`: height and
    width of the observed pictures, if they are all alike. `prompts`: wordings of each goal, if
    known.
    """

    policy: Policy
    name: str
    cameras: tuple[int | None, ...]
    picture: tuple[int, int] | None = None
    prompts: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def in_suite(cls, policy: Policy, spec: RobotSpec) -> "RobotPolicy":
        """A policy in a suite. It finds its cameras among the suite's by name: "front" also matches
        "observation.images.front". Cameras that may be absent and are absent cost nothing.

        Raises:
          ValueError: the policy was trained on another robot, or came without its processor.
        """
        processor = processor_of(policy, spec.name)
        robot = processor.embodiments[policy.embodiment]
        ours = len(robot.state.offset), len(robot.actions.offset)
        theirs = len(spec.state_names), len(spec.action_names)
        places = tuple(find_camera(camera, spec.cameras) for camera in robot.cameras)
        blind = {camera for camera, at in zip(robot.cameras, places, strict=True) if at is None}
        if ours != theirs or not blind <= set(robot.absent) or len(blind) == len(places):
            height, width = spec.picture
            raise ValueError(
                f"The policy was trained on '{robot.name}' with cameras {list(robot.cameras)}, "
                f"{ours[0]} state and {ours[1]} action dims, but {spec.name} has cameras "
                f"{list(spec.cameras)}, {theirs[0]} state and {theirs[1]} action dims; its images "
                f"of {height} × {width} pixels would be resized to "
                f"{sizes_told(processor.image_sizes)}. Use a suite of the policy's own robot, "
                "train on data whose cameras have the suite's names, or map the suite's cameras "
                "to the policy's: --cameras SUITE'S=POLICY'S."
            )
        return cls(policy, spec.name, places, spec.picture, spec.prompts)

    @classmethod
    def for_clients(cls, policy: Policy) -> "RobotPolicy":
        """A policy for clients that send pictures of its own cameras, of any size.

        Raises:
          ValueError: the policy came without its processor.
        """
        robot = processor_of(policy, "its clients' robots").embodiments[policy.embodiment]
        return cls(policy, robot.name, tuple(range(len(robot.cameras))))

    @property
    def processor(self) -> Processor:
        """The policy's processor."""
        return processor_of(self.policy, self.name)

    @property
    def embodiment(self) -> Embodiment:
        """Cameras and scales of the robot that the policy was trained on."""
        return self.processor.embodiments[self.policy.embodiment]

    @property
    def reads_state(self) -> bool:
        """True if the model or its action units need the state."""
        return self.policy.reads_state

    @property
    def chunk(self) -> tuple[int, int]:
        """Steps and dims of an action chunk in the robot's units."""
        own = self.embodiment.own
        steps = len(self.policy.model.config.answered) if own is None else own.steps
        return steps, len(self.embodiment.actions.offset)

    def session(self, number: int, continues: bool) -> RobotSession:
        """See `Policy.session`."""
        return self.policy.session(number, continues=continues)

    def act(
        self,
        observation: tuple[UInt8[ArrayLike, "n c h w 3"], Float[ArrayLike, "n s"]],
        prompts: Sequence[str],
        keys: UInt32[np.ndarray, "n 2"],
        *,
        sessions: Sequence[RobotSession] | None = None,
        executed: Sequence[int | None] | None = None,
        committed: int = 0,
    ) -> Float[np.ndarray, "n t a"]:
        """Chunks in the robot's units for N observations (`sim.acting.Policy`).

        Args:
          keys: any two integers for each row, such as (episode, step); a row's noise depends on
            them alone.
          sessions: of the rows, which then remember the answers; `executed` and `committed` as in
            `Policy.infer`.
        """
        images, states = (np.asarray(x) for x in observation)
        unknown = [None] * len(images)
        rows = zip(
            *(images, states, prompts, keys, sessions or unknown, executed or unknown), strict=True
        )
        requests = [
            self.request((shown, state), prompt, key, session, done, committed)
            for shown, state, prompt, key, session, done in rows
        ]
        chunks = self.policy.sample_actions(requests)
        if sessions is None:
            return chunks
        return np.stack([s.answered(chunk) for s, chunk in zip(sessions, chunks, strict=True)])

    def request(
        self,
        observation: tuple[UInt8[ArrayLike, "c h w 3"], Float[ArrayLike, " s"]],
        prompt: str,
        key: Sequence[int] | UInt32[np.ndarray, "2"],
        session: RobotSession | None = None,
        executed: int | None = None,
        committed: int = 0,
    ) -> Request:
        """A request for `Policy.sample_actions` from one observation of the robot.

        Raises:
          ValueError: as `Policy.prepare`.
        """
        (request,) = self.policy.prepare(
            [self.observed(observation, prompt)],
            np.asarray([key]),
            session=session,
            executed=executed,
            committed=committed,
        )
        return request

    def observed(
        self,
        observation: tuple[UInt8[ArrayLike, "c h w 3"], Float[ArrayLike, " s"]],
        prompt: str,
    ) -> RobotObservation:
        """The observation as the policy takes it, from pictures in the order of the robot's cameras
        and the state in its units."""
        pictures, state = (np.asarray(x) for x in observation)
        shown = zip(self.embodiment.cameras, self.cameras, strict=True)
        images = {camera: pictures[at] for camera, at in shown if at is not None}
        return RobotObservation(images, prompt, state)

    @cached_property
    def longest_text(self) -> int:
        """Tokens of the longest prompt to expect, with the state where it is text."""
        if not self.prompts:
            return self.processor.text_limit
        shown = sum(at is not None for at in self.cameras)
        return max(self.processor.longest_text(self._wordings, self.policy.embodiment, shown))

    def check_traced(self) -> None:
        """Raises ValueError unless `batch` and `actions` can replace what the host prepares."""
        sizes = self.processor.image_sizes
        if (self.picture,) != sizes:
            raise ValueError(
                f"{self.name} renders images of {self.picture} pixels, but the policy takes "
                f"{sizes_told(sizes)}, and images are not resized on a device; give the "
                f"environment image_size={max(map(max, sizes), default=1)}."
            )
        if not self.processor.fit(0).whole:
            raise ValueError(
                "The policy sees only the middle of each image, and images are not cropped on a "
                "device; choose placement 'host'."
            )
        if (adapter := self.embodiment.adapter) or self.embodiment.own is not None:
            raise ValueError(
                f"The policy converts units ('{adapter or 'own'}'), which is not done on a "
                "device; choose placement 'host'."
            )
        if self.processor.observed.ago:
            raise ValueError(
                "The policy reads past observations, which are not kept on a device; choose "
                "placement 'host'."
            )
        if self.processor.state_input == "text":
            raise ValueError(
                "The policy reads its state as text, which cannot be written on a device; choose "
                "placement 'host', or a model whose state_input is 'token' or 'suffix'."
            )

    def batch(
        self,
        observation: tuple[
            UInt8[Array | np.ndarray, "n c h w 3"], Float[Array | np.ndarray, "n s"]
        ],
        goal: Int[Array, " n"],
        wording: Float[Array, " n"],
    ) -> PackedBatch:
        """A batch with a row for each observation, to use in a traced program; `action_mask` is all
        false.

        Args:
          wording: a draw in [0, 1) that selects one of the goal's wordings for the prompt.
        """
        images, state = observation
        counts = jnp.array([len(wordings) for wordings in self.prompts])
        first = jnp.cumsum(counts) - counts
        at = first[goal] + jnp.int32(wording * counts[goal])
        rows = jax.tree.map(lambda x: jnp.asarray(x)[at], self._table)
        scaled = _exactly(jnp.asarray(state), self.embodiment.state)
        padding = rows.state.shape[-1] - scaled.shape[-1]
        shown = jnp.array([at for at in self.cameras if at is not None])
        changed = {
            "images": images[:, shown],
            "state": jnp.pad(scaled, ((0, 0), (0, padding)))[:, None],
        }
        return PackedBatch(**{**vars(rows), **changed})

    def actions(
        self, chunk: Float[Array, "n h _a"], state: Float[Array, "n _s"]
    ) -> Float[Array, "n h _d"]:
        """A model's chunks in the robot's units and dims, to use in a traced program; `state` is
        the observed state."""
        robot = self.embodiment
        found = _exactly(chunk[..., : self._dims[1]], robot.actions, inverse=True)
        relative = np.asarray(robot.relative)
        if not relative.size:
            return found
        origin = jnp.where(relative >= 0, state[:, relative], 0)
        return found + origin[:, None]

    def acted(self, steps: Int[Array, "*b"], shape: tuple[int, ...]) -> Bool[Array, "*b h a"]:
        """Mask of the entries of chunks [..., h, a], given as `shape`, that were executed if the
        first `steps` steps were."""
        horizon, width = shape[-2:]
        early = jnp.arange(horizon) < steps[..., None]
        return early[..., None] & (jnp.arange(width) < self._dims[1])

    @property
    def _dims(self) -> tuple[int, int]:
        """Dims of the robot's state and actions; the model may have more of each."""
        return len(self.embodiment.state.offset), len(self.embodiment.actions.offset)

    @property
    def _wordings(self) -> list[str]:
        return [wording for wordings in self.prompts for wording in wordings]

    @cached_property
    def _table(self) -> PackedBatch:
        """A row for each wording, with blank pictures."""
        processor, config = self.processor, self.policy.model.config
        pictures = [None if at is None else processor.blank(i) for i, at in enumerate(self.cameras)]
        images = sum(at is not None for at in self.cameras)
        still = np.zeros(self._dims[0], np.float32)
        samples = [
            processor.sample(pictures, still, prompt, embodiment=self.policy.embodiment)
            for prompt in self._wordings
        ]
        text = max(len(sample.text) for sample in samples)
        prefix = config.layout(prefix=0, samples=1, images=images).prefix_length(images, text)
        layout = config.layout(prefix=prefix, samples=1, images=images, text=text)
        return pack([[sample] for sample in samples], layout)


def processor_of(policy: Policy, where: str) -> Processor:
    """The policy's processor.

    Raises:
      ValueError: the policy came without one, so it cannot act for any robot.
    """
    if policy.processor is None:
        raise ValueError(
            "The checkpoint came without a processor (scales and tokenizer), so it cannot act in "
            f"a robot's units, as needed for {where}; use one that was trained or converted here."
        )
    return policy.processor


def _exactly(x: Float[Array, "*b d"], scaling: Normalizer, inverse: bool = False) -> Any:
    """x scaled in 64 bits and rounded once, as numpy does on the host."""
    offset, scale = np.asarray(scaling.offset), np.asarray(scaling.scale)
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        scaled = wide * scale + offset if inverse else (wide - offset) / scale
        return scaled.astype(jnp.float32)
