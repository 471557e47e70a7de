"""Byte-level BPE, the tokenizer of Qwen's language models, from files in Hugging Face's formats.

`tokenizer.json` is read as is; otherwise it is made from `vocab.json` and `merges.txt`, with the
added tokens beside them. It is stored in the checkpoint, compressed.
"""

import base64
import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from models.files.foreign_json import read_json, section
from models.files.lfs import refuse_pointer
from models.inputs.tokenizer import TextTokenizer

_LARGEST = 64 * 2**20
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pieces of text, which no merge crosses."""
_FILES = ("tokenizer.json", "vocab.json")
_SPECIAL = re.compile(r"<.*>|\[.*\]")
"""Tokens that no merge makes, such as <|endoftext|>, which some vocabularies list."""


@dataclass(frozen=True)
class ByteBpe(TextTokenizer, kind="byte_bpe"):
    """`packed` is the text of a Hugging Face tokenizer.json, deflated, in base64."""

    packed: str

    @classmethod
    def read(cls, path: Path) -> "ByteBpe":
        """The tokenizer in a tokenizer.json, or in a folder with one, or with vocab.json and
        merges.txt.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: the files hold no tokenizer of this kind.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such tokenizer file or folder.")
        file = path / _FILES[0] if path.is_dir() else path
        for each in (path / name for name in (*_FILES, "merges.txt")) if path.is_dir() else (path,):
            if each.is_file():
                refuse_pointer(each)
        try:
            core = _whole(file) if file.is_file() else _from_vocabulary(path)
            text = core.to_str().encode()
            found = cls(base64.b64encode(zlib.compress(text, 9)).decode())
            _ = found.size
        except FileNotFoundError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(
                f"{path} holds no byte-level BPE tokenizer such as Qwen's ({str(error)[:200]})."
            ) from error
        return found

    @property
    def json(self) -> str:
        """The text of its tokenizer.json.

        Raises:
          ValueError: it is damaged.
        """
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(self.packed, validate=True), _LARGEST)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"it is cut off, or has more than {_LARGEST} bytes")
        return text.decode()

    @cached_property
    def _core(self) -> Core:
        try:
            return Core.from_str(self.json)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"This is not a BPE tokenizer ({str(error)[:200]}).") from error

    def encode(self, text: str) -> Int[np.ndarray, " t"]:
        """Token ids of `text`, int32; names of special tokens in it become those tokens."""
        return np.asarray(self._core.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Int[np.ndarray, " t"]) -> str:
        """The text of token ids; special tokens appear by their names."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=False)

    def id(self, name: str) -> int:
        """The id of a special token.

        Raises:
          ValueError: there is none of that name.
        """
        found = self._core.token_to_id(name)
        if found is None:
            raise ValueError(
                f"The tokenizer has no token '{name}'; give the model's own tokenizer."
            )
        return int(found)

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._core.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def begin(self) -> int:
        """The id that begins every turn of a chat."""
        return self.id("<|im_start|>")

    @property
    def end(self) -> int:
        """The id that ends a text that a model writes."""
        return self.id("<|im_end|>")


def has_tokenizer(folder: Path) -> bool:
    """True if the folder has files of a tokenizer that `ByteBpe.read` reads."""
    return any((folder / name).is_file() for name in _FILES)


def _whole(file: Path) -> Core:
    if file.stat().st_size > _LARGEST:
        raise ValueError(f"{file} has more than {_LARGEST} bytes")
    core = Core.from_str(file.read_text(encoding="utf-8"))
    if not isinstance(core.model, models.BPE):
        raise ValueError(f"its model is {type(core.model).__name__}, not BPE")
    return core


def _from_vocabulary(folder: Path) -> Core:
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    for file in (vocabulary, merges):
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: no such file; a tokenizer's folder has tokenizer.json, or vocab.json "
                f"and merges.txt."
            )
        if file.stat().st_size > _LARGEST:
            raise ValueError(f"{file} has more than {_LARGEST} bytes")
    lines = merges.read_text(encoding="utf-8").split("\n")
    rules = [x.partition(" ") for x in lines if x and not x.startswith("#version")]
    pairs = [(first, second) for first, _, second in rules]
    tokens, added = read_json(vocabulary), _added(folder)
    known = {first + second for first, second in pairs} | {x.content for x in added.values()}
    lost = [x for x in tokens if len(x) > 1 and x not in known and not _SPECIAL.fullmatch(x)]
    if lost:
        raise ValueError(
            f"{merges} has no rule for {len(lost)} of the tokens of {vocabulary.name}, such as "
            f"{lost[0]!r}: it was cut off"
        )
    core = Core(models.BPE(tokens, pairs))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    for id, token in sorted(added.items()):
        core.add_tokens([token])
        if core.token_to_id(token.content) != id:
            raise ValueError(
                f"its token '{token.content}' should have the id {id}, but would get "
                f"{core.token_to_id(token.content)}"
            )
    return core


def _added(folder: Path) -> dict[int, AddedToken]:
    """Tokens beyond the vocabulary by id, from tokenizer_config.json, else added_tokens.json."""
    config, names = folder / "tokenizer_config.json", folder / "added_tokens.json"
    told = read_json(config) if config.is_file() else {}
    listed = section(told, "added_tokens_decoder", str(config))
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    if listed:
        return {
            int(id): AddedToken(
                str(token["content"]), **{x: bool(token[x]) for x in flags if x in token}
            )
            for id, token in listed.items()
        }
    plain = read_json(names) if names.is_file() else {}
    return {int(id): AddedToken(name, special=True, normalized=False) for name, id in plain.items()}
