"""The page of an open-loop evaluation stands alone, shows every figure that it was given, and
nothing unescaped."""

import json
import re
from functools import partial
from html import unescape

import numpy as np
import pytest

from data.video.video import encode_mp4
from sim.clips import ENCODING
from sim.open_loop import AGAIN, BLIND, POLICY, TOLD, OpenLoop, RecordedChunks, without
from sim.report.open_loop import (
    CameraLook,
    OpenLoopReport,
    ShownEpisode,
    overlaid,
    render_open_loop,
)
from tests.helpers.browser import needs_browser, shown
from tests.helpers.page import Page

HOSTILE = '<script>alert("x")</script> & push'


@pytest.fixture(scope="module")
def report():
    rng = np.random.default_rng(0)
    actions = rng.normal(size=(12, 4, 2))
    told = RecordedChunks(
        episode=np.repeat([2, 4, 7], 4),
        frame=np.tile(np.arange(0, 16, 4), 3),
        actions=actions,
        valid=np.tile(np.arange(4) < 3, (12, 1)),
        before=rng.normal(size=(12, 2)),
        scale=np.ones(2),
        names=("<b>x</b>", "grip"),
    )
    names = (POLICY, AGAIN, without("<i>front</i>"), BLIND, TOLD)
    predicted = {name: actions + 0.3 * i * rng.normal() for i, name in enumerate(names, 1)}
    result = OpenLoop(told, predicted, {"far": 99.0}, (HOSTILE,) * 12, 0.3)
    looks = (CameraLook(4, "<i>front</i>", _picture(rng), np.eye(8)),)
    episodes = [
        ShownEpisode(
            *(4, HOSTILE, np.stack([_picture(rng)] * 6), 10.0),
            *(rng.normal(size=(16, 2)), told.frame[:4], actions[:4], told.valid[:4]),
            *((0, 1, 2, 3), looks),
        )
    ]
    return OpenLoopReport(
        title="A <b>policy</b>",
        data="runs/<x>",
        choice="held out",
        result=result,
        shown=episodes,
        config={"note": "</pre><script>"},
        versions={"jax": "0"},
        encode=partial(encode_mp4, options=ENCODING),
    )


def _picture(rng):
    return rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def page(report):
    return Page(render_open_loop(report))


def test_page_stands_alone_and_escapes_what_users_wrote(report, page):
    text = render_open_loop(report)
    assert "http" not in text
    assert "<script" not in text
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.elements}
    assert all(attrs.get("src", "data:").startswith("data:") for _, attrs in page.elements)
    assert f"“{HOSTILE}”" in page.text
    assert "<b>x</b>" in page.text
    assert "without <i>front</i>" in page.text


def test_every_condition_dimension_episode_and_finding_is_shown(report, page):
    result = report.result
    for name, errors in result.errors.items():
        assert name in page.text
        assert f"{errors.mean:.3g}" in page.text
    for finding in result.findings():
        assert finding in page.text
    assert any("'far'" in finding for finding in result.findings())
    for d in range(2):
        assert f"{result.errors[POLICY].by_dim[d]:.3g}" in page.text
    for error in result.errors[POLICY].by_episode.values():
        assert f"{error:.3g}" in page.text


def test_a_shown_episode_has_its_video_traces_and_looks(report, page):
    assert len(page.all("video")) == 1
    assert len(page.all("img")) == 1
    traces = [svg for svg in page.all("svg") if "4 predicted chunks" in svg["aria-label"]]
    assert len(traces) == 2
    for dim, name in enumerate(("<b>x</b>", "grip")):
        (one,) = report.shown
        drawn = np.append(one.actions[:, dim], one.predicted[..., dim][one.valid])
        assert f"{name} {drawn.min():.3g} to {drawn.max():.3g}" in page.text
    predicted = [line for line in page.all("polyline") if line["class"] == "predicted"]
    assert len(predicted) == 8
    for line in predicted:
        points = [point.split(",") for point in line["points"].split()]
        assert len(points) == 3
        assert np.isfinite(np.array(points, float)).all()


def test_charts_and_tables_are_described_and_no_value_is_nan(page):
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert len(page.all("table")) == len(page.all("caption"))
    assert "nan" not in page.text.lower().split()


def test_what_matters_is_bright_and_the_rest_is_dim():
    picture = np.full((80, 80, 3), 100, np.uint8)
    heat = np.zeros((8, 8))
    heat[:2, :2] = 0.5
    drawn = overlaid(picture, heat, 0.5).astype(int)
    assert drawn[5, 5, 0] > drawn[5, 5, 2] + 50
    assert np.ptp(drawn[70, 70]) == 0
    assert drawn[70, 70, 0] < 100
    assert (overlaid(picture, 0 * heat, 0.0) == drawn[70, 70]).all()


@needs_browser
def test_a_browser_draws_every_chart_and_needs_no_sideways_scrolling(report, tmp_path):
    script = """<script>addEventListener("load", () => {
      const boxes = [...document.querySelectorAll("section > :not(details) svg, img")]
        .map((e) => e.getBoundingClientRect());
      document.body.dataset.found = JSON.stringify({
        drawn: boxes.map((box) => box.width > 50 && box.height > 5),
        wide: document.documentElement.scrollWidth - innerWidth});
    });</script></body>"""
    path = tmp_path / "report.html"
    path.write_text(render_open_loop(report).replace("</body>", script))
    (asked,) = re.findall(r'<body[^>]* data-found="([^"]+)"', shown(path, tmp_path))
    found = json.loads(unescape(asked))
    assert len(found["drawn"]) > 4
    assert all(found["drawn"])
    assert found["wide"] <= 0
