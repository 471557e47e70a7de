"""FAST (arXiv 2501.09747): an action chunk as a few tokens that a language model can predict.

The chunk's discrete cosine transform is rounded and read from low frequencies to high. The integers
are written as characters and compressed by byte-pair encoding. The user chooses the vocabulary: the
released tokenizer's files load as is, or a small one is trained on a dataset's own chunks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, trainers

from models.files.foreign_json import read_json

SPECIAL_WORDS = 128
"""Words at the end of PaliGemma's vocabulary; FAST's tokens come before them."""

_LAST_CHARACTER = 0xD7FF
_LARGEST_SCALE = 1e6
_BROKEN = "\ufffd"
_PROCESSOR = "UniversalActionProcessor"
_AUTO_MAP = {
    "AutoProcessor": f"physical-intelligence/fast--processing_action_tokenizer.{_PROCESSOR}"
}
_HEADROOM = 2.0


@dataclass(frozen=True)
class Fast:
    """`bpe`: text of a Hugging Face tokenizer.json. `scale`: steps per unit of a coefficient.
    `lowest`: the coefficient that character 0 stands for."""

    bpe: str
    scale: float = 10.0
    lowest: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.scale <= _LARGEST_SCALE or abs(self.lowest) > _LAST_CHARACTER:
            raise ValueError(
                f"FAST has scale {self.scale} and lowest coefficient {self.lowest}; expected a "
                f"scale above 0 and up to {_LARGEST_SCALE:g}, and a lowest coefficient within "
                f"±{_LAST_CHARACTER}."
            )

    @classmethod
    def load(cls, folder: str | Path) -> "Fast":
        """Reads `tokenizer.json` and `processor_config.json`, as the released tokenizer has them.

        Raises:
          FileNotFoundError: one of the two files is missing.
          ValueError: one of them is not what its name says.
        """
        contents = {}
        for name, field in (("tokenizer.json", "model"), ("processor_config.json", "min_token")):
            path = Path(folder) / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: no such file; a FAST tokenizer is a folder with tokenizer.json and "
                    f"processor_config.json."
                )
            contents[name] = read_json(path)
            if field not in contents[name]:
                raise ValueError(
                    f"{path}: has no field '{field}', so it is not a FAST tokenizer's."
                )
        bpe, config = contents["tokenizer.json"], contents["processor_config.json"]
        scale, lowest = config.get("scale"), config["min_token"]
        if not isinstance(scale, int | float) or type(lowest) is not int:
            raise ValueError(
                f"{path}: scale is {str(scale)[:80]!r} and min_token {str(lowest)[:80]!r}; "
                f"expected a number and a whole number."
            )
        try:
            found = cls(json.dumps(bpe), float(scale), lowest)
            _ = found.size
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{folder}: {error}") from error
        return found

    @classmethod
    def train(
        cls,
        chunks: Float[np.ndarray, "n h a"] | Sequence[Float[np.ndarray, "h _a"]],
        vocabulary: int,
        scale: float = 10.0,
    ) -> "Fast":
        """A vocabulary of at most `vocabulary` tokens for normalised chunks like these.

        Every chunk whose actions lie within ±2, and every one of `chunks`, can be encoded.

        Raises:
          ValueError: `vocabulary` has no room for the coefficients alone.
        """
        coefficients = [_rounded(chunk, scale) for chunk in chunks]
        bound = cls.smallest(len(coefficients[0]), scale) // 2
        bound = max(bound, *(int(np.abs(values).max()) for values in coefficients))
        if vocabulary < 2 * bound + 1:
            raise ValueError(
                f"A FAST vocabulary of {vocabulary} has no room for the {2 * bound + 1} values "
                f"that a coefficient can have; raise it or lower scale ({scale})."
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            show_progress=False,
            special_tokens=[],
            initial_alphabet=[chr(i) for i in range(2 * bound + 1)],
        )
        tokenizer.train_from_iterator((_spelt(chunk + bound) for chunk in coefficients), trainer)
        return cls(tokenizer.to_str(), scale, -bound)

    def save(self, folder: str | Path, horizon: int, dims: int) -> None:
        """Writes the files that `load` reads, and those by which transformers' AutoProcessor (and
        so openpi and LeRobot) opens the folder; it takes the released tokenizer's code from the
        hub. Unless told otherwise, it decodes to chunks of `horizon` and `dims`."""
        files: dict[str, Any] = {
            "tokenizer.json": json.loads(self.bpe),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "added_tokens_decoder": {},
                "model_max_length": 1 << 20,
                "processor_class": _PROCESSOR,
                "auto_map": _AUTO_MAP,
            },
            "special_tokens_map.json": {},
            "processor_config.json": {
                "action_dim": dims,
                "time_horizon": horizon,
                "min_token": self.lowest,
                "scale": self.scale,
                "vocab_size": self.size,
                "processor_class": _PROCESSOR,
                "auto_map": _AUTO_MAP,
            },
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))

    @staticmethod
    def smallest(horizon: int, scale: float = 10.0) -> int:
        """Number of tokens of a vocabulary with the values of a coefficient only, for chunks of
        `horizon` steps within ±2."""
        return 2 * int(np.ceil(_HEADROOM * scale * np.sqrt(horizon))) + 1

    @staticmethod
    def reach(chunk: Float[np.ndarray, "h a"], scale: float = 10.0) -> int:
        """The largest magnitude of a chunk's coefficients, in steps."""
        return int(np.abs(_rounded(chunk, scale)).max())

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._tokenizer.get_vocab_size()

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Each token as the vocabulary writes it; None for ids without one."""
        return tuple(self._tokenizer.id_to_token(i) for i in range(self.size))

    def encode(self, chunk: Float[np.ndarray, "h a"]) -> Int[np.ndarray, " t"]:
        """Token ids in [0, size) of a normalised chunk, int32.

        `decode` returns the chunk with coefficients rounded to 1/scale: an error of at most √(h·a)
        / (2·scale) in Euclidean norm.

        Raises:
          ValueError: a value is not finite, or a coefficient has no character in the vocabulary.
        """
        if not np.isfinite(chunk).all():
            raise ValueError("An action chunk for FAST has values that are not finite.")
        coefficients = _rounded(chunk, self.scale) - self.lowest
        low, high = int(coefficients.min()), int(coefficients.max())
        if low >= 0 and high <= _LAST_CHARACTER:
            text = _spelt(coefficients)
            ids = self._tokenizer.encode(text).ids
            if self._tokenizer.decode(ids) == text:
                return np.asarray(ids, np.int32)
        raise ValueError(
            f"FAST coefficients from {low + self.lowest} to {high + self.lowest} (actions up to "
            f"±{np.abs(chunk).max():.3g}) are not all in the vocabulary, which begins at "
            f"{self.lowest}; check the actions' normalisation, or train a vocabulary on them."
        )

    def decode(
        self, ids: Sequence[int] | Int[np.ndarray, " t"], horizon: int, dims: int
    ) -> Float[np.ndarray, "h a"]:
        """The normalised chunk, f32, that these tokens spell.

        Raises:
          ValueError: an id is not of this vocabulary, or they do not spell horizon·dims values.
        """
        ids = [int(i) for i in ids]
        size = self.size
        unknown = [i for i in ids if not 0 <= i < size]
        if unknown:
            raise ValueError(f"FAST ids {unknown[:5]} lie outside the vocabulary of {size} tokens.")
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if _BROKEN in text or len(text) != horizon * dims:
            broken = ", some of them invalid characters" if _BROKEN in text else ""
            raise ValueError(
                f"{len(ids)} FAST tokens spell {len(text)} coefficients{broken}; a chunk of "
                f"{horizon} steps of {dims} dims has {horizon * dims}."
            )
        values = np.array([ord(c) for c in text], np.float64) + self.lowest
        return (dct_matrix(horizon).T @ (values.reshape(horizon, dims) / self.scale)).astype(
            np.float32
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            return Tokenizer.from_str(self.bpe)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"This is not a FAST tokenizer ({str(error)[:200]}).") from error


def dct_matrix(length: int) -> Float[np.ndarray, "k t"]:
    """The orthonormal DCT-II; its transpose is its inverse."""
    k, t = np.ogrid[:length, :length]
    matrix = np.sqrt(2 / length) * np.cos(np.pi * k * (2 * t + 1) / (2 * length))
    matrix[0] /= np.sqrt(2)
    return matrix


def _rounded(chunks: Float[np.ndarray, "*b h a"], scale: float) -> Int[np.ndarray, "*b h a"]:
    return np.rint(scale * (dct_matrix(chunks.shape[-2]) @ chunks)).astype(np.int64)


def _spelt(values: Int[np.ndarray, "h a"]) -> str:
    """Character n for value n: all dims of the lowest frequency first."""
    return "".join(map(chr, values.ravel()))
