"""The site holds every guide, result and public name, and its links lead to pages that it has."""

import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace

from tests.helpers.browser import needs_browser, shown
from tests.helpers.markdown import local_links

ROOT = Path(__file__).parents[1]

_spec = importlib.util.spec_from_file_location("site_hook", ROOT / "docs/site.py")
assert _spec
assert _spec.loader
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)


def pages() -> dict[str, str]:
    """Markdown of the site's pages by place, links led."""
    files = {p.relative_to(site.DOCS).as_posix(): p for p in site.DOCS.rglob("*.md")}
    del files["README.md"]
    texts = {uri: path.read_text() for uri, path in (files | site.SOURCES).items()}
    return {uri: led(uri, text) for uri, text in texts.items()} | site.reference()


def led(uri: str, text: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    return site.on_page_markdown(text, page, None, None)


def listed(navigation: object) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    inside = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for entry in inside for page in listed(entry)]  # type: ignore[attr-defined]


def test_the_navigation_lists_every_page_once():
    assert sorted(listed(site.navigation())) == sorted(pages())


def test_links_lead_to_pages_of_the_site():
    texts = pages()
    modules = {f"{uri}#{m}" for uri in texts for m in re.findall("::: (.+)", texts[uri])}
    links = 0
    for uri, text in texts.items():
        for to, anchor in local_links(text):
            if to:
                place = os.path.normpath(os.path.join(os.path.dirname(uri), to))
                assert place in texts or (site.DOCS / place).is_file(), f"{uri} links to {to}"
                assert not place.startswith("reference/") or f"{place}#{anchor}" in modules
                links += 1
    assert links > 200


def test_a_link_to_a_file_elsewhere_becomes_text_and_code_stays():
    assert led("rl.md", "[the pins](../constraints/py311.txt), `[a](b)`") == "the pins, `[a](b)`"
    assert led("index.md", "[`make gpu`](docs/gpu.md#x)") == "[`make gpu`](gpu.md#x)"
    assert led("guides.md", "[rl.md](rl.md)").startswith("[Improving a policy")
    assert led("results/rl.md", "[index](../README.md)") == "[index](../guides.md)"


def test_the_search_has_its_index_as_a_script(tmp_path):
    (tmp_path / "search").mkdir()
    index = '{"docs": [{"title": "Ø"}]}'
    (tmp_path / "search/search_index.json").write_text(index)
    site.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    assert (tmp_path / "search/search_index.js").read_text() == f"var __index = {index}"


@needs_browser
def test_a_worker_answers_where_the_site_is_opened_as_a_file(tmp_path):
    """As the theme's search asks: without a server, and in a page that loads search.js."""
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', (event) => postMessage(event.data + 1))"
    )
    shim = (ROOT / "docs/search.js").read_text()
    (tmp_path / "page.html").write_text(
        f"<body><script>{shim}</script><script>const worker = new Worker('worker.js');"
        "worker.addEventListener('message', (event) => document.title = event.data);"
        "worker.postMessage(41)</script>"
    )
    assert "<title>42</title>" in shown(tmp_path / "page.html", tmp_path)


def test_the_reference_shows_public_documented_names_alone(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('def shown():\n    "Doc."\ndef _hidden():\n    "Doc."\ndef silent(): ...\n')
    assert site._public(module) == ["shown"]
    assert "::: models.families.pi.model\n" in site.reference()["reference/models/families/pi.md"]
