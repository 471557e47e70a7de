"""Runs are listed, compared and plotted from whatever lies in their folders."""

import json
import os
import re
import socket
import sys
from base64 import b64encode
from functools import partial
from io import StringIO

import numpy as np
import pytest
from PIL import Image

import tools.runs.__main__ as command
from data.files.cached import write_json
from data.video.video import encode_mp4
from models.files.terminal import Console
from parallel.runs.run_lock import locked
from sim.clips import ENCODING, Clip
from sim.report.report import Report, write_report
from sim.results import Episode, Evaluation
from sim.statistics import Rate
from tests.helpers.browser import needs_browser, shown
from tests.helpers.page import VOID, Page
from tools.checkpoint import _evaluations
from tools.runs.films import Film
from tools.runs.judged import read_rates
from tools.runs.page import render
from tools.runs.run_record import differences, find_runs, read_runs
from tools.runs.sheet import write_sheet
from tools.runs.table import cells

VOID |= {"input", "polygon", "wbr"}
encode = partial(encode_mp4, options=ENCODING)
HOSTILE = '<img src=x onerror="alert(1)"> & co'


@pytest.fixture
def typed(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "argv", ["runs", *map(str, words)])
        command.main()
        return capsys.readouterr().out

    return run


def made(folder, losses, steps=100, rate=1e-3, data="lift", held_out=(), success=()):
    """A run's folder, as training leaves it."""
    (folder / "checkpoints").mkdir(parents=True)
    config = {
        "optimizer": {"learning_rate": rate, "name": "muon"},
        "trainer": {"train_steps": steps},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "origin.json").write_text(json.dumps({"preset": "tiny", "data": f"sets/{data}"}))
    rows = [{"step": step, "loss": loss, "step_seconds": 60.0} for step, loss in enumerate(losses)]
    rows += [{"step": step - 1, "val_loss": loss} for step, loss in held_out]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        {"step": step, "success": {"rate": rate, "low": rate - 0.1, "high": rate + 0.1}}
        for step, rate in success
    ]
    (folder / "closed_loop.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def filmed(folder, seeds):
    """A report beside it, with a film of each start."""
    episodes = tuple(
        Episode(
            "lift", seed, "a", "a", "lift <it>", seed > 1, seed > 1, 9, 1.0, 0.1, np.zeros((3, 2))
        )
        for seed in seeds
    )
    frames = np.full((4, 32, 32, 3), np.arange(0, 80, 20)[:, None, None, None], np.uint8)
    clips = tuple(Clip(k, frames) for k in range(len(seeds)))
    found = Evaluation("lift", ("lift",), ("a",), episodes, 10, clips=clips)
    report = Report("t", "lift", {"trained": found, "expert": found}, [], {}, {}, {}, {}, encode)
    write_report(folder / "evaluation" / "report.html", report)
    judged = {"evaluations": {"trained": found.to_json()}}
    (folder / "evaluation" / "evaluation.json").write_text(json.dumps(judged))


def page(*folders, **options):
    return render(read_runs(find_runs(folders)), **options)


def test_a_table_lists_what_the_folders_hold(tmp_path, typed):
    made(tmp_path / "a", [2.0, 0.5], 2, held_out=[(1, 0.25), (2, 0.75)], success=[(2, 0.5)])
    filmed(tmp_path / "a", [1, 2])
    with locked(made(tmp_path / "sub" / "b", [3.0], data="push")):
        said = typed("list", tmp_path)
    *_, a, b = (re.split(r"  +", line.strip()) for line in said.splitlines())
    assert a[:6] == ["a", "tiny", "lift", "2/2", "0.5", "0.75, best 0.25"]
    assert a[6:] == ["50% (9–91)", "2 min", "finished"]  # of evaluation.json, made last
    assert b == ["b", "tiny", "push", "1/100", "3", "–", "–", "1 min", "running"]


def test_what_is_damaged_is_left_out_and_named(tmp_path, typed):
    run = made(tmp_path / "a", [2.0, 1.0, float("nan")])
    log = run / "metrics.jsonl"
    first, *others = log.read_text().splitlines(keepends=True)
    log.write_text("".join([first, '{"step": \n', *others, '{"step": 3, "lo']))
    (run / "origin.json").write_text("{")
    (run / "store").mkdir()
    write_json(run / "store/warnings-0.json", ["set, camera 'wrist': is black in all 8 episodes."])
    (run / "store/warnings-1.json").write_text('{"content": ["swapped"]}')
    said = typed("list", run)
    assert "3/100   nan" in said
    assert f"{log}, line 2: not a line of this log and was left out." in said
    assert f"{run / 'origin.json'} is damaged and was left out." in said
    shown = Page(page(run))
    assert "left out: 1 value that is not a number" in shown.text
    assert f"{log}, line 2: not a line of this log and was left out." in shown.text
    assert "Data of a: set, camera 'wrist': is black in all 8 episodes." in shown.text
    assert f"{run / 'store/warnings-1.json'} is damaged and was left out." in shown.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "evaluation/evaluation.json"])
def test_a_pipe_or_device_in_a_run_is_named_and_not_waited_for(tmp_path, typed, name):
    file = made(tmp_path / "a", [2.0]) / name
    file.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink(missing_ok=True)
        make(file)
        said = typed("list", tmp_path)
        assert re.search(rf"{name}('| cannot be read| is damaged)", said.replace("\n", ""))


def test_runs_are_found_behind_links_and_whatever_they_are_called_and_each_once(
    tmp_path, monkeypatch
):
    for name in ("frames", "store", "wandb"):
        made(tmp_path / "runs" / name, [1.0])
    made(tmp_path / "disk" / "moved", [1.0])
    for name, to in (("a-link", "store"), ("moved", "../disk/moved"), ("round", "..")):
        (tmp_path / "runs" / name).symlink_to(to)
    found = find_runs([tmp_path / "runs", tmp_path / "disk" / ".." / "runs" / "store"])
    names = [run.name for run in read_runs(found)]
    assert sorted(names) == ["frames", "moved", "store", "wandb"]
    (tmp_path / "disk" / "moved" / "evaluation").mkdir()
    monkeypatch.chdir(tmp_path / "disk" / "moved" / "evaluation")
    assert [run.name for run in read_runs(find_runs([".."]))] == ["moved"]


def status(folder, saved=None, rl=False, events=(), locked_by=None):
    """Status of a run that made 3 of 3 steps, or 3 of 4 of RL."""
    run = made(folder, [3.0, 2.0, 1.0], 3)
    if rl:
        (run / "config.json").write_text(
            json.dumps({"rl": {"steps": 4}, "trainer": {"train_steps": 3}})
        )
    if saved is not None:
        (run / "saved.json").write_text(json.dumps({"step": saved}))
    lines = [{"event": e, "step": 3, "time": 1, "seconds": {}, "start": 1} for e in events]
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if locked_by:
        (run / ".lock").write_text(json.dumps(locked_by))
    return read_runs([run])[0].status


def test_a_run_whose_last_steps_are_lost_was_interrupted_though_it_made_them(tmp_path):
    dead = {"host": socket.gethostname(), "pid": os.getpid(), "since": "", "began": 1}
    assert status(tmp_path / "a", events=["begin", "made"]) == "interrupted"
    assert status(tmp_path / "b", saved=2, events=["begin", "made"]) == "interrupted"
    assert status(tmp_path / "c", saved=3, events=["begin", "made"]) == "finished"
    assert status(tmp_path / "d", saved=3, events=["begin", "made", "end"]) == "finished"
    assert status(tmp_path / "e", saved=2, rl=True) == "interrupted"
    assert status(tmp_path / "f", saved=3, rl=True) == "stopped"
    assert status(tmp_path / "g", rl=True, locked_by=dead) == "interrupted"


@pytest.mark.parametrize(("every", "expected"), [(3, "stopped"), (4, "finished"), (0, "finished")])
def test_a_run_that_owes_its_last_evaluation_is_not_finished(tmp_path, every, expected):
    run = made(tmp_path / "a", [3.0, 2.0, 1.0], 3)
    (run / "config.json").write_text(
        json.dumps({"trainer": {"train_steps": 3, "eval_every": every, "save_every": 1}})
    )
    (run / "saved.json").write_text(json.dumps({"step": 3}))
    path = run / "metrics.jsonl"
    first = json.dumps({"step": 0, "val_loss": 2.0}) + "\n"
    path.write_text(path.read_text() + first)
    assert read_runs([run])[0].status == expected
    path.write_text(path.read_text() + json.dumps({"step": 2, "val_loss": 1.0}) + "\n")
    assert read_runs([run])[0].status == "finished"


def test_a_population_has_made_the_steps_that_it_saved(tmp_path):
    run = made(tmp_path / "a", [])
    (run / "config.json").write_text(json.dumps({"rl": {"steps": 6}}))
    (run / "saved.json").write_text(json.dumps({"step": 6}))
    assert cells(read_runs([run])[0])[3::5] == ["6/6", "finished"]


def test_what_no_evaluation_can_have_found_is_left_out(tmp_path):
    run = made(tmp_path / "a", [1.0], success=[(1, float("nan"))])
    (found,) = read_runs([run])
    assert cells(found)[6] == "–"
    assert "line 1: not a line of this log" in found.damage[0]


GOOD = {"suite": "lift", "success": {"successes": 1, "trials": 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSONDecodeError: Expecting value"),
        ("[]", "TypeError: list indices must be integers"),
        ("5", "TypeError: 'int' object is not subscriptable"),
        ("[" * 100_000, "RecursionError: "),
        ('{"suite": "lift"}', "KeyError: 'evaluations'"),
        ('{"evaluations": {}}', "StopIteration: StopIteration"),
        ('{"evaluations": [1]}', "AttributeError: 'list' object has no attribute 'values'"),
        ('{"evaluations": {"trained": {"suite": "lift"}}}', "KeyError: 'success'"),
        (
            json.dumps({"suite": 5, "evaluations": {"trained": GOOD}}),
            "ValueError: the suite is no text",
        ),
        *(
            (
                json.dumps({"evaluations": {"a": {**GOOD, "success": success}}}),
                said,
            )
            for success, said in [
                ({"successes": float("nan"), "trials": 2}, "ValueError: the counts are [nan, 2]"),
                ({"successes": "1", "trials": 2}, "ValueError: the counts are ['1', 2]"),
                ({"successes": 3, "trials": 2}, "ValueError: A success rate needs 0 <= successes"),
                ({"successes": 1, "trials": 10**400}, "OverflowError: "),
                ([1, 2], "TypeError: list indices must be integers"),
            ]
        ),
    ],
)
def test_a_damaged_evaluation_is_a_sentence_where_runs_are_listed_and_pushed(text, said, tmp_path):
    run = made(tmp_path / "a", [1.0])
    file = run / "evaluation.json"
    file.write_text(text)
    (found,) = read_runs([run])
    assert cells(found)[6] == "–"
    assert found.damage[0].startswith(f"{file}: is damaged, or not from tools.evaluate ({said}")
    assert found.damage[0].endswith("); evaluate again, or remove the file.")
    with pytest.raises(ValueError, match="is damaged, or not from tools"):
        read_rates(file)
    said = StringIO()
    assert _evaluations(run, Console(file=said, width=1000)) == {}
    assert f"warning: the card leaves out an evaluation: {file}: is damaged" in said.getvalue()
    file.write_text(json.dumps({"evaluations": {"trained": GOOD}}))
    assert read_rates(file) == ("lift", {"trained": Rate(1, 2)})
    judged = {"trained": {"success": 0.5, "episodes": 2}}
    assert _evaluations(run, Console(file=said)) == {"lift": judged}
    older = {"success": GOOD["success"]}
    file.write_text(json.dumps({"suite": "reach", "evaluations": {"trained": older}}))
    assert read_rates(file) == ("reach", {"trained": Rate(1, 2)})


def test_a_number_of_400_digits_is_a_damaged_line(tmp_path):
    run = made(tmp_path / "a", [1.0, 2.0])
    log = run / "metrics.jsonl"
    log.write_text(log.read_text() + f'{{"step": 2, "loss": 1{"0" * 400}}}\n')
    (found,) = read_runs([run])
    assert found.points("loss") == [(1, 1.0), (2, 2.0)]
    assert found.damage == [f"{log}, line 3: not a line of this log and was left out."]


def test_a_narrow_terminal_loses_no_column(tmp_path, typed, monkeypatch):
    made(tmp_path / "a", [1.0] * 3, steps=100_000)
    monkeypatch.setattr("models.files.terminal.Console.width", 40)
    said = typed("list", tmp_path)
    assert re.search(r"^a +tiny +lift +3/100,000 +1 +– +– +3 min +stopped *$", said, re.M)


def test_a_path_without_runs_is_refused_in_a_sentence(tmp_path, typed):
    for path, said in ((tmp_path, "holds no run: there is no config.json"), ("gone", "no such")):
        with pytest.raises(SystemExit) as ended:
            typed("list", path)
        assert re.fullmatch(rf"error: {path}.*{said}.*", str(ended.value.code))


def test_only_what_differs_in_the_configs_is_compared(tmp_path, typed):
    made(tmp_path / "x" / "a", [1.0])
    made(tmp_path / "y" / "a", [1.0], rate=2e-3)
    said = typed("compare", tmp_path)
    assert re.search(r"config +x/a +y/a *\noptimizer\.learning_rate +0\.001 +0\.002 *\n$", said)
    made(tmp_path / "z", [2.0])
    assert differences(read_runs([tmp_path / "x" / "a", tmp_path / "z"])) == {}
    earlier = (tmp_path / "z" / "config.json").read_text().replace("train_steps", "steps")
    (tmp_path / "z" / "config.json").write_text(earlier)
    runs = read_runs([tmp_path / "x" / "a", tmp_path / "z"])
    assert [run.steps for run in runs] == [100, 100]
    assert differences(runs) == {}, "steps of the trainer have another name now"


def test_the_page_escapes_names_and_needs_no_network_and_no_script(tmp_path):
    run = made(tmp_path / HOSTILE, [1.0, 2.0], data=HOSTILE, held_out=[(2, 1.0)])
    (run / "config.json").write_text(json.dumps({HOSTILE: HOSTILE, "trainer": {"train_steps": 2}}))
    filmed(run, [1])
    text = page(run, made(tmp_path / "b", [float("inf")], success=[(1, 0.5)]))
    found = Page(text)
    assert found.text.count(HOSTILE) >= 5
    assert not found.all("script") + found.all("img") + found.all("link") + found.all("iframe")
    assert all(one["src"].startswith("data:video/mp4;") for one in found.all("video"))
    assert "http" not in re.sub('data:[^"]+', "", text).replace('http-equiv="refresh"', "")
    assert [one["id"] for one in found.all("input")] == ["run0", "run1"]


def test_names_that_are_no_utf8_do_not_keep_the_page_from_being_written(tmp_path):
    run = made(tmp_path / os.fsdecode(b"a\xff"), [1.0], success=[(1, 0.5)])
    row = {"step": 1, "loss": 1.0, "\ud800": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert "a\\udcff: 1 at step 2" in page(run, metrics=("*",)).encode().decode()


def test_a_metric_that_no_run_has_is_told_with_those_that_there_are(tmp_path):
    text = page(made(tmp_path / "a", [1.0]), metrics=("los", "loss", "val_*"))
    assert "No run has los yet; available: loss, step_seconds." in text


def test_films_that_pass_at_different_rates_last_as_long_as_they_did(tmp_path):
    frames = np.full((10, 32, 32, 3), np.arange(0, 250, 25)[:, None, None, None], np.uint8)
    movies = [b64encode(encode(frames, fps)).decode() for fps in (5, 20)]
    films = [Film("", "", "", True, "", f"data:video/mp4;base64,{one}", "") for one in movies]
    write_sheet(tmp_path / "new" / "sheet.any", films, 40, 50)
    with Image.open(tmp_path / "new" / "sheet.any") as picture:
        assert picture.format == "WEBP"
        durations = []
        for i in range(picture.n_frames):
            picture.seek(i)
            picture.load()
            durations.append(picture.info["duration"])
    assert sum(durations) == pytest.approx(3000), "two seconds of the slow one, and one at rest"


@pytest.mark.parametrize("wrong", [("--edge", 5), ("--quality", 101)])
def test_a_film_that_cannot_be_drawn_so_is_refused_by_its_option(tmp_path, typed, wrong):
    filmed(made(tmp_path / "a", [1.0]), [1])
    with pytest.raises(SystemExit, match=rf"error: {wrong[0]} is {wrong[1]}; expected a whole"):
        typed("film", tmp_path, "--out", tmp_path / "sheet.webp", *wrong)


def test_films_of_the_same_start_stand_side_by_side(tmp_path):
    a, b = made(tmp_path / "a", [1.0]), made(tmp_path / "b", [1.0])
    filmed(a, [1, 2])
    filmed(b, [2, 3])
    text = page(a, b).partition("<h2>Films</h2>")[2]
    rows = [Page(f"<table>{row}</table>") for row in re.findall("<tr>.*?</tr>", text, re.S)[1:]]
    assert [row.text.split("seed ")[1].split()[0] for row in rows] == ["2", "1", "3"]
    assert [len(row.all("video")) for row in rows] == [2, 1, 1]
    assert "✓ success" in rows[0].text
    assert "✗ failure" in rows[1].text


def test_a_report_of_somebody_else_brings_nothing_but_films(tmp_path):
    run = made(tmp_path / "a", [1.0])
    (run / "evil").mkdir()
    clip = '<figure class="clip"><video src="{}" poster="javascript:1"></video><figcaption>x'
    films = [clip.format(url) for url in ("https://a/b.mp4", 'data:video/mp4;base64,AA=="onload="')]
    films.append(clip.format("data:video/mp4;base64,AAAA") + "<script>alert(1)</script></figure>")
    text = '<div class="clips">' + "</figcaption></figure>".join(films) + "</div></p></b>"
    (run / "evil" / "report.html").write_text(text)
    found = Page(page(run))
    assert [one["src"] for one in found.all("video")] == ["data:video/mp4;base64,AAAA"]
    assert not found.all("script")
    assert "poster" not in found.all("video")[0]


def test_films_move_side_by_side_until_the_longest_has_ended(tmp_path, typed):
    run, out = made(tmp_path / "a", [1.0]), tmp_path / "sheet.webp"
    filmed(run, range(1, 8))
    assert "7 films" in typed("film", run, "--out", out, "--edge", 40)
    with Image.open(out) as picture:
        assert picture.size == (6 * 40, 2 * 40)
        assert picture.n_frames >= 2
        red, green, empty = map(picture.convert("RGB").getpixel, [(1, 20), (41, 20), (60, 60)])
    assert red[0] > 150 > red[1], "seed 1 failed"
    assert green[1] > 120 > green[0], "seed 2 succeeded"
    assert min(empty) > 245


def test_without_films_none_are_drawn(tmp_path, typed):
    run, out = made(tmp_path / "a", [1.0]), tmp_path / "sheet.webp"
    with pytest.raises(SystemExit, match=r"There are no films in .*a; `python -m tools.evaluate"):
        typed("film", run, "--out", out)
    assert not out.exists()


def test_a_film_that_cannot_be_decoded_is_refused(tmp_path, typed):
    run, out = made(tmp_path / "a", [1.0]), tmp_path / "sheet.webp"
    filmed(run, [1])
    report = run / "evaluation" / "report.html"
    report.write_text(re.sub('video/mp4;base64,[^"]*', "video/mp4;base64,AAAA", report.read_text()))
    with pytest.raises(SystemExit, match="cannot be decoded"):
        typed("film", run, "--out", out)
    assert not out.exists()


def test_a_page_is_written_again_until_the_run_is_over(tmp_path, typed, monkeypatch):
    run, out = made(tmp_path / "a", [2.0, 1.0], 3), tmp_path / "page.html"
    pages = []
    with locked(run, Console(quiet=True)):
        lock = (run / ".lock").read_bytes()

    def ended(seconds):
        pages.append(out.read_text())
        (run / ".lock").unlink()

    (run / ".lock").write_bytes(lock)
    monkeypatch.setattr("time.sleep", ended)
    assert "No run is in progress" in typed("plot", run, "--out", out, "--watch")
    assert [
        [one for one in Page(text).all("meta") if one.get("http-equiv") == "refresh"]
        for text in (*pages, out.read_text())
    ] == [[{"http-equiv": "refresh", "content": "5"}], []]
    assert str(os.getpid()) in lock.decode()


@needs_browser
def test_a_browser_draws_it_from_the_disk(tmp_path):
    run = made(tmp_path / "a", [2.0, 1.0, 0.5], success=[(1, 0.2), (3, 0.9)])
    out = tmp_path / "page.html"
    out.write_text(page(run))
    drawn = shown(out, tmp_path)
    assert drawn.count("<polyline") == 2
    assert "success on held-out starts" in drawn
