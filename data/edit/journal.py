"""Journal of a dataset that is being written: a line of JSON for each finished file, so that
interrupted work resumes after them.
"""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

_WHOLE = "whole"


class FileJournal:
    """The journal at `path`: for each track (a camera, or the rows) the finished files, each with
    its entries, one for every episode in it. An incomplete last line of a killed process is
    dropped.

    Use as a context manager: no other process can hold the journal within the block. If the block
    fails before any file is finished, the folder is removed, unless a folder in it has a journal.

    Raises:
      ValueError: the journal was begun for something other than `about`, a line is damaged, its
        folder holds files but no journal, or another process holds it.
    """

    def __init__(self, path: Path, about: Any) -> None:
        if not path.exists() and path.parent.exists() and any(path.parent.iterdir()):
            raise ValueError(
                f"{path.parent}: is in the way and has files but no journal of an edit; rename or "
                "delete it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lines = path, list[dict[str, Any]]()
        self._held = path.open("ab")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(about)
        except BlockingIOError:
            self._held.close()
            raise ValueError(
                f"{path.parent}: another process is making this edit; wait until it ends."
            ) from None
        except BaseException:
            self._held.close()
            if b"\n" not in path.read_bytes():  # the disk had no room even for this
                shutil.rmtree(path.parent, ignore_errors=True)
            raise

    def __enter__(self) -> "FileJournal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        folder, name = self._path.parent, self._path.name
        if kind is not None and not self._lines and not any(folder.glob(f"*/{name}")):
            shutil.rmtree(folder, ignore_errors=True)
        self._held.close()

    def _begin(self, about: Any) -> None:
        path = self._path
        about = json.loads(json.dumps(about))
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: is damaged ({error}); delete the folder.") from None
        if lines and lines[0] != about:
            raise ValueError(
                f"{path.parent}: holds another unfinished edit; finish it with that command, or "
                "rename or delete the folder."
            )
        self._lines = lines[1:]
        with path.open("wb") as file:
            file.write(whole or _line(about))

    @staticmethod
    def header(path: Path) -> Any:
        """The first line of a journal, parsed for comparison; None if it is damaged."""
        try:
            return json.loads(path.read_bytes().partition(b"\n")[0])
        except (ValueError, RecursionError):
            return None

    @property
    def is_whole(self) -> bool:
        """True after `finish`."""
        return any(line["track"] == _WHOLE for line in self._lines)

    def finish(self) -> None:
        """Records that nothing is left to do."""
        self.add(_WHOLE, (0, 0), [])

    def entries(self, track: str) -> list[dict[str, Any]]:
        """Entries of a track's finished files, in order."""
        return [e for line in self._lines if line["track"] == track for e in line["entries"]]

    def place(self, track: str) -> tuple[int, int]:
        """Chunk and number of a track's last finished file, (0, -1) if there is none."""
        found = [line["place"] for line in self._lines if line["track"] == track]
        return (found[-1][0], found[-1][1]) if found else (0, -1)

    def add(self, track: str, place: tuple[int, int], entries: list[dict[str, Any]]) -> None:
        """Records one more finished file."""
        line = {"track": track, "place": place, "entries": entries}
        with self._path.open("ab") as file:
            file.write(_line(line))
        self._lines.append(json.loads(json.dumps(line)))


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
