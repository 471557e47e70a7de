"""The report is one well-formed, self-contained page that shows what it was given and nothing
unescaped."""

import base64
import io
import json
import re
from dataclasses import replace
from functools import partial
from html import unescape

import av
import numpy as np
import pytest

from data.video.video import encode_mp4
from sim.clips import ENCODING
from sim.environments.device_slots import DeviceSlots
from sim.evaluate import evaluate, evaluate_expert
from sim.protocol import Start
from sim.report import charts
from sim.report.report import Report, render, write_report
from sim.results import Failure, Perturbed, compared, joined
from sim.statistics import Paired, Rate
from tests.helpers.browser import needs_browser, shown
from tests.helpers.page import Page
from tests.helpers.sim.point_world import PointWorld, expert, idle_policy, seeing_policy


class Hostile(PointWorld):
    """Prompts of a user who writes HTML."""

    prompts = tuple((f'<script>alert("{c}")</script> & {c}',) for c in PointWorld.goals)


@pytest.fixture(scope="module")
def report():
    slots = DeviceSlots(Hostile(), 24, expert)
    starts = [Start("points", seed) for seed in range(500, 524)]
    rng = np.random.default_rng(0)
    metrics = [
        {
            "step": step,
            "loss": float(np.exp(-step / 100 + rng.normal() / 9)),
            "data_wait": 0.001,
            "step_seconds": 0.05,
        }
        for step in range(300)
    ]
    metrics[7]["loss"] = float("nan")
    return Report(
        title="A <b>run</b>",
        task="points",
        evaluations={
            "trained": evaluate(slots, seeing_policy, starts, clips=4),
            "untrained": evaluate(slots, idle_policy, starts, clips=1),
            "expert": evaluate_expert(slots, starts),
            "wrong prompt": evaluate(slots, seeing_policy, starts, control="other prompt", clips=2),
            "blank image": evaluate(slots, seeing_policy, starts, control="blank", clips=0),
        },
        metrics=metrics,
        fill={"prefix places": 0.981},
        seconds={"record": 40.0, "train & validate": 200.0},
        config={"model": {"width": 128}, "note": "</pre><script>"},
        versions={"jax": "0.10.2", "hardware": "2 × <CPU>"},
        encode=partial(encode_mp4, options=ENCODING),
    )


@pytest.fixture(scope="module")
def page(report):
    return Page(render(report))


def course(x, y):
    return charts.Course("one", "main", x, y, noisy=True)


def test_page_loads_nothing_from_elsewhere(report, page):
    assert "http" not in render(report)
    for tag, attrs in page.elements:
        assert tag not in {"script", "link", "iframe", "object"}
        for name in ("src", "href", "poster", "data"):
            assert attrs.get(name, "data:").startswith("data:")
    assert "url(" not in render(report)
    assert "@import" not in render(report)


def test_texts_of_users_are_escaped(report, page):
    assert "<script" not in render(report)
    assert '“<script>alert("red")</script> & red”' in page.text
    assert "A <b>run</b>" in page.text
    assert "</pre><script>" in page.text
    assert any('“<script>alert("red")' in video["aria-label"] for video in page.all("video"))


def test_videos_hold_every_step_and_a_second_of_rest(report, page):
    videos = page.all("video")
    clips = [clip for e in report.evaluations.values() for clip in e.clips]
    assert len(videos) == len(clips) == 7
    for attrs, clip in zip(videos, clips, strict=True):
        frames = _decode(attrs["src"], "data:video/mp4;base64,")
        assert len(frames) == len(clip.frames) + PointWorld.fps
        assert np.abs(frames[0].astype(int) - clip.frames[0]).mean() < 4
        assert np.abs(frames[-1].astype(int) - clip.frames[-1]).mean() < 4
        (poster,) = _decode(attrs["poster"], "data:image/jpeg;base64,")
        assert np.abs(poster.astype(int) - clip.frames[0]).mean() < 4
        assert {"autoplay", "loop", "muted", "playsinline", "aria-label"} <= attrs.keys()


def test_numbers_of_every_condition_are_shown(report, page):
    text = page.text.replace("\u00a0", " ")
    for name, evaluation in report.evaluations.items():
        assert name in text
        assert evaluation.success.interval_text in text
    assert "24 of 24 episodes" in text
    assert "wrong prompt: named goal" in text
    assert "98.1 %" in text
    assert "3 min 20 s" in text
    assert "2.0 % of all training time" in text


def test_no_value_is_shown_as_nan_and_left_out_ones_are_counted(report, page):
    assert "nan" not in page.text.lower().split()
    assert all("nan" not in str(a).lower() for tag, a in page.elements if tag != "video")
    assert "left out: 1 not finite or not positive" in page.text


def test_charts_and_tables_are_described(page):
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert len(page.all("table")) == len(page.all("caption")) == 6
    assert all(th["scope"] in {"col", "row"} for th in page.all("th"))


def test_wrong_prompt_captions_say_whom_the_robot_obeyed(report, page):
    told = [report.evaluations["wrong prompt"].episodes[i].named_goal for i in (0, 1)]
    assert all(f"✓ {goal}, as told" in page.text for goal in told)
    stubborn = replace(
        report.evaluations["wrong prompt"].episodes[0], named_achieved=False, success=True
    )
    evaluation = report.evaluations["wrong prompt"]
    changed = replace(evaluation, episodes=(stubborn, *evaluation.episodes[1:]))
    text = Page(render(replace(report, evaluations={"wrong prompt": changed}))).text
    assert f"✗ {stubborn.goal} instead" in text


def test_a_named_goal_that_no_simulator_judges_is_told_as_not_measured(report):
    evaluation = report.evaluations["wrong prompt"]
    unknown = tuple(replace(e, named_achieved=None, success=False) for e in evaluation.episodes)
    named = {**report.evaluations, "wrong prompt": replace(evaluation, episodes=unknown)}
    text = Page(render(replace(report, evaluations=named))).text
    assert "named goal instead not measured" in " ".join(text.split())
    assert "wrong prompt: named goal" not in text
    first = unknown[evaluation.clips[0].episode]
    assert f"– not {first.goal}; {first.named_goal} is not measured" in text


def test_report_is_written_whole_small_and_alone(report, tmp_path):
    path = tmp_path / "new" / "report.html"
    write_report(path, report)
    assert path.read_text(encoding="utf-8") == render(report)
    assert path.stat().st_size < 1_000_000
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_failed_write_leaves_the_old_report(report, tmp_path):
    path = tmp_path / "report.html"
    write_report(path, report)
    with pytest.raises(ValueError, match="evaluations is empty"):
        write_report(path, replace(report, evaluations={}))
    with pytest.raises(UnicodeEncodeError):
        write_report(path, replace(report, title="\ud800"))
    assert path.read_text(encoding="utf-8") == render(report)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_tasks_comparisons_and_failures_are_tabled(report):
    class Other(PointWorld):
        name = "<other>"

    starts = [Start("<other>", seed) for seed in range(4)]
    other = evaluate(DeviceSlots(Other(), 4), idle_policy, starts, clips=0)
    main = report.evaluations["trained"]
    both = joined([replace(main, clips=()), other], "suite")
    lost = Failure("<other>", 77, "it <fell>", 3)
    both = replace(both, failures=(lost,), unrepeatable=2)
    pairs = Paired(20, 9, 3, 8)
    text = Page(
        render(replace(report, evaluations={"trained": both}, comparisons={"compared": pairs}))
    ).text.replace("\u00a0", " ")
    assert "Success by task" in text
    assert "<other>" in text
    assert "0/4" in text
    assert "trained − compared" in text
    assert f"{100 * pairs.difference:+.1f}" in text
    assert f"{pairs.p_value:.3g}" in text
    assert "<other>, seed 77, was given up and is not counted: it <fell>" in text
    assert "3 reruns after failures of the simulator" in text
    assert "2 videos are left out" in text
    bare = Page(render(report)).text
    for absent in ("Paired comparison", "Success by task", "given up", "are left out"):
        assert absent not in bare


def test_changes_are_tabled_beside_the_unchanged_with_the_wordings_that_only_they_have(report):
    class Reworded(PointWorld):
        prompts = tuple((f"touch <{colour}>",) for colour in PointWorld.goals)

    main = report.evaluations["trained"]
    starts = [episode.start for episode in main.episodes]
    idle = evaluate(DeviceSlots(Reworded(), 24), idle_policy, starts, clips=1)
    lame = Perturbed("it is <lame>", idle, compared(idle, main))
    blind = replace(lame, evaluation=report.evaluations["blank image"])
    changed = replace(
        report, perturbed={"lame": lame, "blind": blind}, left_out={"dark": "no <lamp>"}
    )
    page = Page(render(changed))
    text = page.text.replace("\u00a0", " ")
    assert "it is <lame>" in text
    assert "dark is left out: no <lamp>" in text
    assert lame.difference.second_only == 24
    assert "unchanged" in text
    assert "-100.0" in text
    assert "Success by wording, lame" in text
    assert "“touch <red>”" in text
    assert "Success by wording, blind" not in text, "its prompts are those of the unchanged"
    assert len(page.all("video")) == 8
    assert "Robustness" not in Page(render(report)).text
    alone = Page(render(replace(report, left_out={"dark": "no <lamp>"}))).text
    assert "no <lamp>" in alone
    assert "Success under changes" not in alone


def test_a_report_without_training_has_no_empty_sections(report):
    bare = replace(report, metrics=[], fill={}, seconds={}, versions={}, config={})
    headings = Page(render(bare)).text
    assert "Training" not in headings
    assert "Wall time" not in headings


@pytest.mark.parametrize(
    ("y", "log"),
    [
        ([0.5], True),
        ([0.5, 0.5], True),
        ([1e-6, 10.0], True),
        ([0.30, 0.34], True),
        ([0, 0], False),
    ],
)
def test_curves_of_any_range_have_axes_and_finite_points(y, log):
    x = np.arange(len(y), dtype=float)
    svg = Page(charts.courses([course(x, np.array(y, float))], name="Loss", log=log))
    assert len(svg.all("line")) >= 2
    for line in svg.all("polyline"):
        points = [float(v) for p in line["points"].split() for v in p.split(",")]
        assert len(points) == 2 * len(y)
        assert np.isfinite(points).all()


def test_long_curves_are_thinned_but_keep_both_ends():
    x = np.arange(5000.0)
    svg = Page(charts.courses([course(x, x + 1)], name="Loss", log=True))
    points = svg.all("polyline")[0]["points"].split()
    assert len(points) == 600
    assert points[0].startswith("60.0,")
    assert points[-1].startswith("462.0,")


def test_whiskers_span_the_interval():
    svg = Page(charts.strip(Rate(5, 10)))
    whisker = next(a["d"] for a in svg.all("path"))
    low, high = Rate(5, 10).interval
    assert whisker.startswith(f"M{120 * low:.1f} 7H{120 * high:.1f}")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.97, "1 min 00 s"), (425, "7 min 05 s")],
)
def test_durations_read_naturally(seconds, text):
    assert charts.duration(seconds) == text


def _decode(uri, prefix):
    assert uri.startswith(prefix)
    data = base64.b64decode(uri.removeprefix(prefix), validate=True)
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


_ASKED = """<script>
addEventListener("load", async () => {
  const videos = [...document.querySelectorAll("video")];
  for (const video of videos) {
    if (video.readyState < 2) await new Promise((done) => {
      video.addEventListener("loadeddata", done);
      video.addEventListener("error", done);
      video.load();
    });
  }
  const boxes = [...document.querySelectorAll("svg, table")].map((e) => e.getBoundingClientRect());
  document.body.dataset.found = JSON.stringify({
    videos: videos.map((v) => [v.readyState, v.videoWidth, v.error && v.error.message]),
    drawn: boxes.map((box) => box.width > 50 && box.height > 5),
    wide: document.documentElement.scrollWidth - innerWidth,
    fetched: performance.getEntriesByType("resource").map((e) => e.name.slice(0, 5)),
  });
});
</script></body>"""


@needs_browser
def test_a_browser_plays_every_video_draws_every_chart_and_fetches_nothing(report, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(render(report).replace("</body>", _ASKED))
    (asked,) = re.findall(r'<body[^>]* data-found="([^"]+)"', shown(page, tmp_path))
    found = json.loads(unescape(asked))
    count = sum(len(evaluation.clips) for evaluation in report.evaluations.values())
    assert count >= 6
    assert found["videos"] == [[4, 160, None]] * count
    assert len(found["drawn"]) > 8
    assert all(found["drawn"])
    assert found["wide"] <= 0
    assert set(found["fetched"]) <= {"data:"}
