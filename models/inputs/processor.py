"""One preparation for training and for acting: from an observation to a `Sample`, and from actions
back to the robot's units.

A policy that is trained with one form of prompts, scaling of states or fit of pictures and run with
another fails without an error. So there is one road: `Processor.columns` prepares many samples for
the loader, and `Processor.sample` is `columns` of one with its pictures; a camera's `fit` is what
a store was converted with or what decoding applies (`data.frames.fit_of`). A run that starts from a
policy derives its processor from that policy's. A processor is JSON and is stored in the
checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

from models.files.bounds import LARGEST_DIMS, LARGEST_HORIZON, check_size
from models.files.older_processor import current_fields
from models.inputs.action_tokens import ActionTokens
from models.inputs.embodiment import Embodiment
from models.inputs.history import NOW, History
from models.inputs.packed_batch import Sample
from models.inputs.pictures import PictureFit
from models.inputs.prompts import PromptReader, StateInput, normalized
from models.inputs.tokenizer import TextTokenizer, Tokenizer

_NO_TOKENS = np.zeros(0, np.int32)


class Columns(NamedTuple):
    """N samples of one robot in the model's units and dims, without their pictures; the fields are
    those of `Sample`."""

    text: list[Int[np.ndarray, " _t"]]
    image_at: list[tuple[int, ...]]
    state: Float32[np.ndarray, "n s"]
    actions: Float32[np.ndarray, "n h a"]
    action_mask: Bool[np.ndarray, "n h a"]
    subtask: list[Int[np.ndarray, " _n"]]
    action_tokens: list[Int[np.ndarray, " _m"]]
    shown: Bool[np.ndarray, "n c"]
    """Cameras with a picture, black ones included."""
    past_state: Float32[np.ndarray, "n p s"]


@dataclass(frozen=True)
class Processor:
    """Everything between a dataset's or robot's units and the model's.

    `state_input`: where the model reads the state, see `ModelConfig`. `embodiments`: robots, with
    their scales. `prompts`: how text is read, None for a model without language. `pictures`: how
    pictures are fitted, or a way for each camera by its number; () for a model without pictures.
    `black_absent`: an absent camera is seen as a black picture (openpi's π0-FAST), else it costs
    nothing. With `targets`, samples also carry their action chunk as
    tokens. With `subtask_limit`, a policy predicts what to do next, in up to that many tokens,
    before it acts. `observed`: what is read of the past. `held`: steps of a chunk outside of the
    episode show its nearest action (as LeRobot's do), else zeros.

    Raises:
      ValueError: a size is out of bounds, there are no embodiments, two share a name, one has more
        cameras or dims than the model, `observed` has states where they are text, the prompt has
        a state that the model does not read there (or the reverse), or ids of action tokens overlap
        those of the words.
    """

    state_dim: int
    action_dim: int
    horizon: int
    state_input: StateInput
    embodiments: tuple[Embodiment, ...]
    prompts: PromptReader | None
    pictures: PictureFit | tuple[PictureFit, ...]
    black_absent: bool = False
    targets: ActionTokens | None = None
    subtask_limit: int = 0
    observed: History = NOW
    held: bool = False

    def __post_init__(self) -> None:
        check_size("state_dim", self.state_dim, LARGEST_DIMS)
        check_size("action_dim", self.action_dim, LARGEST_DIMS)
        check_size("horizon", self.horizon, LARGEST_HORIZON)
        check_size("subtask_limit", self.subtask_limit, least=0)
        names = [robot.name for robot in self.embodiments]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"A processor's embodiments are {names}; expected at least one, each with a "
                "different name."
            )
        for robot in self.embodiments:
            dims = len(robot.state.offset), len(robot.actions.offset)
            if dims[0] > self.state_dim or dims[1] > self.action_dim:
                raise ValueError(
                    f"Embodiment '{robot.name}' has {dims[0]} state and {dims[1]} action dims, but "
                    f"the model takes up to {self.state_dim} and {self.action_dim}."
                )
            if robot.own is not None and len(robot.read(np.zeros(dims[0]))) > self.state_dim:
                raise ValueError(
                    f"The state of embodiment '{robot.name}' has more numbers in the model's units "
                    f"than the {self.state_dim} that the model takes."
                )
            if len(robot.cameras) > len(self.fits) > 1:
                raise ValueError(
                    f"Embodiment '{robot.name}' has cameras {list(robot.cameras)}, but the model "
                    f"reads {len(self.fits)}; choose cameras in a mixture."
                )
        if self.state_input == "text" and self.observed.state:
            raise ValueError(
                "state_input is 'text', in which past states are not spelt; leave 'state' out of "
                "observed, or read the state elsewhere."
            )
        spelt = self.prompts is not None and self.prompts.spells_state
        if spelt != (self.state_input == "text"):
            raise ValueError(
                f"state_input is '{self.state_input}', but the prompt has "
                f"{'a' if spelt else 'no'} state in it; give a reader of prompts that fits."
            )
        targets = self.targets
        if targets is None or targets.fast is None or self.prompts is None:
            return
        text = self.prompts.tokenizer
        if isinstance(text, Tokenizer) and targets.lowest < text.size:
            raise ValueError(
                f"{targets.fast.size} FAST tokens, counted down from id {targets.top}, end at id "
                f"{targets.lowest}, but ids below {text.size} are text; raise the vocabulary or "
                "use fewer words."
            )

    @staticmethod
    def from_older(values: dict[str, Any]) -> dict[str, Any]:
        """The fields of a processor from its JSON, which may be of an older version."""
        return current_fields(values)

    def with_robots(self, robots: Sequence[Embodiment], **changes: Any) -> "Processor":
        """The same preparation for other robots, or for the same with other scales; `changes` of
        other fields are made together with it."""
        return replace(self, embodiments=tuple(robots), **changes)

    def with_tokenizer(self, tokenizer: TextTokenizer) -> "Processor":
        """The same preparation with a tokenizer.

        Raises:
          ValueError: the policy reads no text, or text of another kind.
        """
        if self.prompts is None:
            raise ValueError("The policy reads no text; leave out the tokenizer.")
        return replace(self, prompts=replace(self.prompts, tokenizer=tokenizer))

    def with_limit(self, limit: int) -> "Processor":
        """The same preparation with another limit of a prompt's tokens."""
        if self.prompts is None:
            return self
        return replace(self, prompts=replace(self.prompts, limit=limit))

    @property
    def fits(self) -> tuple[PictureFit, ...]:
        """The ways in which pictures are fitted: one for all cameras, or one for each."""
        return (self.pictures,) if isinstance(self.pictures, PictureFit) else self.pictures

    def fit(self, camera: int) -> PictureFit:
        """The way in which a camera's pictures are fitted, by its number."""
        return self.fits[camera if len(self.fits) > 1 else 0]

    def blank(self, camera: int) -> UInt8[np.ndarray, "_h _w 3"]:
        """A black picture of the size that the model reads of a camera, where no picture is."""
        return np.zeros((*self.fit(camera).shape, 3), np.uint8)

    def seen(self, shown: Bool[np.ndarray, "n c"]) -> Bool[np.ndarray, "n c"]:
        """Cameras of which the model sees a picture, from those that have one."""
        if self.black_absent or not self.fits:
            return np.full_like(shown, bool(self.fits))
        return shown

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths of the pictures that the model sees, each once."""
        return tuple(dict.fromkeys(fit.shape for fit in self.fits))

    @property
    def image_dtype(self) -> np.dtype:
        """uint8 if all pictures are in whole grey levels, else float32."""
        return np.result_type(np.uint8, *(fit.dtype for fit in self.fits))

    @property
    def text_limit(self) -> int:
        """Most tokens of a prompt; 0 for a model without language."""
        return 0 if self.prompts is None else self.prompts.limit

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that reads prompts.

        Raises:
          ValueError: the policy came without a tokenizer, or reads no text.
        """
        return self._reader.found()

    @property
    def has_tokenizer(self) -> bool:
        """True if prompts can be given as text."""
        return self.prompts is not None and self.prompts.tokenizer is not None

    def longest_text(self, prompts: Sequence[str], embodiment: int, pictures: int) -> list[int]:
        """Tokens that each prompt takes at most, whatever the state.

        Raises:
          ValueError: a prompt is longer than `text_limit`.
        """
        if self.prompts is None:
            return [0] * len(prompts)
        dims = len(self.embodiments[embodiment].state.offset)
        state = self.prompts.longest(self.state_dim, dims)
        pictures *= self.observed.views
        return [len(self.prompts.read(prompt, state, dims, pictures)[0]) for prompt in prompts]

    def columns(
        self,
        prompts: Sequence[str | Int[np.ndarray, " _t"]],
        state: Float[np.ndarray, "n _s"],
        shown: Bool[np.ndarray, "n c"],
        *,
        embodiment: int = 0,
        actions: Float[np.ndarray, "n _h _a"] | None = None,
        valid: Bool[np.ndarray, "n _h"] | None = None,
        subtasks: Sequence[str | None] | None = None,
        past_state: Float[np.ndarray, "n p _s"] | None = None,
    ) -> Columns:
        """Samples in the model's units from those in the robot's.

        Args:
          prompts: of each sample, text, or the token ids of all of it.
          state: in the dataset's units, a column for each state dim of the embodiment.
          shown: which of the embodiment's cameras have a picture.
          actions: the chunks that follow, `horizon` steps in the dataset's units; None when acting.
          valid: which of those steps lie within the episode; action tokens repeat the last of these
            instead of the others. A sample without any has nothing to learn from.
          subtasks: what to do next, in words; in training the model learns to predict it, and in
            acting it carries it out.
          past_state: earlier states, the newest first, in the dataset's units.

        Raises:
          ValueError: the number of state dims or of action dims is not the embodiment's, a prompt
            is longer than `text_limit`, or FAST cannot spell the actions.
        """
        padded, chunks, masks = self.numbers(state, actions, valid, embodiment=embodiment)
        shown = self.seen(shown)
        counts = (shown.sum(axis=1) * self.observed.views).tolist()
        dims = len(self.embodiments[embodiment].state.offset)
        read = [
            self._text(prompt, one, dims, pictures)
            for prompt, one, pictures in zip(prompts, padded, counts, strict=True)
        ]
        return Columns(
            [ids for ids, _ in read],
            [at for _, at in read],
            *(padded, chunks, masks),
            [
                _NO_TOKENS if subtask is None else self.subtask_tokens(subtask)
                for subtask in subtasks or [None] * len(padded)
            ],
            [
                self.chunk_tokens(chunk, mask, embodiment)
                for chunk, mask in zip(chunks, masks, strict=True)
            ],
            shown,
            self._past_states(past_state, len(padded), embodiment),
        )

    def sample(
        self,
        images: Sequence[UInt8[np.ndarray, "_h _w 3"] | None] | UInt8[np.ndarray, "_c _h _w 3"],
        state: Float[np.ndarray, " _s"],
        prompt: str | Int[np.ndarray, " _t"],
        *,
        embodiment: int = 0,
        actions: Float[np.ndarray, "_h _a"] | None = None,
        valid: Bool[np.ndarray, " _h"] | None = None,
        subtask: str | None = None,
        past: Mapping[str, Sequence[np.ndarray | None]] = MappingProxyType({}),
        id: int = 0,
    ) -> Sample:
        """`columns` of one sample, with its pictures.

        Args:
          images: one per camera of the embodiment, in its order; any size; None where absent.
          past: earlier values of "state" and of cameras by name, the newest first, as many as
            `observed` says; None before the episode's start. A value that stands there again, or is
            the present one, is the same array. Without an entry, all are None.

        Raises:
          ValueError: as `columns`, or the number of images is not the embodiment's, or a past is of
            another length.
        """
        robot = self.embodiments[embodiment]
        if len(images) != len(robot.cameras):
            raise ValueError(
                f"Embodiment '{robot.name}' has cameras {list(robot.cameras)}, "
                f"got {len(images)} images."
            )
        self._check_past(past, robot)
        states = past.get("state") or [None] * len(self.observed.state)
        one = self.columns(
            [prompt],
            np.asarray(state)[None],
            np.array([[image is not None for image in images]], bool),
            embodiment=embodiment,
            actions=None if actions is None else actions[None],
            valid=None if valid is None else valid[None],
            subtasks=[subtask],
            past_state=self._stacked(states, np.shape(state)) if states else None,
        )
        cameras = tuple(np.flatnonzero(one.shown[0]).tolist())
        fitted = [self._fitted(robot, camera, images[camera], past) for camera in cameras]
        pictures: list[Any] = [now for now, _ in fitted]
        for age in range(self.observed.views - 1):
            then = (now if earlier[age] is None else earlier[age] for now, earlier in fitted)
            pictures = [*then, *pictures]
        return Sample(
            images=tuple(pictures),
            text=one.text[0],
            state=one.state[0],
            actions=one.actions[0],
            action_mask=one.action_mask[0],
            embodiment=embodiment,
            id=id,
            image_at=one.image_at[0],
            subtask=one.subtask[0],
            action_tokens=one.action_tokens[0],
            cameras=cameras * self.observed.views,
            past=tuple(earlier for _, earlier in fitted) if self.observed.pictures else (),
            past_state=tuple(
                None if given is None else scaled
                for given, scaled in zip(states, one.past_state[0], strict=True)
            ),
        )

    def subtask_tokens(self, subtask: str) -> Int[np.ndarray, " t"]:
        """Token ids of a subtask for the language model to predict, from begin to end."""
        end = np.int32(self.tokenizer.end)
        return np.append(self._reader.whole(normalized(subtask)), end)

    def subtask_said(self, tokens: Int[np.ndarray, " t"]) -> Int[np.ndarray, " _t"]:
        """A predicted subtask from begin to end, in the form of `subtask_tokens`."""
        begin, end = self.tokenizer.begin, self.tokenizer.end
        return np.array([begin, *self._until_end(tokens), end], np.int32)

    def subtask_text(self, tokens: Int[np.ndarray, " t"]) -> str:
        """The text of predicted tokens, up to the end token."""
        return self.tokenizer.decode(self._until_end(tokens))

    def chunk_tokens(
        self, chunk: Float[np.ndarray, "h a"], mask: Bool[np.ndarray, "h a"], embodiment: int = 0
    ) -> Int[np.ndarray, " t"]:
        """Action tokens of a sample's chunk, extended as in `held_chunk`; empty if none are learnt
        or no step counts."""
        if self.targets is None or self.targets.fast is None or not mask.any():
            return _NO_TOKENS
        held = self.held_chunk(chunk, mask, embodiment)
        return self.targets.encode(held, self.tokenizer)

    def held_chunk(
        self, chunk: Float[np.ndarray, "h a"], mask: Bool[np.ndarray, "h a"], embodiment: int = 0
    ) -> Float[np.ndarray, "h _d"]:
        """A sample's chunk in the robot's own dims, with its last step in the episode repeated
        after the episode's end; action tokens spell this chunk."""
        steps = np.where(mask[:, 0], np.arange(self.horizon), 0)
        dims = len(self.embodiments[embodiment].actions.offset)
        return chunk[np.maximum.accumulate(steps), :dims]

    @property
    def action_tokens(self) -> ActionTokens:
        """The form in which chunks are written and read as tokens.

        Raises:
          ValueError: the policy has no action tokens.
        """
        if self.targets is None:
            raise ValueError("This policy neither writes nor learns action tokens.")
        return self.targets

    def predicted_actions(
        self,
        tokens: Int[np.ndarray, " t"],
        embodiment: int = 0,
        state: Float[np.ndarray, " _s"] | None = None,
    ) -> Float[np.ndarray, "h d"]:
        """The chunk, in the robot's units, that predicted action tokens spell, up to the end token.

        Raises:
          ValueError: there are no action tokens, they do not spell a chunk, or as `actions`.
        """
        dims = len(self.embodiments[embodiment].actions.offset)
        chunk = self.action_tokens.decode(self._until_end(tokens), self.horizon, dims)
        return self.actions(chunk, embodiment, state)

    @property
    def _reader(self) -> PromptReader:
        if self.prompts is None:
            raise ValueError("The policy reads no text, so it has no tokenizer.")
        return self.prompts

    def _text(
        self,
        prompt: str | Int[np.ndarray, " _t"],
        state: Float[np.ndarray, " s"],
        dims: int,
        pictures: int,
    ) -> tuple[Int[np.ndarray, " _t"], tuple[int, ...]]:
        if self.prompts is None:
            return _NO_TOKENS, ()
        if isinstance(prompt, str):
            return self.prompts.read(prompt, state, dims, pictures)
        return self.prompts.checked(prompt, "given as tokens"), ()

    def _check_past(
        self, past: Mapping[str, Sequence[np.ndarray | None]], robot: Embodiment
    ) -> None:
        wanted = self.observed.columns(robot.cameras) if past else {}
        for name, values in past.items():
            if len(values) != len(wanted.get(name, ())):
                raise ValueError(
                    f"The past of '{name}' has {len(values)} values, but the policy reads "
                    f"{len(wanted.get(name, ()))}; give those of processor.observed."
                )

    def _fitted(
        self,
        robot: Embodiment,
        camera: int,
        image: UInt8[np.ndarray, "_h _w 3"] | None,
        past: Mapping[str, Sequence[np.ndarray | None]],
    ) -> tuple[np.ndarray, tuple[np.ndarray | None, ...]]:
        """A camera's picture and its earlier ones; the same array is fitted once."""
        fit, name = self.fit(camera), robot.cameras[camera]
        now = fit.black if image is None else fit(image)
        made = {} if image is None else {id(image): now}
        earlier = past.get(name, [None] * len(self.observed.camera(name)))
        for x in earlier:
            if x is not None and id(x) not in made:
                made[id(x)] = fit(x)
        return now, tuple(None if x is None else made[id(x)] for x in earlier)

    @staticmethod
    def _stacked(
        states: Sequence[np.ndarray | None], shape: tuple[int, ...]
    ) -> Float[np.ndarray, "1 p _s"]:
        return np.stack([np.zeros(shape) if x is None else x for x in states])[None]

    def _past_states(
        self, past: Float[np.ndarray, "n p _s"] | None, count: int, embodiment: int
    ) -> Float32[np.ndarray, "n p s"]:
        length = len(self.observed.state)
        if past is None:
            return np.zeros((count, length, self.state_dim), np.float32)
        flat = self.numbers(past.reshape(-1, past.shape[-1]), embodiment=embodiment)[0]
        return flat.reshape(count, length, self.state_dim)

    def _until_end(self, tokens: Int[np.ndarray, " t"]) -> Int[np.ndarray, " _n"]:
        tokens = np.asarray(tokens)
        ends = np.flatnonzero(tokens == self.tokenizer.end)
        return tokens[: ends[0]] if len(ends) else tokens

    def numbers(
        self,
        state: Float[np.ndarray, "n _s"],
        actions: Float[np.ndarray, "n _h _a"] | None = None,
        valid: Bool[np.ndarray, "n _h"] | None = None,
        *,
        embodiment: int = 0,
    ) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n h a"], Bool[np.ndarray, "n h a"]]:
        """States, chunks and masks of n samples in the model's units and dims, as in `columns`.

        Raises:
          ValueError: the number of state dims, or the shape of the chunks, is not the embodiment's.
        """
        robot, n = self.embodiments[embodiment], len(state)
        if state.shape[1] != len(robot.state.offset):
            raise ValueError(
                f"Embodiment '{robot.name}' has {len(robot.state.offset)} state dims, "
                f"got {state.shape[1]}."
            )
        padded = np.zeros((n, self.state_dim), np.float32)
        read = robot.read(np.asarray(state, np.float32))
        padded[:, : read.shape[1]] = read
        chunk = np.zeros((n, self.horizon, self.action_dim), np.float32)
        mask = np.zeros(chunk.shape, bool)
        if actions is not None:
            dims = len(robot.actions.offset)
            if actions.shape[1:] != (self.horizon, dims):
                raise ValueError(
                    f"Embodiment '{robot.name}' has action chunks of shape {(self.horizon, dims)}, "
                    f"got {actions.shape[1:]}."
                )
            learned = robot.learned(actions, state)
            steps = learned.shape[1]
            chunk[:, :steps, :dims] = learned
            mask[:, :steps, :dims] = True if valid is None else valid[:, :steps, None]
            if not self.held:
                chunk[~mask] = 0
        return padded, chunk, mask

    def actions(
        self,
        chunk: Float[np.ndarray, "*b h _a"],
        embodiment: int = 0,
        state: Float[np.ndarray, "*b _s"] | None = None,
    ) -> Float[np.ndarray, "*b _steps _d"]:
        """A model's chunk in the robot's units, dims and steps.

        Args:
          state: the robot's state at the observation, in its units; for relative actions.

        Raises:
          ValueError: the embodiment's actions are relative to the state, and none is given.
        """
        robot = self.embodiments[embodiment]
        own = None if robot.own is not None else len(robot.actions.offset)
        return robot.acted(np.asarray(chunk)[..., :own], state).astype(np.float32)
