"""README, guides and results as a site with a reference: a hook of mkdocs, called by `make docs`.
Sections are those of docs/README.md. A folder of modules has one page of reference, read from the
sources without importing them, since that would take JAX.
"""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = {
    "models": ROOT / "models",
    "data": ROOT / "data",
    "parallel": ROOT / "parallel",
    "sim": ROOT / "sim",
    "rl": ROOT / "rl",
    "chiliad_client": ROOT / "client/chiliad_client",
}
SOURCES = {"index.md": ROOT / "README.md", "guides.md": DOCS / "README.md"}
"""Pages of the site whose text lies elsewhere, or under another name."""

_CODE_OR_LINK = re.compile(
    r"```.*?```|\[(?P<text>[^\[\]]+)\]\((?P<to>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)|`[^`]*`", re.DOTALL
)
_MODULE_HEAD = """
::: {name}
    options:
      members: {members}
"""


def on_config(config: Any) -> Any:
    """Sets the navigation."""
    config.nav = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that no file of docs/ holds, and takes its index for the guides' page."""
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path("README.md"))
    texts = {uri: source.read_text() for uri, source in SOURCES.items()} | reference()
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to where the site has their files; those it does not have become plain text."""
    uri = page.file.src_uri
    folder = SOURCES.get(uri, DOCS / uri).parent
    return _CODE_OR_LINK.sub(lambda match: _led(match, folder, uri), markdown)


def on_post_build(config: Any) -> None:
    """Writes the search's index as a script too, which a page that is opened as a file may read
    (docs/search.js)."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(
        f"var __index = {index.read_text(encoding='utf-8')}", "utf-8"
    )


def navigation() -> list[Any]:
    """The site's tabs and sections, as mkdocs takes them."""
    start, *sections = re.split(r"^## ", SOURCES["guides.md"].read_text(), flags=re.MULTILINE)
    guides = [{part.partition("\n")[0]: _guides(part)} for part in sections]
    results = sorted(page.name for page in (DOCS / "results").glob("*.md"))
    rooms = [{package: sorted(_rooms(package))} for package in PACKAGES]
    return [
        {"Start": ["index.md", "guides.md", *_guides(start)]},
        {"Guides": guides},
        {"Results": [f"results/{name}" for name in results]},
        {"Reference": rooms},
    ]


def _guides(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"\]\(([a-z0-9_]+\.md)\)", text)))


def reference() -> dict[str, str]:
    """Pages of the reference by their place in the site: directives for mkdocstrings."""
    return {
        uri: f"# {uri.removeprefix('reference/').removesuffix('.md').replace('/', '.')}\n"
        + "".join(_MODULE_HEAD.format(name=n, members=_public(p)) for n, p in modules.items())
        for package in PACKAGES
        for uri, modules in _rooms(package).items()
    }


@cache
def _rooms(package: str) -> dict[str, dict[str, Path]]:
    """Pages of a package with their modules: one for each folder that has any."""
    rooms: dict[str, dict[str, Path]] = {}
    for name, path in _modules(package):
        room = name.rpartition(".")[0].replace(".", "/") if "." in name else name
        rooms.setdefault(f"reference/{room}.md", {})[name] = path
    return rooms


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Modules that define something public, by name; none of a simulator's own environment."""
    for path in sorted(PACKAGES[package].rglob("*.py")):
        parts = path.relative_to(PACKAGES[package].parent).with_suffix("").parts
        if parts[-1] != "__init__" and "simulators" not in parts and _public(path):
            yield ".".join(parts), path


@cache
def _public(path: Path) -> list[str]:
    """Names that a module defines, documents and does not begin with an underscore."""
    return [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if ast.get_docstring(node)
    ]


def _led(match: re.Match[str], folder: Path, uri: str) -> str:
    text, target, anchor = match["text"], match["to"], match["anchor"] or ""
    if not target or "://" in target:
        return match[0]
    path = Path(os.path.normpath(folder / target))
    place = _place(path)
    if place is None:
        return text
    if text == target and path.suffix == ".md":
        text = _title(path)
    page, _, module = place.partition("#")
    anchor = f"#{module}" if module else anchor
    return f"[{text}]({os.path.relpath(page, os.path.dirname(uri) or '.')}{anchor})"


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def _place(path: Path) -> str | None:
    """The page or file of the site that stands for a file of the repository."""
    if path.is_dir() and (path / "README.md").exists():
        path = path / "README.md"
    if path in _places():
        return _places()[path]
    inside = path.is_file() and path.is_relative_to(DOCS)
    return path.relative_to(DOCS).as_posix() if inside else None


@cache
def _places() -> dict[Path, str]:
    """Places of files that lie elsewhere in the site than in docs/."""
    return {source: uri for uri, source in SOURCES.items()} | {
        file: f"{uri}#{name}"
        for package in PACKAGES
        for uri, modules in _rooms(package).items()
        for name, file in modules.items()
    }
