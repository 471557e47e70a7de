"""The guides can be found: one index lists each of them, and links lead somewhere."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.markdown import local_links

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def links(page: Path) -> list[tuple[Path, str]]:
    """Files, and anchors in them, that a page links to in this repository."""
    local = local_links(page.read_text())
    return [((page.parent / to).resolve() if to else page, anchor) for to, anchor in local]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_index_lists_every_guide_once():
    guides = {page for page in DOCS.glob("*.md") if page.name != "README.md"}
    listed = Counter(to for to, _ in links(DOCS / "README.md") if to.parent == DOCS and to.suffix)
    assert listed == dict.fromkeys(guides, 1)


def test_the_front_page_links_to_the_index():
    assert (DOCS / "README.md", "") in links(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for to, anchor in links(page):
        assert to.exists(), f"{page} links to {to}, which does not exist."
        if anchor:
            assert anchor in anchors(to), f"{page} links to #{anchor}, which {to} does not have."


def test_nothing_says_to_install_a_package_that_is_not_published():
    packages = ("models", "data", "parallel", "sim", "rl", "tools")
    sources = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    saying = [file for file in [*PAGES, *sources] if "chiliad[" in file.read_text()]
    assert not saying
