import base64
import io
import json
import re
import sys

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.view.view import write_page, write_recording
from tests.helpers.browser import needs_browser, shown
from tests.helpers.data.damage import change, edit_column
from tests.helpers.data.recording import EPISODES, FRONT, PARQUET, TASKS, WRIST, make_episode, write


@pytest.fixture(scope="module")
def page(recorded, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(open_dataset(recorded), 1, path)
    return path


def data_of(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def decoded(mp4):
    with av.open(io.BytesIO(mp4)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def test_the_page_needs_nothing_from_elsewhere(page):
    html = page.read_text()
    assert not re.search(r"https?:|url\(|@import|<link|src=(?!\"data:)", html)


def test_the_page_has_every_frame_of_every_camera(page, episodes):
    found = re.findall(r'src="data:video/mp4;base64,([^"]+)"', page.read_text())
    for encoded, camera in zip(found, (FRONT, WRIST), strict=True):
        frames, expected = decoded(base64.b64decode(encoded)), episodes[1].frames[camera]
        assert frames.shape == expected.shape
        assert np.abs(frames.astype(int) - expected).mean() < 8


def test_the_page_has_every_value_with_its_name_and_the_task(page, episodes):
    html = page.read_text()
    data = data_of(html)
    columns = [episodes[1].columns[n] for n in ("observation.state", "action", "next.success")]
    for column, values in zip(data["columns"], columns, strict=True):
        assert np.allclose(column, values.reshape(len(values), -1).T, rtol=1e-3, atol=1e-9)
    assert (data["fps"], data["length"]) == (20, 12)
    assert data["tasks"] == [{"first": 0, "text": "reach the green block"}]
    names = re.findall(r'class="name" title="([^"]+)"', html)
    assert names == ["x", "y", "z", "grip", "0", "1", "2", "0"]
    for text in ("reach the green block", "<b>12</b> frames", "<b>0.6</b> s", "<b>test</b>"):
        assert text in html


def test_text_of_a_dataset_stays_text(tmp_path):
    nasty = 'push </script><script>alert("x")</script> & <b>it</b>'
    episode = make_episode(0, 3)._replace(task=nasty)
    write_page(open_dataset(write(tmp_path / "d", [episode])), 0, tmp_path / "p.html")
    html = (tmp_path / "p.html").read_text()
    assert html.count("<script") == html.count("</script>") == 2
    assert "<b>it</b>" not in html
    assert data_of(html)["tasks"][0]["text"] == nasty


def test_lines_stop_where_values_are_missing(tmp_path):
    root = write(tmp_path / "d", [make_episode(0, 6)])
    file = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    values = table["action"].to_pylist()
    values[2] = [float("nan"), 0.0, 0.0]
    at = table.column_names.index("action")
    pq.write_table(table.set_column(at, "action", pa.array(values, table["action"].type)), file)
    write_page(open_dataset(root), 0, tmp_path / "p.html")
    html = (tmp_path / "p.html").read_text()
    assert data_of(html)["columns"][1][0][2] is None
    first = re.search(r'class="action".*?<path d="([^"]+)"', html, re.DOTALL)[1]
    assert re.sub(r"[\d. ]", "", first) == "MLMLL"


def test_an_episode_that_is_not_there_is_refused(recorded, tmp_path):
    with pytest.raises(ValueError, match="there is no episode 6; give one of 0 to 5"):
        write_page(open_dataset(recorded), 6, tmp_path / "p.html")


@needs_browser
def test_a_browser_shows_the_frame_that_a_link_asks_for(page, episodes, tmp_path):
    document = shown(page, tmp_path, "frame=7")
    assert "frame <b>7</b> of 12 · 0.35 s" in document
    outputs = re.findall(r"<output[^>]*>([^<]*)</output>", document)
    values = [episodes[1].columns[n][7] for n in ("observation.state", "action")]
    assert np.allclose([float(x) for x in outputs[:7]], np.concatenate(values), rtol=1e-3)
    times = re.findall(r'data-shown="([\d.]+)"', document)
    assert np.allclose([float(time) for time in times], 7.5 / 20)
    assert len(times) == 2


def test_a_recording_reads_back(recorded, episodes, tmp_path):
    chunk = pytest.importorskip("rerun.chunk", reason="rerun-sdk is not installed")
    write_recording(open_dataset(recorded), 1, tmp_path / "episode.rrd")
    batches: dict = {}
    for part in chunk.RrdReader(tmp_path / "episode.rrd").stream():
        batches.setdefault(part.entity_path, []).append(part.to_record_batch())
    found = {
        entity: {name: batch[name].to_pylist() for batch in parts for name in batch.schema.names}
        for entity, parts in batches.items()
    }
    for name in ("observation.state", "action"):
        values = found[f"/{name}"]["Scalars:scalars"]
        assert np.allclose(values, episodes[1].columns[name])
    assert found["/observation.state"]["SeriesLines:names"] == [["x", "y", "z", "grip"]]
    assert found["/action"]["frame"] == list(range(12))
    assert found["/task"]["TextDocument:text"] == [["reach the green block"]]
    ((mp4,),) = found[f"/{FRONT}"]["AssetVideo:blob"]
    frames = decoded(bytes(mp4))
    assert frames.shape == episodes[1].frames[FRONT].shape
    ((first,), *_) = found[f"/{FRONT}"]["VideoFrameReference:timestamp"]
    assert first == 25_000_000


def test_a_recording_without_rerun_says_what_to_install(recorded, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[view\]'"):
        write_recording(open_dataset(recorded), 1, tmp_path / "episode.rrd")


def test_tasks_of_an_episode_follow_each_other(copy, tmp_path):
    def second_half(values, kind):
        return [2 if 4 <= row < 7 else value for row, value in enumerate(values)], kind

    edit_column(copy, PARQUET, "task_index", second_half)
    edit_column(copy, EPISODES, "tasks", change(0, [TASKS[0], TASKS[2]]))
    write_page(open_dataset(copy), 0, tmp_path / "p.html")
    expected = [{"first": 0, "text": TASKS[0]}, {"first": 4, "text": TASKS[2]}]
    assert data_of((tmp_path / "p.html").read_text())["tasks"] == expected
