"""The page of a whole dataset: odd episodes are marked, text stays text, flags become an edit, and
a browser shows ten thousand rows as it shows ten."""

import html
import json
import re
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from data import open_dataset
from data.dataset import Runs
from data.errors import DatasetError
from data.statistics.episodes import episode_facts, unlike
from data.statistics.histograms import histograms, shared_edges
from data.statistics.idle import IdleLimits
from data.statistics.stats import compute
from data.view import browse
from data.view.browse import MARKS, write_browser
from tests.helpers.browser import needs_browser, shown
from tests.helpers.data.recording import make_episode, write

LIMITS = IdleLimits()
NASTY = 'push </script><script>document.title = "run"</script><img src=x onerror="alert(1)"> & it'


class MemoryDataset:
    """Random walks of 10 to 29 frames, by the protocol alone."""

    name, root, robot_type, fps = "made/up", "made up", None, 10.0
    column_names = ("observation.state", "action")

    def __init__(self, episodes, cameras=(), task="go"):
        rng = np.random.default_rng(episodes)
        self.cameras, self.prompts, self.digest = cameras, ((task,), ("wait",)), "d" * 64
        self.lengths = rng.integers(10, 30, episodes)
        self.paths = [rng.normal(size=(n, 2)).cumsum(0).astype(np.float32) for n in self.lengths]
        numbers = np.arange(episodes)
        self.runs = Runs(numbers, 0 * numbers, self.lengths, numbers % 2)
        self.present = np.ones((episodes, len(cameras)), bool)
        self.features = {n: {"dtype": "float32", "shape": (2,)} for n in self.column_names}
        self.asked = []

    def stream(self, names, episodes=None):
        chosen = range(len(self.paths)) if episodes is None else episodes
        for first in range(0, len(chosen), 7):
            block = np.concatenate([self.paths[i] for i in chosen[first : first + 7]])
            yield dict.fromkeys(names, block)

    def frames_at(self, i, camera, at):
        self.asked.append(i)
        return np.full((len(at), 12, 16, 3), i % 250, np.uint8)


def quiet(*_):
    pass


def page_of(dataset, out, **options):
    counts = write_browser(dataset, out, quiet, limits=LIMITS, **options)
    return counts, (out / "index.html").read_text()


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def marks(data, episode):
    return [mark for m, mark in enumerate(MARKS) if data["marked"][episode] >> m & 1]


def test_odd_episodes_are_marked_by_what_is_odd(tmp_path):
    made = MemoryDataset(60)
    smooth = np.linspace(0, 10, 20)[:, None].repeat(2, 1).astype(np.float32)
    for i in range(60):
        made.paths[i] = smooth[: made.lengths[i]] + np.float32(0.01) * made.paths[i][:20]
        made.lengths[i] = len(made.paths[i])
    made.paths[3] = np.zeros((20, 2), np.float32)
    made.paths[7] = smooth[[0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10, 11, 11, 12, 13]]
    made.paths[11] = smooth * np.array([[1], [-1]] * 10, np.float32)
    made.paths[13] = smooth.copy()
    made.paths[13][5, 0] = 400
    made.paths[17] = smooth.copy()
    made.paths[17][5, 1] = np.nan
    made.paths[19] = np.linspace(0, 10, 300)[:, None].repeat(2, 1).astype(np.float32)
    made.lengths[:] = [len(values) for values in made.paths]
    counts, page = page_of(made, tmp_path / "page")
    data = data_of(page)
    for episode, mark in ((3, "still"), (7, "doubled"), (11, "rough"), (13, "out of range"),
                          (17, "not finite"), (19, "long")):  # fmt: skip
        assert mark in marks(data, episode)
    assert sum(bool(bits) for bits in data["marked"]) <= 10
    assert counts["not finite"] == 1


def test_jerk_is_that_of_the_movement_and_not_of_its_rate():
    """A sine's third derivative is its amplitude times (2π f)³, its range twice the amplitude."""
    found = []
    for fps in (50, 100):
        made = MemoryDataset(4)
        time = np.arange(4 * fps) / fps
        made.paths = [np.sin(2 * np.pi * time)[:, None].repeat(2, 1)] * 4
        made.lengths, made.fps = np.full(4, len(time)), float(fps)
        made.features = {n: {"dtype": "float64", "shape": (2,)} for n in made.column_names}
        found.append(episode_facts(made, LIMITS, (), quiet).jerk[0])
    assert np.allclose(found, (2 * np.pi) ** 3 / np.sqrt(2) / 2, rtol=0.01)


def test_fences_are_tukeys():
    low, high = unlike(np.array([1.0, 2, 3, 4, 5, 11.1, -5.2, np.nan, 10.9]))
    assert not low.any()
    assert not high.any()
    assert unlike(np.array([*range(100), 1000.0, -1000]))[1].nonzero()[0].tolist() == [100]


def test_histograms_count_every_finite_frame_and_share_their_ends():
    made, other = MemoryDataset(40), MemoryDataset(30)
    made.paths[2][1, 0] = np.nan
    stats = [compute(d, range(3, 30), ["action"])["action"] for d in (made, other)]
    edges = shared_edges(stats)
    counts = histograms(made, {"action": edges})["action"]
    frames = made.lengths.sum()
    assert counts.sum(axis=1).tolist() == [frames - 1, frames]
    values = np.concatenate(made.paths)[:, 1]
    inside = np.histogram(values, 40, edges[:, 1])[0]
    assert np.abs(counts[1, 1:-1] - inside[1:-1]).max() <= 1


def test_sheets_hold_pictures_of_each_episode_and_a_second_run_reads_none(tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "PER_SHEET", 4)
    made, out = MemoryDataset(10, ("observation.images.front",)), tmp_path / "page"
    _, page = page_of(made, out)
    sheets = data_of(page)["sheets"][0]
    assert len(sheets) == 3
    for i in range(10):
        with Image.open(out / sheets[i // 4]) as sheet:
            assert abs(sheet.getpixel((48, 72 * (i % 4) + 36))[0] - i) < 3
    made.asked.clear()
    (out / sheets[1]).unlink()
    (out / sheets[1]).with_suffix(".partial").write_bytes(b"half")
    assert page_of(made, out)[1] == page
    assert made.asked == [4, 5, 6, 7]


def test_square_pictures_of_one_colour_are_blank(tmp_path):
    made = MemoryDataset(10, ("observation.images.front",))
    made.frames_at = lambda i, camera, at: np.full((len(at), 12, 12, 3), (200, 120, 40), np.uint8)
    counts, _ = page_of(made, tmp_path / "page")
    assert (counts["blank"], counts["frozen"]) == (10, 0)


def test_an_episode_whose_pictures_cannot_be_read_is_shown_with_the_reason(tmp_path):
    made = MemoryDataset(3, ("observation.images.front",))
    read = made.frames_at

    def damaged(i, camera, at):
        if i == 1:
            raise DatasetError("video.mp4", "frame 3", "cannot be decoded; copy it again.")
        return read(i, camera, at)

    made.frames_at = damaged
    for _ in range(2):
        counts, page = page_of(made, tmp_path / "page")
        data = data_of(page)
        assert counts["unreadable"] == 1
        assert "unreadable" in marks(data, 1)
        assert "video.mp4" in data["unreadable"]["1"]


def test_a_dataset_without_episodes_and_a_folder_of_something_else_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no episodes to show"):
        page_of(MemoryDataset(0), tmp_path / "page")
    assert not (tmp_path / "page").exists()
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(ValueError, match="has other files; choose a folder"):
        page_of(MemoryDataset(2), tmp_path)


def test_text_stays_text_and_nothing_comes_from_elsewhere(tmp_path):
    made = MemoryDataset(4, task=NASTY)
    _, page = page_of(made, tmp_path / "page", against=MemoryDataset(5, task="<i>other</i>"))
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "<i>" not in page
    assert data_of(page)["tasks"][0] == NASTY
    assert not re.search(r"https?:|@import|<link", page)


def test_two_datasets_are_drawn_beside_each_other_with_what_differs(tmp_path):
    first, second = MemoryDataset(20), MemoryDataset(30, task="another")
    second.paths = [values + 100 for values in second.paths]
    _, page = page_of(first, tmp_path / "page", against=second)
    assert page.count('class="b"') == 1 + 4
    assert "1 of the second&#x27;s 2 prompts are not in the first" in page
    assert "is outside the first&#x27;s range in 100 %" in page


@needs_browser
def test_a_browser_shows_what_is_in_view_of_ten_thousand_episodes(tmp_path):
    made = MemoryDataset(10_000, task=NASTY)
    page_of(made, tmp_path / "page")
    link = "sort=length&down=1&task=push&flag=2,4-8"
    document = shown(tmp_path / "page/index.html", tmp_path, link)
    assert "5,000 of 10,000 episodes shown, 6 flagged" in document
    rows = re.findall(r'type="checkbox">(\d+)</label>', document)
    assert 5 < len(rows) < 60
    assert all(made.lengths[int(i)] == 29 for i in rows)
    assert "--delete 2,4-8 --out NEW" in document
    (saved,) = re.findall(r'download="flagged.txt" href="data:text/plain,(.*?)"', document)
    assert unquote(saved) == "2,4-8\n"
    assert html.escape(NASTY, quote=False) in document
    assert "<title>made/up</title>" in document


@needs_browser
def test_pictures_of_a_recording_show_in_a_browser(tmp_path):
    dataset = open_dataset(write(tmp_path / "set", [make_episode(i, 5 + i) for i in range(3)]))
    page_of(dataset, tmp_path / "page")
    document = shown(tmp_path / "page/index.html", tmp_path, "camera=1&mark=flagged&flag=1")
    (url,) = re.findall(r"background-image: url\(&quot;(.*?)&quot;\)", document)
    assert "-1-00000.jpg" in url
    assert (tmp_path / "page" / url).is_file()
