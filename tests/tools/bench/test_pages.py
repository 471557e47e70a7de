"""Figures on pages are those of their JSON: the command that writes them anew changes nothing, and
no JSON contradicts itself."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.statistics import Rate
from tools.bench.pages import ROOT, busy, formatted, made, main, renewed
from tools.bench.parallel import recipe

DATA = ROOT / "docs" / "results" / "data"
README = (ROOT / "README.md").read_text()
LOADS = "<!-- loads -->"
FIGURES = re.compile("<!-- figures .*?<!-- end -->", re.DOTALL)
COMPUTED = {
    "fine_tune.md", "first_policy.md", "libero.md", "optimizer.md", "pipeline.md", "presets.md",
    "qlora.md", "results/README.md",
}  # fmt: skip
"""Pages whose tables have settings, what follows from shapes, or other pages' figures."""


def test_no_figure_on_a_page_differs_from_its_json() -> None:
    pages = dict(made(ROOT))
    assert {ROOT / "README.md", ROOT / "CHANGELOG.md"} <= pages.keys()
    assert {"demo.md", "recipe.md", "tabletop.md"} <= {page.name for page in pages}
    different = [page.name for page, text in pages.items() if text != page.read_text()]
    assert not different, "`python -m tools.bench pages` writes their figures anew"


@pytest.mark.parametrize("file", sorted(DATA.glob("*.json")), ids=lambda file: file.stem)
def test_each_json_names_the_commit_that_made_it_and_the_load_of_the_machine(file: Path) -> None:
    found = json.loads(file.read_text())
    for run in found["runs"] if file.stem == "suite" else [found]:
        assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", run["commit"])
        assert run["load_before"] is None or run["load_before"] >= 0


def test_pages_name_their_figures_that_were_measured_beside_other_work() -> None:
    texts = {page: page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))}
    beside = {page.name: names for page, text in texts.items() if (names := busy(text, DATA))}
    assert beside["attention.md"].keys() == {"attention.json"}
    silent = [page for page, text in texts.items() if busy(text, DATA) and LOADS not in text]
    assert not silent, f"write {LOADS}<!-- end --> where these pages tell of the machine"


def test_pages_say_of_which_measured_tables_no_json_was_kept() -> None:
    docs = ROOT / "docs"
    texts = {page.relative_to(docs).as_posix(): page.read_text() for page in docs.rglob("*.md")}
    silent = [
        page
        for page, text in texts.items()
        if page not in COMPUTED
        and any(measured_tables(text))
        and not re.search(r"\b[Nn]o\s+JSON\s+was\s+kept", text)
    ]
    assert not silent, "take their figures from a JSON, or say that no JSON was kept"


def test_no_line_begins_with_a_comment_that_markdown_would_take_for_html() -> None:
    """From such a line on, nothing is bold, a link or a table until the comment's line ends."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        lines = page.read_text().splitlines()
        begun = [line for line in lines if re.match(r" *<!-- (figures .*|loads )-->.", line)]
        assert not begun, f"{page}: {begun}"


def test_what_the_front_page_calls_the_least_is_the_least() -> None:
    shapes = json.loads((DATA / "plan.json").read_text())["shapes"]
    assert min(shapes, key=lambda name: shapes[name]["ours"]["fill"]) == "tiny"
    ratios: dict[str, list[float]] = {"straight from": [], "straight, to the last bit": []}
    for name in ("cameras.json", "data.json"):
        for row in json.loads((DATA / name).read_text())["rows"]:
            for which in (key for key in ratios if key in row["work"]):
                ratios[which].append(row["peers"]["LeRobot 0.6.1"]["ratio"])
    least, exact = (f"{min(found):.1f}" for found in ratios.values())
    assert f"{least} times (bit for bit as from a store: {exact})<!-- end --> or more" in README


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
    kept, jitter = json.loads((DATA / "recipe.json").read_text()), recipe.fitted_jitter()
    for gpus, row in recipe.efficiencies(jitter).items():
        assert kept["rows"][str(gpus)] == pytest.approx(row)
    assert kept["jitter"] == pytest.approx(jitter)


def test_the_recipes_epochs_follow_from_their_rates() -> None:
    kept = json.loads((DATA / "recipe.json").read_text())["epochs"]
    assert kept.keys() == recipe.EPOCHS.keys()
    for name, (batch, hours) in recipe.EPOCHS.items():
        assert kept[name].keys() == {str(gpus) for gpus in hours}
        for gpus, paper in hours.items():
            row = kept[name][str(gpus)]
            assert row["paper_hours"] == paper
            rate = batch / row["step_seconds"]
            assert row["samples_per_gpu"] == pytest.approx(rate)
            seconds = recipe.FRAMES / (gpus * rate * row["goodput"])
            assert row["epoch_hours"] == pytest.approx(seconds / 3600)


def measured_tables(text: str) -> Iterator[str]:
    """Tables that no JSON made and whose cells, but for the first of a row, are to a quarter or
    more numbers."""
    for table in re.findall(r"(?:^\|.*\n)+", FIGURES.sub("", text + "\n"), re.MULTILINE):
        rows = [line.strip("| ").split("|")[1:] for line in table.splitlines()[2:]]
        cells = [cell.strip() for row in rows for cell in row if cell.strip()]
        numbers = [cell for cell in cells if re.match(r"[*−+-]*\d", cell)]
        if len(numbers) > 1 and 4 * len(numbers) >= len(cells):
            yield table


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


def test_a_load_above_one_is_named_where_the_page_asks(tmp_path: Path) -> None:
    page, end = f"{LOADS}of another time<!-- end -->\n{PAGE}", "<!-- end -->\n"
    for load, said in ((None, ""), (0.9, ""), (2.1, "2.1 (found.json).")):
        (tmp_path / "found.json").write_text(json.dumps(FOUND | {"load_before": load}))
        told_load = said and f"Load average of the machine when it began: {said}"
        assert renewed(page, tmp_path) == f"{LOADS}{told_load}{end}{WRITTEN}"


def test_a_table_of_numbers_that_no_json_made_is_found() -> None:
    assert list(measured_tables(f"{WRITTEN}\n| a | b |\n|---|---|\n| x | a word, not 1 |\n")) == []
    lone = "| seed | success |\n|---|---|\n| 0 | **98.4 %** |\n| 1 | −0.2 |\n"
    assert list(measured_tables(f"{WRITTEN}\n{lone}")) == [lone]


def test_a_figure_is_told_as_our_pages_tell_it() -> None:
    assert formatted(-0.021, "+.1%") == "−2.1 %"
    assert formatted(0.0002, "+.2%") == "+0.02 %"
    assert formatted(12345.6, ",.0f") == "12,346"
    assert formatted([1, 2.5], ".1f") == "1.0–2.5"
    assert formatted([15998, None], ",") == "15,998–∞"
    assert formatted(0.9883, "x256") == "253"
    assert formatted(None, ".1%") == "–"
    assert formatted("2 cores, one-way", "") == "2 cores, one-way"
    with pytest.raises(ValueError, match="is not a share of 100: that would be"):
        formatted(0.9883, "x100")


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
