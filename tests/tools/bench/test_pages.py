"""Figures on pages are those of their JSON: the command that writes them anew changes nothing, and
no JSON contradicts itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sim.statistics import Rate
from tools.bench.pages import ROOT, made, main, renewed, told
from tools.bench.parallel import recipe

DATA = ROOT / "docs" / "results" / "data"


def test_no_figure_on_a_page_differs_from_its_json() -> None:
    pages = dict(made(ROOT))
    assert {"README.md", "demo.md", "recipe.md", "tabletop.md"} <= {page.name for page in pages}
    different = [page.name for page, text in pages.items() if text != page.read_text()]
    assert not different, "`python -m tools.bench pages` writes their figures anew"


@pytest.mark.parametrize("file", sorted(DATA.glob("*.json")), ids=lambda file: file.stem)
def test_rates_and_intervals_follow_from_the_successes(file: Path) -> None:
    for found in _records(json.loads(file.read_text())):
        rate = Rate(found["successes"], found["episodes"])
        assert found["success"] == pytest.approx(rate.value, abs=6e-5)
        assert found["interval"] == pytest.approx(rate.interval, abs=6e-5)


def test_the_tabletops_worst_seeds_are_the_worst() -> None:
    found = json.loads((DATA / "tabletop.json").read_text())
    for task, worst in found["worst_seed"].items():
        seeds = [seed[task] for seed in found["training_seeds"].values()]
        assert worst["successes"] == min(seed["successes"] for seed in seeds)
    least = min(found["worst_seed"].values(), key=lambda worst: worst["success"])
    assert found["worst"] == pytest.approx(least["successes"] / least["episodes"])


def test_the_demos_worst_seed_is_the_worst() -> None:
    found = json.loads((DATA / "demo.json").read_text())
    assert found["success"] == min(run["success"] for run in found["runs"])


def test_the_recipes_table_is_what_its_benchmark_gives() -> None:
    kept, found = json.loads((DATA / "recipe.json").read_text()), recipe.run(Console(quiet=True))
    for gpus, row in found["rows"].items():
        assert kept["rows"][str(gpus)] == pytest.approx(row)
    assert kept["jitter"] == pytest.approx(found["jitter"])


PAGE = """\
<!-- figures found.json {best.success:.1%} of {best.starts:,} -->?<!-- end --> best.

<!-- figures found.json for by task
| task | {best.name} |
|---|---|
| `{*}` | {by task.*.0:x50}/50, {by task.*.0:.0%} ({by task.*.1:.1%}) |
-->
<!-- end -->
"""
FOUND = {
    "best": {"success": 0.5, "starts": 1500, "name": "a name"},
    "by task": {"π0.5": [0.98, [0.895, 0.996]], "lift": [0, [0, 0.071]]},
}
WRITTEN = """\
<!-- figures found.json {best.success:.1%} of {best.starts:,} -->50.0 % of 1,500<!-- end --> best.

<!-- figures found.json for by task
| task | {best.name} |
|---|---|
| `{*}` | {by task.*.0:x50}/50, {by task.*.0:.0%} ({by task.*.1:.1%}) |
-->
| task | a name |
|---|---|
| `π0.5` | 49/50, 98 % (89.5–99.6 %) |
| `lift` | 0/50, 0 % (0.0–7.1 %) |
<!-- end -->
"""


def test_figures_and_tables_are_written_and_written_again(tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(json.dumps(FOUND))
    assert renewed(PAGE, tmp_path) == WRITTEN
    assert renewed(WRITTEN, tmp_path) == WRITTEN
    (tmp_path / "found.json").write_text(json.dumps(FOUND | {"by task": {"lift": [1, [0.9, 1]]}}))
    assert "`lift` | 50/50, 100 % (90.0–100.0 %)" in (text := renewed(WRITTEN, tmp_path))
    assert "49/50" not in text


def test_a_figure_is_told_as_our_pages_tell_it() -> None:
    assert told(-0.021, "+.1%") == "−2.1 %"
    assert told(0.0002, "+.2%") == "+0.02 %"
    assert told(12345.6, ",.0f") == "12,346"
    assert told([1, 2.5], ".1f") == "1.0–2.5"
    assert told([15998, None], ",") == "15,998–∞"
    assert told(0.9883, "x256") == "253"
    assert told(None, ".1%") == "–"
    assert told("2 cores, one-way", "") == "2 cores, one-way"
    with pytest.raises(ValueError, match="is not a share of 100: that would be"):
        told(0.9883, "x100")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!-- figures found.json {best.sucess} --><!-- end -->", "'sucess'; there is success"),
        ("<!-- figures found.json {best.success.0} --><!-- end -->", "there is only 0.5"),
        ("<!-- figures found.json {best.name:.1%} --><!-- end -->", "name:.1%}: .*format code"),
        ("<!-- figures found.json {best.success} -->", "no <!-- end -->"),
        ("<!-- figures found {best.success} --><!-- end -->", "no <!-- end -->"),
        ("<!-- figures found.json {best.success} -->" + PAGE, "no <!-- end -->"),
        ("<!-- figures lost.json {best.success} --><!-- end -->", "lost.json"),
    ],
)
def test_a_mistake_on_a_page_is_named(page: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "docs" / "results" / "data").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "data" / "found.json").write_text(json.dumps(FOUND))
    (tmp_path / "README.md").write_text(page)
    with pytest.raises(ValueError, match=f"README.md: .*{said}"):
        main(tmp_path)
    assert (tmp_path / "README.md").read_text() == page


def _records(found: Any) -> Iterator[dict[str, Any]]:
    """Dicts that tell successes, episodes, and what follows from them, at any depth."""
    if isinstance(found, dict) and found.keys() >= {"successes", "episodes", "success", "interval"}:
        yield found
    for value in found.values() if isinstance(found, dict) else ():
        yield from _records(value)
