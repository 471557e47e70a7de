"""Links of our pages, told from what only looks like one in their code."""

import re

_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def local_links(text: str) -> list[tuple[str, str]]:
    """Targets within the repository, as the page writes them (empty: the page itself), each with
    its anchor."""
    found = _LINK.findall(_CODE.sub("", text))
    return [(to, anchor) for to, anchor in found if "://" not in to]
