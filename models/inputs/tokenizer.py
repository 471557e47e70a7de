"""Tokenizers: a word list made from the dataset's own prompts, with bytes for the rest, or the
SentencePiece model of a pretrained language model.

Nothing is downloaded, no text is refused and no two words share an id; a word that the list lacks
is encoded as bytes. Either tokenizer is stored in the checkpoint, so a policy reads prompts as in
its training.
"""

import base64
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Int
from sentencepiece import SentencePieceProcessor

from models.files.lfs import refuse_pointer
from models.inputs.parts import InputPart

PAD, BOS = 0, 1
_FIRST_BYTE = 2
_FIRST_WORD = _FIRST_BYTE + 256
SMALLEST_VOCABULARY = _FIRST_WORD
_LARGEST_MODEL = 64 * 2**20
_PIECES = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class TextTokenizer(InputPart):
    """Text to token ids and back: a dataclass made as `class Mine(TextTokenizer, kind="mine")`.

    `begins`: how many ids `encode` puts before those of the text.
    """

    begins: ClassVar[int] = 0

    @abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """Token ids of a whole text, int32."""

    @abstractmethod
    def decode(self, ids: Int[np.ndarray, " t"]) -> str:
        """The text of token ids."""

    def continued(self, text: str) -> Int[np.ndarray, " t"]:
        """Token ids of a text that follows another."""
        return self.encode(text)[self.begins :]

    @property
    @abstractmethod
    def size(self) -> int:
        """One more than the largest id.

        Raises:
          ValueError: the tokenizer is damaged.
        """

    @property
    @abstractmethod
    def begin(self) -> int:
        """The id that begins every text."""

    @property
    @abstractmethod
    def end(self) -> int:
        """The id that ends a text that a model writes."""


@dataclass(frozen=True)
class Tokenizer(TextTokenizer, kind="words"):
    """`words[i]` has id 258 + i; ids 2 to 257 are bytes; 1 begins every text and 0 is padding,
    which also ends a text that a model writes."""

    words: tuple[str, ...]

    begins = 1
    begin = BOS
    end = PAD

    @classmethod
    def build(cls, texts: Iterable[str], vocabulary: int) -> "Tokenizer":
        """The most frequent words of `texts`, as many as an embedding of `vocabulary` rows can
        hold."""
        counts = Counter(piece for text in texts for piece in _PIECES.findall(text))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(tuple(ordered[: vocabulary - _FIRST_WORD]))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: _FIRST_WORD + i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """Token ids of `text`, int32, beginning with BOS."""
        ids = [BOS]
        for piece in _PIECES.findall(text):
            known = self._ids.get(piece)
            ids += [known] if known is not None else [_FIRST_BYTE + b for b in piece.encode()]
        return np.asarray(ids, np.int32)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return _FIRST_WORD + len(self.words)

    def decode(self, ids: Int[np.ndarray, " t"]) -> str:
        """The text of token ids, with pieces joined by single spaces. Bytes in a run are one piece;
        bytes that are not UTF-8 show as �.

        Raises:
          ValueError: an id is neither a word's nor a byte's.
        """
        foreign = [int(i) for i in ids if not PAD <= i < self.size]
        if foreign:
            raise ValueError(f"Ids {foreign[:5]} are not text; text has ids below {self.size}.")
        pieces: list[str] = []
        for spelt, run in groupby(ids, lambda i: i < _FIRST_WORD):
            if spelt:
                letters = bytes(int(i) - _FIRST_BYTE for i in run if i >= _FIRST_BYTE)
                pieces.append(letters.decode(errors="replace"))
            else:
                pieces += [self.words[i - _FIRST_WORD] for i in run]
        return " ".join(piece for piece in pieces if piece)


@dataclass(frozen=True)
class SentencePiece(TextTokenizer, kind="sentencepiece"):
    """A SentencePiece model, such as PaliGemma's; `model` is its file in base64."""

    model: str

    begins = 1

    @classmethod
    def read(cls, path: Path) -> "SentencePiece":
        """The model in a file.

        Raises:
          FileNotFoundError: the file does not exist.
          ValueError: the file is not a SentencePiece model.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such tokenizer file.")
        refuse_pointer(Path(path))
        if (size := Path(path).stat().st_size) > _LARGEST_MODEL:
            raise ValueError(
                f"{path} has {size} bytes; a SentencePiece model has at most {_LARGEST_MODEL}."
            )
        found = cls(base64.b64encode(Path(path).read_bytes()).decode())
        try:
            _ = found.size
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return found

    @cached_property
    def _processor(self) -> SentencePieceProcessor:
        try:
            proto = base64.b64decode(self.model, validate=True)
            found = SentencePieceProcessor(model_proto=proto)
            size = found.vocab_size() if proto else 0
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"This is not a SentencePiece model ({str(error)[:200]}).") from error
        if not (0 <= found.bos_id() < size and 0 <= found.eos_id() < size):
            raise ValueError(
                "This SentencePiece model is empty or has no ids that begin and end a text."
            )
        return found

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """Token ids of `text`, int32, beginning with BOS."""
        return np.asarray(self._processor.encode(text, add_bos=True), np.int32)

    def decode(self, ids: Int[np.ndarray, " t"]) -> str:
        """The text of token ids."""
        return self._processor.decode([int(i) for i in ids])

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return self._processor.vocab_size()

    @property
    def begin(self) -> int:
        """The id that begins every text."""
        return self._processor.bos_id()

    @property
    def end(self) -> int:
        """The id that ends a text that a model writes."""
        return self._processor.eos_id()
