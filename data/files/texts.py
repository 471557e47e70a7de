"""Numbered texts in a journal: each entry lists the texts that are new with it."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any


def numbered_texts(entries: Iterable[Mapping[str, Any]], key: str) -> dict[str, int]:
    """The texts of all entries, numbered in order of appearance. An entry of an older journal may
    repeat earlier texts; only its new texts are added."""
    texts = dict.fromkeys(text for entry in entries for text in entry[key])
    return {text: number for number, text in enumerate(texts)}


def texts_from(texts: dict[str, int], first: int) -> list[str]:
    """The texts numbered from `first` on."""
    return list(islice(reversed(texts), len(texts) - first))[::-1]
