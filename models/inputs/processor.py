"""One preparation for training and for acting: from an observation to a `Sample`, and from actions
back to the robot's units.

A policy that is trained with one cleaning of prompts, scaling of states or resizing of images and
run with another fails without an error, so both sides call `Processor.sample`. A processor is JSON
and is stored in the checkpoint. Prompt format and 256-bin state text follow π0.5 (openpi; arXiv
2504.16054).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from models.files.bounds import LARGEST_DIMS, LARGEST_HORIZON, LARGEST_IMAGE, check_size
from models.inputs.bpe import ByteBpe
from models.inputs.chat import Chat, eagle_turn
from models.inputs.embodiment import Embodiment
from models.inputs.fast import Fast
from models.inputs.packed_batch import Sample
from models.inputs.pictures import Resize, fit
from models.inputs.tokenizer import SentencePiece, Tokenizer

StateInput = Literal["text", "token", "suffix", "none"]
Writing = Literal["plain", "openpi", "lerobot"]
"""Text format of a model that writes its chunks, π0-FAST. "plain": the prompt cleaned as for π0.5.
"openpi": the prompt in lower case, with its line breaks. "lerobot": the prompt cleaned, with the
token that begins a text at its end."""

_STATE_BINS = np.linspace(-1, 1, 257)[:-1]


@dataclass(frozen=True)
class Processor:
    """Everything between a dataset's or robot's units and the model's.

    Text is read with `bpe` (see `ByteBpe`) or `sentencepiece` (a SentencePiece model file, base64)
    if there is one, else with the word list; prompts of more than `text_limit` tokens are refused.
    With `chat`, the text is the turn of a chat, with pictures among its words. A state as text
    spells the robot's dims, or all of the model's if `spells_padding` (LeRobot's π0.5 before
    0.5.0). `resize`: how pictures are fitted to `image_size`, see `models.inputs.pictures`.
    `cleans`: underscores and line breaks of a prompt become spaces (all but LeRobot's π0).

    With `fast`, samples also carry their action chunk as tokens. FAST's token i has the id
    `fast_top` − i, so its tokens take the rare words at the vocabulary's end. In PaliGemma's
    vocabulary, the last 128 words are special, and openpi's `fast_top` is 257152 − 1 − 128. If the
    model `writes` its chunks (π0-FAST), the prompt ends after the state, and words stand around a
    chunk's tokens. With `subtask_limit`, a policy predicts what to do next, in up to that many
    tokens, before it acts. `blackens`: an absent camera is seen as a black picture.

    Raises:
      ValueError: a size is out of bounds, there are no embodiments, two share a name, one has more
        dims than the model, or FAST's token ids overlap those of the words.
    """

    image_size: int
    state_dim: int
    action_dim: int
    horizon: int
    state_input: StateInput
    words: tuple[str, ...]
    embodiments: tuple[Embodiment, ...]
    sentencepiece: str = ""
    text_limit: int = 200
    spells_padding: bool = False
    resize: Resize = "antialiased"
    cleans: bool = True
    fast: Fast | None = None
    fast_top: int = 0
    bpe: str = ""
    chat: Chat = ""
    subtask_limit: int = 0
    writes: Writing | None = None
    blackens: bool = False

    def __post_init__(self) -> None:
        check_size("image_size", self.image_size, LARGEST_IMAGE)
        check_size("state_dim", self.state_dim, LARGEST_DIMS)
        check_size("action_dim", self.action_dim, LARGEST_DIMS)
        check_size("horizon", self.horizon, LARGEST_HORIZON)
        check_size("text_limit", self.text_limit)
        check_size("subtask_limit", self.subtask_limit, least=0)
        if self.chat and (self.sentencepiece or self.words):
            raise ValueError(
                f"The chat '{self.chat}' needs a BPE tokenizer, not SentencePiece or words; give "
                "the model's own tokenizer, its folder or its tokenizer.json."
            )
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
        if self.fast is not None and self.words and not self.sentencepiece:
            lowest, words = self.fast_top - self.fast.size + 1, self.tokenizer.size
            if lowest < words:
                raise ValueError(
                    f"{self.fast.size} FAST tokens, counted down from id {self.fast_top}, end at "
                    f"id {lowest}, but ids below {words} are text; raise the vocabulary or use "
                    "fewer words."
                )

    @cached_property
    def tokenizer(self) -> Tokenizer | SentencePiece | ByteBpe:
        """The tokenizer that reads prompts.

        Raises:
          ValueError: the policy came without a tokenizer.
        """
        if self.bpe:
            return ByteBpe(self.bpe)
        if self.sentencepiece:
            return SentencePiece(self.sentencepiece)
        if self.chat:
            raise ValueError(
                "This policy came without a tokenizer, so it cannot read a prompt as text: give "
                "the folder of its vocab.json and merges.txt, or its tokenizer.json, as tokenizer."
            )
        if not self.words:
            raise ValueError(
                "This policy came without a tokenizer, so it cannot read a prompt as text: give "
                "load_policy(tokenizer='…/paligemma_tokenizer.model'), or 'tokenized_prompt'."
            )
        return Tokenizer(self.words)

    def tokens(
        self, prompt: str, state: Float[np.ndarray, " s"], pictures: int = 0
    ) -> Int[np.ndarray, " t"]:
        """Token ids of a prompt, with the normalised state spelt as text if the model reads it so.

        Args:
          pictures: how many pictures a chat has among its words.

        Raises:
          ValueError: there are more than `text_limit`.
        """
        return self.text(prompt, state, pictures)[0]

    def text(
        self, prompt: str, state: Float[np.ndarray, " s"], pictures: int
    ) -> tuple[Int[np.ndarray, " t"], tuple[int, ...]]:
        """`tokens`, and how many of them come before each picture; () if pictures come first."""
        if self.chat:
            if not isinstance(self.tokenizer, ByteBpe):
                raise ValueError(f"The chat '{self.chat}' needs a BPE tokenizer.")
            ids, at = eagle_turn(self.tokenizer, prompt, pictures)
            return self._checked(ids, prompt), at
        return self._words(prompt, state), ()

    @property
    def template(self) -> tuple[str, ...]:
        """Texts that are tokenised one after another, with {prompt} and, if the model reads the
        state as text, {state} in them. Only the first keeps the token that begins a text. A chat
        has its own template."""
        if self.state_input != "text":
            return "{prompt}", "\n"
        spelt = "Task: {prompt}, State: {state};\n"
        return (spelt,) if self.writes else (f"{spelt}Action: ",)

    @property
    def closing(self) -> tuple[int, ...]:
        """Token ids after the last text of `template`."""
        return (self.tokenizer.begin,) if self.writes == "lerobot" else ()

    def _words(self, prompt: str, state: Float[np.ndarray, " s"]) -> Int[np.ndarray, " t"]:
        text = _clean(prompt) if self.cleans else prompt.removesuffix("\n")
        if self.writes == "openpi":
            text = prompt.lower().strip().replace("_", " ")
        bins = np.digitize(state, _STATE_BINS) - 1
        spelt = " ".join(map(str, bins.tolist()))
        texts = [piece.format(prompt=text, state=spelt) for piece in self.template]
        first, *rest = (self.tokenizer.encode(piece) for piece in texts)
        ends = np.asarray(self.closing, np.int32)
        return self._checked(np.concatenate([first, *(ids[1:] for ids in rest), ends]), prompt)

    def _checked(self, tokens: Int[np.ndarray, " t"], prompt: str) -> Int[np.ndarray, " t"]:
        if len(tokens) > self.text_limit:
            raise ValueError(
                f"The prompt ({prompt[:40]!r}) is {len(tokens)} tokens long, but the model reads "
                f"at most {self.text_limit}; shorten it."
            )
        return tokens

    def subtask_tokens(self, subtask: str) -> Int[np.ndarray, " t"]:
        """Token ids of a subtask for the language model to predict, from begin to end."""
        tokens = self.tokenizer.encode(_clean(subtask))
        return np.append(tokens, np.int32(self.tokenizer.end))

    def subtask_said(self, tokens: Int[np.ndarray, " t"]) -> Int[np.ndarray, " _t"]:
        """A predicted subtask from begin to end, in the form of `subtask_tokens`."""
        begin, end = self.tokenizer.begin, self.tokenizer.end
        return np.array([begin, *self._until_end(tokens), end], np.int32)

    def subtask_text(self, tokens: Int[np.ndarray, " t"]) -> str:
        """The text of predicted tokens, up to the end token."""
        return self.tokenizer.decode(self._until_end(tokens))

    def action_tokens(self, chunk: Float[np.ndarray, "h d"]) -> Int[np.ndarray, " t"]:
        """Token ids of a normalised chunk for the language model to predict, between two end
        tokens. If the model writes its chunks, they stand between "Action: " and "|", and the first
        token stands for the prompt's last.

        Raises:
          ValueError: there is no `fast`, or it cannot spell the chunk.
        """
        return self.framed(self.fast_top - self.action_tokenizer.encode(chunk))

    def framed(self, ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " t"]:
        """`action_tokens` of a chunk whose own tokens are `ids`."""
        end = self.tokenizer.end
        if self.writes:
            closing = self.tokenizer.encode("|")[1:]
            return np.array([self.tokenizer.begin, *self.opening, *ids, *closing, end], np.int32)
        return np.array([end, *ids, end], np.int32)

    def chunk_tokens(
        self, chunk: Float[np.ndarray, "h a"], mask: Bool[np.ndarray, "h a"], embodiment: int = 0
    ) -> Int[np.ndarray, " t"]:
        """`action_tokens` of a sample's chunk, extended as in `held_chunk`; empty without `fast`,
        or if no step counts."""
        if self.fast is None or not mask.any():
            return np.zeros(0, np.int32)
        return self.action_tokens(self.held_chunk(chunk, mask, embodiment))

    def held_chunk(
        self, chunk: Float[np.ndarray, "h a"], mask: Bool[np.ndarray, "h a"], embodiment: int = 0
    ) -> Float[np.ndarray, "h _d"]:
        """A sample's chunk in the robot's own dims, with its last step in the episode repeated
        after the episode's end; action tokens spell this chunk."""
        steps = np.where(mask[:, 0], np.arange(self.horizon), 0)
        dims = len(self.embodiments[embodiment].actions.offset)
        return chunk[np.maximum.accumulate(steps), :dims]

    def predicted_actions(
        self,
        tokens: Int[np.ndarray, " t"],
        embodiment: int = 0,
        state: Float[np.ndarray, " _s"] | None = None,
    ) -> Float[np.ndarray, "h d"]:
        """The chunk, in the robot's units, that predicted action tokens spell, up to the end token.

        Raises:
          ValueError: there is no `fast`, the tokens do not spell a chunk, or as `actions`.
        """
        dims = len(self.embodiments[embodiment].actions.offset)
        ids = self.fast_top - self._until_end(tokens)
        chunk = self.action_tokenizer.decode(ids, self.horizon, dims)
        return self.actions(chunk, embodiment, state)

    @property
    def opening(self) -> Int[np.ndarray, " t"]:
        """Token ids before a chunk that the model writes."""
        return self.tokenizer.encode("Action: ")[1:]

    @property
    def action_tokenizer(self) -> Fast:
        """The tokenizer that reads and writes chunks.

        Raises:
          ValueError: the policy came without a FAST tokenizer.
        """
        if self.fast is None:
            raise ValueError(
                "This policy came without a FAST tokenizer, so its chunks can be neither written "
                "nor read: give the folder of the tokenizer that it was trained with, "
                "load_policy(fast='FOLDER') (--fast FOLDER), or set the Processor's `fast`."
            )
        return self.fast

    def _until_end(self, tokens: Int[np.ndarray, " t"]) -> Int[np.ndarray, " _n"]:
        tokens = np.asarray(tokens)
        ends = np.flatnonzero(tokens == self.tokenizer.end)
        return tokens[: ends[0]] if len(ends) else tokens

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
        id: int = 0,
    ) -> Sample:
        """A sample in the model's units from one in the robot's.

        Args:
          images: one per camera of the embodiment, in its order; any size; None where absent.
          state: in the dataset's units, one number for each state dim of the embodiment.
          prompt: text, or the token ids of all of it.
          actions: the chunk that follows, `horizon` steps in the dataset's units; None when acting.
          valid: which of those steps lie within the episode; action tokens repeat the last of these
            instead of the others.
          subtask: what to do next, in words; in training the model learns to predict it, and in
            acting it carries it out.

        Raises:
          ValueError: the number of images, of state dims or of action dims is not the embodiment's,
            the prompt is longer than `text_limit`, or FAST cannot spell the actions.
        """
        robot = self.embodiments[embodiment]
        if len(images) != len(robot.cameras):
            raise ValueError(
                f"Embodiment '{robot.name}' has cameras {list(robot.cameras)}, "
                f"got {len(images)} images."
            )
        (padded,), (chunk,), (mask,) = self.numbers(
            np.asarray(state)[None],
            None if actions is None else actions[None],
            None if valid is None else valid[None],
            embodiment=embodiment,
        )
        normal = padded[: len(robot.state.offset)]
        spelt = padded if self.spells_padding else normal
        at: tuple[int, ...] = ()
        if isinstance(prompt, str):
            text, at = self.text(prompt, spelt, sum(x is not None for x in images))
        else:
            text = self._checked(prompt, "given as tokens")
        if self.blackens:
            black = np.zeros((self.image_size, self.image_size, 3), np.uint8)
            images = [black if x is None else x for x in images]
        return Sample(
            images=tuple(fit(x, self.image_size, self.resize) for x in images if x is not None),
            text=text,
            state=padded,
            actions=chunk,
            action_mask=mask,
            embodiment=embodiment,
            id=id,
            image_at=at,
            subtask=np.zeros(0, np.int32) if subtask is None else self.subtask_tokens(subtask),
            action_tokens=self.chunk_tokens(chunk, mask, embodiment),
            cameras=tuple(i for i, x in enumerate(images) if x is not None),
        )

    def numbers(
        self,
        state: Float[np.ndarray, "n _s"],
        actions: Float[np.ndarray, "n _h _a"] | None = None,
        valid: Bool[np.ndarray, "n _h"] | None = None,
        *,
        embodiment: int = 0,
    ) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n h a"], Bool[np.ndarray, "n h a"]]:
        """States, chunks and masks of n samples in the model's units and dims, as in `sample`.

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
        converted = robot.converted(np.asarray(state, np.float32))
        padded[:, : state.shape[1]] = robot.state(converted)
        chunk = np.zeros((n, self.horizon, self.action_dim), np.float32)
        mask = np.zeros(chunk.shape, bool)
        if actions is not None:
            dims = len(robot.actions.offset)
            if actions.shape[1:] != (self.horizon, dims):
                raise ValueError(
                    f"Embodiment '{robot.name}' has action chunks of shape {(self.horizon, dims)}, "
                    f"got {actions.shape[1:]}."
                )
            if robot.units is not None:
                actions = robot.units.learned(actions)
            if robot.relative:
                actions = actions - robot.origin(state)
            chunk[:, :, :dims] = robot.actions(actions)
            mask[:, :, :dims] = True if valid is None else valid[:, :, None]
            chunk[~mask] = 0
        return padded, chunk, mask

    def actions(
        self,
        chunk: Float[np.ndarray, "*b h _a"],
        embodiment: int = 0,
        state: Float[np.ndarray, "*b _s"] | None = None,
    ) -> Float[np.ndarray, "*b h _d"]:
        """A model's chunk in the robot's units and dims.

        Args:
          state: the robot's state at the observation, in its units; for relative actions.

        Raises:
          ValueError: the embodiment's actions are relative to the state, and none is given.
        """
        robot = self.embodiments[embodiment]
        chunk = robot.actions.inverse(np.asarray(chunk)[..., : len(robot.actions.offset)])
        if robot.relative:
            if state is None:
                raise ValueError(
                    f"Embodiment '{robot.name}' has actions relative to the robot's state; give "
                    "the state of the observation too."
                )
            chunk = chunk + robot.origin(state)
        return (chunk if robot.units is None else robot.units.acted(chunk)).astype(np.float32)


def _clean(text: str) -> str:
    return text.strip().replace("_", " ").replace("\n", " ")
