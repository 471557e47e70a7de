"""Pieces of pages for the Hugging Face hub, whose text may be anybody's."""

import json
from collections.abc import Mapping
from typing import Any


def front_matter(values: Mapping[str, Any]) -> str:
    """YAML between dashes; JSON's notation of strings and lists is YAML's too."""
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---", ""])


def cell(value: object) -> str:
    """A value inside a table, list or heading, where nothing in it is markup."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")[:200]
