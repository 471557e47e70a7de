"""Texts by their numbers, of which each entry of a journal tells those that are new with it."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any


def numbered_texts(entries: Iterable[Mapping[str, Any]], key: str) -> dict[str, int]:
    """The texts of all entries, numbered as they were met; an entry that repeats earlier ones, as
    journals did before they grew with new texts alone, adds what it has besides."""
    texts = dict.fromkeys(text for entry in entries for text in entry[key])
    return {text: number for number, text in enumerate(texts)}


def texts_from(texts: dict[str, int], first: int) -> list[str]:
    """The texts numbered from `first` on."""
    return list(islice(reversed(texts), len(texts) - first))[::-1]
