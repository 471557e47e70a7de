"""The house keeps its shape: imports point down, rooms close no circle, folders stay small, and a
file beside the commands is a command."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.arrows import ARROWS

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("sim/simulators/", "tools/bench/peers/")
"""Scripts that run in environments of their own."""
MOST = 17
"""Entries of a folder, besides its `__init__.py` and `__main__.py`."""
MOST_COMMANDS = 22


@cache
def imports() -> dict[str, set[str]]:
    """Modules of the tree by name, each with those of the tree that it imports."""
    files = {_name(path): path for package in ARROWS for path in (ROOT / package).rglob("*.py")}
    files = {
        name: path
        for name, path in files.items()
        if not path.relative_to(ROOT).as_posix().startswith(ELSEWHERE)
    }
    return {name: set(_imported(path, files.keys())) for name, path in files.items()}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, known: object) -> Iterator[str]:
    modules = set(known)  # type: ignore[call-overload]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules or node.module in modules:
                    yield whole if whole in modules else node.module


def rooms() -> dict[str, set[str]]:
    """Files and folders right under a package, each with the rooms that it imports."""
    graph: dict[str, set[str]] = {}
    for name, targets in imports().items():
        if name.count("."):
            wanted = {_room(target) for target in targets if target.count(".")}
            graph.setdefault(_room(name), set()).update(wanted - {_room(name)})
    return graph


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that no order of the graph can place: those in or above a circle."""
    left = dict(graph)
    while free := [node for node, targets in left.items() if not targets & left.keys()]:
        for node in free:
            del left[node]
    return sorted(left)


@pytest.mark.parametrize("package", ARROWS)
def test_imports_of_a_package_point_down(package: str) -> None:
    mine = {n: t for n, t in imports().items() if n.split(".")[0] == package}
    assert mine
    allowed = {package, *ARROWS[package]}
    wrong = {
        f"{name} imports {target}"
        for name, targets in mine.items()
        for target in targets
        if target.split(".")[0] not in allowed
    }
    assert not wrong


def test_rooms_close_no_circle() -> None:
    assert len(rooms()) > 90
    assert not circle(rooms())


def test_a_circle_would_be_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_folders_stay_small() -> None:
    for package in ARROWS:
        for folder in [ROOT / package, *(ROOT / package).rglob("*/")]:
            if folder.is_dir() and folder.name != "__pycache__":
                entries = [x for x in folder.iterdir() if x.name not in _UNCOUNTED]
                most = MOST_COMMANDS if folder == ROOT / "tools" else MOST
                assert len(entries) <= most, f"{folder.relative_to(ROOT)} has {len(entries)}"


_UNCOUNTED = ("__init__.py", "__main__.py", "__pycache__")


def test_files_beside_the_commands_are_commands() -> None:
    for path in (ROOT / "tools").glob("*.py"):
        if path.name != "__init__.py":
            assert '__name__ == "__main__"' in path.read_text(), f"{path.name} is no command"


def test_a_public_class_name_stands_once() -> None:
    places: dict[str, list[str]] = {}
    for package in ARROWS:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not (name := path.relative_to(ROOT).as_posix()).startswith(ELSEWHERE):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        places.setdefault(node.name, []).append(name)
    assert len(places) > 300
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_tests_share_helpers_and_nothing_of_each_other():
    """A file may name itself, in a program that it writes."""
    borrowed = []
    for path in (ROOT / "tests").rglob("*.py"):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("tests.") and module != own:
                last = module.rpartition(".")[2]
                if last == "conftest" or last.startswith("test_"):
                    borrowed.append(f"{own} imports {module}")
    assert not borrowed
