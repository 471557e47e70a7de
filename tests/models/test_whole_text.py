"""Text files that are there as a whole or not at all."""

import resource
from pathlib import Path

import pytest

from models.files.whole_text import write_whole


def test_a_full_disk_leaves_the_file_as_it_was_and_is_named(tmp_path):
    file = tmp_path / "new/idle.json"
    write_whole(file, "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"idle\.json") as raised:
            write_whole(file, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(file)
    assert file.read_text() == "before"
    assert [path.name for path in file.parent.iterdir()] == ["idle.json"]


def test_links_and_devices_are_written_through(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "<b>ü</b>")
    assert (link.is_symlink(), target.read_text("utf-8")) == (True, "<b>ü</b>")
    with pytest.raises(OSError, match="/dev/full"):
        write_whole(Path("/dev/full"), "x")
