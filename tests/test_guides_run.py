"""Commands of README.md and docs/ run, at a test's size, in a folder with the datasets, runs and
checkpoints that they name."""

import re

import pytest

from models import model
from tests.helpers.guides import python, running, world
from tests.helpers.guides.pages import (
    PAGES,
    ROOT,
    blocks,
    commands,
    forget_families,
    own_files,
)
from tests.helpers.guides.shrink import STAGE, shrunk
from tests.helpers.mappings import give_programs_up
from tests.helpers.models.buckets import s3_bucket
from tests.helpers.models.hub import writable_hub

pytestmark = pytest.mark.slow

NOT_RUN = {
    "tools.bench": "minutes of measuring; tests/tools/bench runs each benchmark shrunk",
    "tools.demo": "minutes; tests/e2e/test_demo.py runs it shrunk",
    "--ray": "a cluster; tests/data/lake, tests/tools/datasets/test_lake.py and tests/rl have one",
    "--track": "accounts of others; tests/parallel/trackers has the real libraries offline",
    "mpirun": "needs MPI; tests/parallel/hosts reads its settings",
    "--inject kill": "a minute of restarts; tests/parallel/hosts/test_faults.py has each fault",
    "--num-processes 2": "two machines; tests/parallel/hosts/test_distributed.py has two processes",
    "tools.plan --compile": "NVIDIA's compiler, minutes; tests/parallel/planning calls it",
    "--layout rlds": "a set with all its cameras; test_rlds_folders.py of the importers has one",
    "catalogue --of": "one catalogued in its place; tests/data/lake/test_catalogue.py asks",
    "path/to/line.py": "a form; the same page runs line.py",
    **dict.fromkeys(
        ("--preset act", "--preset diffusion"),
        "sizes of a robot that is not here; tests/tools/test_families.py trains each family",
    ),
    "chiliad|openpi": "a form; each of its commands stands elsewhere",
}
"""Parts of commands that are not run here, each with the reason."""


def found() -> dict[str, tuple[str, list[str]]]:
    """Commands as they run, with the first form of each and the places that say it."""
    said: dict[str, tuple[str, list[str]]] = {}
    for page in PAGES:
        for command in joined(commands(page)):
            if not any(part in command for part in NOT_RUN):
                run = shrunk(command)
                _, places = said.setdefault(world.kind(run), (run, []))
                places.append(f"{page.relative_to(ROOT)}: {command}")
    return said


def joined(said: list[str]) -> list[str]:
    """Commands, those that `tools.launch` starts behind it."""
    pairs = zip(said, ["", *said], strict=False)
    return [
        f"{before} -- {command}" if ".launch" in before else command
        for command, before in pairs
        if ".launch" not in command
    ]


RUN = found()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guides")
    with (
        pytest.MonkeyPatch.context() as patch,
        running.little(),
        s3_bucket("bucket", patch),
        writable_hub(folder / "hub", patch) as hub,
    ):
        ours = {name: known for name, known in model._FAMILIES.items() if model.is_ours(name)}
        patch.setattr(model, "_FAMILIES", ours)  # not what other tests of this process defined
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'client'}")
        patch.setenv("CHILIAD_CATALOGUE", str(folder / "catalogue"))
        patch.setenv("COLUMNS", "200")
        world.build(folder, own_files(), running.run, hub)
        yield folder
    forget_families(folder)


@pytest.fixture(autouse=True)
def little_is_kept():
    """Asks after each: the programs of all commands are more than a process may map."""
    yield
    give_programs_up()


@pytest.mark.parametrize("kind", RUN, ids=lambda kind: kind[16:].replace(f"{STAGE}:", "")[:70])
def test_a_command_runs(kind, folder, tmp_path, monkeypatch):
    command, places = RUN[kind]
    monkeypatch.chdir(tmp_path)
    world.copy(folder, command, tmp_path)
    try:
        running.run(command)
    except running.Failed as failed:
        pytest.fail("\n".join([*places, f"run as: {command}", str(failed)]), pytrace=False)


@pytest.mark.parametrize("page", python.GIVEN)
def test_the_python_of_a_page_runs(page, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = [python.shrunk(text) for language, text in blocks(ROOT / page) if language == "python"]
    world.copy(folder, "\n".join(shown), tmp_path)
    names = dict(python.GIVEN[page])
    for block in shown:
        exec(compile(block, page, "exec"), names)


def test_every_page_with_python_is_listed_once():
    pages = [
        str(page.relative_to(ROOT))
        for page in PAGES
        if any(
            language == "python" and not re.match(r" *# \w+\.py\n", text)
            for language, text in blocks(page)
        )
    ]
    assert sorted(pages) == sorted([*python.GIVEN, *python.ELSEWHERE, *python.NOT_RUN])
    for said in [*python.ELSEWHERE.values(), *python.NOT_RUN.values(), *NOT_RUN.values()]:
        for test in re.findall(r"tests/[\w/]+(?:\.py)?", said):
            assert (ROOT / test).exists(), test


def test_every_command_that_is_not_run_is_there():
    said = [command for page in PAGES for command in joined(commands(page))]
    assert [part for part in NOT_RUN if not any(part in command for command in said)] == []
