"""Damaged datasets and stores give a clear error or the right data: no crash, hang or wrong frame.

Damage within the bytes of a picture or a number can make another picture or number that is as good,
and only checksums tell; so that sort must be found by validation where a dataset has them
(`meta/checksums.json`), and is all that may go unnoticed where it has none.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import open_dataset
from data.files.checksums import CHECKSUMS, write_checksums
from data.store.store import build_store
from tests.helpers.data.judge import Judges
from tests.helpers.data.recording import FEATURES, Episode
from tests.helpers.data.v21 import write_v21

FIXTURES = Path(__file__).parents[2] / "fixtures"
SUBJECTS = {
    "recorded": "lerobot/chiliad",
    "h264": "lerobot/lerobot_h264",
    "av1": "lerobot/lerobot_av1",
    "png": "lerobot/lerobot_png",
    "v2.1": "",
    "tfrecord": "rlds/tfrecord",
    "array_record": "rlds/array_record",
    "store": "",
    "raw store": "",
}
FEW, MANY = 24, 400

WITHIN_CONTENT = re.compile(
    r"\.(mp4|parquet|jsonl?): (flip_bits|zero_block|splice_block|insert_block|drop_block)"
    r"|\.(mp4|parquet): (swap|overwrite) "
    r"|change_\w+ .*\btasks?(/\d+)? to '"
)
"""Damage that LeRobot's formats have nothing to tell by: other bytes within a file that is still a
file of its kind, another file of the kind in its place, another instruction."""


@pytest.fixture(scope="module")
def judges() -> Iterator[Judges]:
    with Judges(workers=2) as judges:
        yield judges


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path: Path, episodes: list[Episode]) -> Path:
    root = tmp_path / "subject"
    if request.param == "v2.1":
        return write_v21(root, episodes[:4], FEATURES, 20)
    if request.param.endswith("store"):
        encoding = "raw" if request.param == "raw store" else "jpeg"
        build_store(open_dataset(FIXTURES / "lerobot/chiliad"), root, 32, encoding)
        return root
    return Path(shutil.copytree(FIXTURES / SUBJECTS[request.param], root))


def check(judges: Judges, subject: Path, seeds: range) -> None:
    with_checksums = not (subject / "meta").is_dir() or (subject / CHECKSUMS).is_file()
    verdicts = judges.judge(subject, seeds)
    bad = [
        verdict
        for verdict in verdicts
        if verdict.outcome in ("crash", "hang", "unclear")
        or (
            verdict.outcome == "wrong"
            and (with_checksums or not WITHIN_CONTENT.search(verdict.mutation))
        )
    ]
    assert len(verdicts) == len(seeds)
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.slow
def test_a_damaged_dataset_gives_an_error_or_the_right_data(judges: Judges, subject: Path) -> None:
    check(judges, subject, range(FEW))


@pytest.mark.fuzz
def test_two_thousand_damages_give_an_error_or_the_right_data(
    judges: Judges, subject: Path
) -> None:
    check(judges, subject, range(FEW, FEW + MANY))


@pytest.mark.fuzz
@pytest.mark.parametrize("subject", ["h264", "v2.1"], indirect=True)
def test_with_checksums_no_damage_goes_unnoticed(judges: Judges, subject: Path) -> None:
    write_checksums(subject)
    check(judges, subject, range(MANY))
