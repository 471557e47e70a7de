"""Preparation of the tokens that a policy learns to predict, from its data: the FAST tokenizer of
its action chunks, the words of its subtasks, and the places that a sample needs for both.

Every chunk is tokenized once before training begins, so that no chunk turns out too long, or
impossible to tokenize, in the middle of a run.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from data import Dataset, open_dataset
from data.dataset import subtasks_of
from data.files import cached
from data.files.folder import open_folder
from data.frames import Frames
from data.lerobot.dataset import LeRobotDataset
from data.mixture.blocks import read_blocks
from data.mixture.mixed import Mixed, mix
from data.mixture.mixture import DatasetConfig, read_mixture
from data.mixture.trust import Consent, remembered
from data.store.convert import DESCRIPTION
from data.store.numbers import open_numbers
from data.store.store import Store, open_store
from models import Processor, Scaling
from models.files.terminal import Console, Progress, say, track
from models.inputs.action_tokens import ActionTokens, last_free
from models.inputs.fast import Fast
from models.inputs.pictures import Antialiased
from models.inputs.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from tools.recipes.presets import RunConfig

VOCABULARY = 1024
"""Number of tokens that a FAST tokenizer is trained to have, if there is room."""

_Chunk = tuple[str, int, int, Float32[np.ndarray, "h d"]]
"""Dataset, episode and frame, and the chunk that begins there."""

_TRAINED_ON = 1 << 16


class SpellingFigures(NamedTuple):
    """Tokenization of chunks by a FAST tokenizer. `tokens`, `longest`: tokens of a chunk, on
    average and at most; `values`: numbers of a chunk; `error`: root mean squared difference between
    a chunk and what its tokens decode to, in normalised units."""

    chunks: int
    tokens: float
    longest: int
    values: int
    error: float

    @property
    def compression(self) -> float:
        """Numbers of a chunk per token."""
        return self.values / self.tokens


@dataclass(frozen=True)
class Spelling:
    """Chunks of the training and the held-out episodes of a mixture, to be tokenized."""

    mixed: Mixed
    processor: Processor

    def tracked(self, what: str, console: Console) -> Iterator[_Chunk]:
        """`chunks`, counted on the console."""
        return track(self.chunks(), what, console=console, total=self.total, transient=True)

    def chunks(self) -> Iterator[_Chunk]:
        """Every chunk, in the form that action tokens encode."""
        mixed = self.mixed
        for number, feed in enumerate(mixed.feeds):
            episodes = np.concatenate([mixed.training[number], mixed.held_out[number]])
            for block in read_blocks([feed], [episodes]):
                _, chunks, masks = self.processor.numbers(
                    block.state, block.chunk, block.valid, embodiment=feed.embodiment
                )
                places = zip(block.episode.tolist(), block.frame.tolist(), strict=True)
                for place, chunk, mask in zip(places, chunks, masks, strict=True):
                    held = self.processor.held_chunk(chunk, mask, feed.embodiment)
                    yield mixed.names[number], *place, held

    @property
    def total(self) -> int:
        """Number of chunks."""
        groups = (self.mixed.training, self.mixed.held_out)
        return sum(
            int(feed.frames.lengths[episodes].sum())
            for group in groups
            for feed, episodes in zip(self.mixed.feeds, group, strict=True)
        )


def prepared_targets(
    mixed: Mixed,
    processor: Processor,
    config: RunConfig,
    console: Console,
    cache: Path,
    fast: Path | None = None,
    begun: Processor | None = None,
) -> tuple[Processor, int]:
    """The processor with what the model's cross-entropies need, and the places that a sample has
    for targets.

    Args:
      cache: folder that keeps lengths, and a tokenizer that had to be trained.
      fast: folder of a FAST tokenizer; None: the one of `begun`, or else one trained on the
        training episodes.
      begun: processor of the policy to start from.

    Raises:
      ValueError: the data have no subtasks, a chunk cannot be tokenized, a sample needs more places
        than `model.targets`, or the vocabulary has no room.
      FileNotFoundError: `fast` is no FAST tokenizer.
    """
    weights = config.model.cross_entropies
    if fast is not None and "action_tokens" not in weights:
        raise ValueError(
            f"--fast is {fast}, but no action tokens are learnt; give --model.action-token-loss "
            "above 0, or leave --fast out."
        )
    if not weights:
        return processor, 0
    longest_words = 0
    if "text" in weights:
        longest_words = _longest_subtask(mixed, processor, weights["text"])
        processor = replace(processor, subtask_limit=longest_words)
    longest_chunk = 0
    if "action_tokens" in weights:
        processor, where, longest_chunk = _with_fast(
            mixed, processor, config, console, cache, fast, begun
        )
    needed, given = longest_words + longest_chunk, config.model.targets
    if given and needed > given:
        of_words = f"a subtask of up to {longest_words} tokens" if longest_words else ""
        of_chunk = f"the {longest_chunk} action tokens of {where}" if longest_chunk else ""
        raise ValueError(
            f"model.targets is {given}, but {' and '.join(filter(None, (of_words, of_chunk)))} "
            f"need {needed}; raise it, or set it to 0 to take what the data need."
        )
    return processor, given or needed


def words_left(config: RunConfig, fast: Fast | None) -> int:
    """Ids that a word list may use beside FAST's tokens; if the tokenizer is yet to be trained, as
    many as its smallest vocabulary leaves.

    Raises:
      ValueError: there is no room for the bytes of words.
    """
    vocabulary = config.model.vocabulary
    if "action_tokens" not in config.model.cross_entropies:
        return vocabulary
    size = fast.size if fast is not None else Fast.smallest(config.model.horizon)
    if vocabulary - size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"model.vocabulary is {vocabulary}, but {size} FAST tokens and {SMALLEST_VOCABULARY} "
            "ids of bytes and special tokens need more; raise it, or give a smaller --fast."
        )
    return vocabulary - size


def subtask_texts(mixed: Mixed) -> list[str]:
    """Subtasks of all datasets, each once."""
    found = (subtasks_of(feed.frames) for feed in mixed.feeds)
    return list(dict.fromkeys(text for told in found if told is not None for text in told.texts))


def short_digest(told: object) -> str:
    """16 digits of a digest of what is printed of an object."""
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _longest_subtask(mixed: Mixed, processor: Processor, weight: float) -> int:
    """Tokens of the longest subtask that any dataset has."""
    if not (texts := subtask_texts(mixed)):
        raise ValueError(
            f"model.text_loss is {weight}, but {', '.join(mixed.names)} has no subtasks to "
            "learn; give data with subtask_index and meta/subtasks.parquet "
            "(docs/insulation.md), name their column as 'subtasks' in a mixture, or set the "
            "loss to 0."
        )
    return max(len(processor.subtask_tokens(text)) for text in texts)


def _with_fast(
    mixed: Mixed,
    processor: Processor,
    config: RunConfig,
    console: Console,
    cache: Path,
    folder: Path | None,
    begun: Processor | None,
) -> tuple[Processor, str, int]:
    """The processor with its FAST tokenizer, and the sample with most action tokens."""
    spelling = Spelling(mixed, processor)
    given = None if folder is None else Fast.load(folder)
    before = None if begun is None or begun.targets is None else begun.targets.fast
    if before is not None and given is not None and before != given:
        raise ValueError(
            f"{folder} is not the FAST tokenizer that the policy of --init was trained with; "
            "leave --fast out to use that one."
        )
    fast = before or given
    key = short_digest((mixed.digest, mixed.embodiments, config.model.horizon))
    if fast is None:
        vocabulary = config.model.vocabulary
        text = processor.tokenizer
        room = last_free(vocabulary, text) + 1
        if isinstance(text, Tokenizer):
            room -= text.size
        kept = cache / f"fast-{key}-{min(VOCABULARY, room)}"
        if not kept.is_dir():
            _train_into(kept, spelling, min(VOCABULARY, room), console)
        fast = Fast.load(kept)
        say(
            console,
            f"FAST tokenizer of {fast.size} tokens trained on the training episodes' chunks: "
            f"{kept}",
        )
    top = last_free(config.model.vocabulary, processor.tokenizer)
    if before is not None and begun is not None and begun.targets is not None:
        top = begun.targets.top
    tokens = replace(processor.targets or ActionTokens(None, 0), fast=fast, top=top)
    counted = cache / f"action-tokens-{short_digest((key, fast))}.json"
    if not counted.is_file():
        cached.write_json(counted, _longest_chunk(spelling, fast, console))
    where, count = cached.read_json(counted)
    framed = tokens.framed(np.zeros(count, np.int32), processor.tokenizer)
    return replace(processor, targets=tokens), where, len(framed)


def _train_into(folder: Path, spelling: Spelling, vocabulary: int, console: Console) -> None:
    """Trains a tokenizer; the folder appears when it is complete."""
    try:
        fast = trained(spelling, vocabulary, console)
    except ValueError as error:
        raise ValueError(
            f"model.vocabulary leaves {vocabulary} ids for a FAST tokenizer, which is too few "
            f"({error}); raise model.vocabulary, or give --fast a coarser one (tools.data fast)."
        ) from None
    robots = spelling.processor.embodiments
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        dims = len(robots[0].actions.offset)
        fast.save(scratch / "fast", spelling.processor.horizon, dims)
        (scratch / "fast").rename(folder)
    finally:
        shutil.rmtree(scratch)


def trained(spelling: Spelling, vocabulary: int, console: Console, scale: float = 10.0) -> Fast:
    """A FAST tokenizer for these chunks. It is trained on up to 65,536 chunks of the training
    episodes, chosen evenly, and on those of all chunks that reach furthest, so that every chunk can
    be tokenized.

    Raises:
      ValueError: `vocabulary` has no room for the coefficients alone.
    """
    every = -(-spelling.total // _TRAINED_ON)
    chosen, furthest, reach = [], [], 0
    training = {
        name: set(episodes.tolist())
        for name, episodes in zip(spelling.mixed.names, spelling.mixed.training, strict=True)
    }
    for i, (name, episode, _, chunk) in enumerate(spelling.tracked("Reading chunks", console)):
        if (own := Fast.reach(chunk, scale)) > reach:
            reach = own
            furthest.append(chunk)
        if i % every == 0 and episode in training[name]:
            chosen.append(chunk)
    return Fast.train([*chosen, *furthest], vocabulary, scale)


def measured(spelling: Spelling, fast: Fast, console: Console) -> SpellingFigures:
    """Tokenizes every chunk and decodes it again.

    Raises:
      ValueError: a chunk cannot be tokenized; the message names it.
    """
    chunks = values = tokens = longest = 0
    squares = 0.0
    for name, episode, frame, chunk in spelling.tracked("Spelling chunks", console):
        ids = _spelt(fast, chunk, name, episode, frame)
        squares += float(((fast.decode(ids, *chunk.shape) - chunk) ** 2).sum())
        chunks, values, tokens = chunks + 1, values + chunk.size, tokens + len(ids)
        longest = max(longest, len(ids))
    error = float(np.sqrt(squares / values))
    return SpellingFigures(chunks, tokens / chunks, longest, values // chunks, error)


@contextmanager
def opened(
    data: str,
    *,
    horizon: int,
    action_scaling: Scaling,
    holdout: float,
    seed: int,
    console: Console,
    consent: Consent = remembered,
) -> Iterator[Spelling]:
    """The chunks of a dataset, frame store or mixture as training with these settings sees them,
    without the pictures.

    Raises:
      ValueError, FileNotFoundError: as `data.mixture.mixed.mix`.
    """
    mixture = read_mixture(data, consent)
    with tempfile.TemporaryDirectory(prefix="chiliad-") as scratch:
        with Progress(console=console, transient=True) as progress:
            progress.add_task("Reading numbers", total=None)
            frames = [
                _numbers(open_own(config, console), Path(scratch) / str(number))
                for number, config in enumerate(mixture.datasets)
            ]
            mixed = mix(
                mixture,
                frames,
                horizon,
                holdout=holdout,
                seed=seed,
                cache=Path(scratch) / "statistics",
                action_scaling=action_scaling,
            )
        robots = mixed.embodiments
        processor = Processor(
            state_dim=max(1, *(len(robot.state.offset) for robot in robots)),
            action_dim=max(1, *(len(robot.actions.offset) for robot in robots)),
            horizon=horizon,
            state_input="none",
            embodiments=robots,
            prompts=None,
            pictures=Antialiased(1),
        )
        yield Spelling(mixed, processor)


def open_own(config: DatasetConfig, console: Console) -> Dataset | Store:
    """A dataset of a mixture, with the column that holds its subtasks, or a frame store.

    Raises:
      ValueError, FileNotFoundError: there is none, or it has no such column.
    """
    if open_folder(config.path).exists(DESCRIPTION):
        if config.subtasks:
            raise ValueError(
                f"{config.path}: is a frame store, whose subtasks were stored when it was made, "
                f"but 'subtasks' names the column '{config.subtasks}'; give the dataset itself."
            )
        with Progress(console=console, transient=True) as progress:
            store = open_store(config.path, progress.bar("Comparing columns"))
        if config.every % store.every:
            raise ValueError(
                f"{config.path}: has images of one frame in {store.every}, but 'every' asks for "
                f"one sample in {config.every}; set 'every' to a multiple, or give the dataset "
                "itself."
            )
        return store
    dataset = open_dataset(config.path)
    if not config.subtasks:
        return dataset
    if not isinstance(dataset, LeRobotDataset):
        raise ValueError(
            f"{config.path}: 'subtasks' names the column '{config.subtasks}', but only a "
            "LeRobot dataset can have its subtasks in a column; leave it out."
        )
    return dataset.with_subtask_column(config.subtasks)


def _numbers(dataset: Dataset | Store, scratch: Path) -> Frames:
    return dataset if isinstance(dataset, Store) else open_numbers(dataset, scratch)


def _longest_chunk(spelling: Spelling, fast: Fast, console: Console) -> list[Any]:
    """The sample whose chunk takes most tokens, and their number."""
    found: list[Any] = ["", 0]
    for name, episode, frame, chunk in spelling.tracked("Spelling chunks", console):
        tokens = len(_spelt(fast, chunk, name, episode, frame))
        if tokens > found[1]:
            found = [f"{name}, episode {episode}, frame {frame}", tokens]
    return found


def _spelt(
    fast: Fast, chunk: Float[np.ndarray, "h d"], name: str, episode: int, frame: int
) -> Int[np.ndarray, " t"]:
    try:
        return fast.encode(chunk)
    except ValueError as error:
        raise ValueError(f"{name}, episode {episode}, frame {frame}: {error}") from None
