"""Pieces of pages for the Hugging Face hub. Their text may come from anyone."""

import json
from collections.abc import Mapping
from typing import Any


def front_matter(values: Mapping[str, Any]) -> str:
    """YAML between dashes; strings and lists are written as in JSON, which is valid YAML."""
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---", ""])


def cell(value: object) -> str:
    """A value for a table, list or heading, in which nothing is markup."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")[:200]
