"""Names and templates of a dataset lead to files inside it, or are refused before any is opened."""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import fsspec
import numpy as np
import pytest

from data import open_dataset
from data.dataset import Runs
from data.errors import DatasetError
from data.files.folder import LocalFolder, open_folder
from data.files.names import file_within, fill, pattern, plain_name
from data.mixture.mixture import DatasetConfig, Known, Mixture, RobotConfig, resolve
from data.store import convert, tables
from data.store.convert import checksum
from data.store.store import build_store, open_store
from data.validation.validate import validate
from tests.helpers.data.fake_hub import REPOSITORY, fake_hub
from tests.helpers.data.recording import FEATURES, FRONT, WRIST, Episode
from tests.helpers.data.v21 import write_v21

OUTSIDE = (
    "../secret", "data/../../secret", "/etc/passwd", "", ".", "data//a", "data/./a", "data/",
    "..\\secret", "C:/secret", "c:secret", "a\x00b", "a\nb", "a\x1b[31m", "a\ud800", "x" * 231,
    "y/" * 600 + "y",
)  # fmt: skip
TEMPLATES = (
    "data/{episode_index:>500000000}", "data/{episode_index:0500d}", "{episode_index.__class__}",
    "{episode_index[0]}", "data/{episode_index!r}", "data/{episode_index:{episode_chunk}}", "{}",
    "{0}", "{robot}", "data/{episode_index", "data/*{episode_index}", "../{episode_index}",
    "/{episode_index}", "{video_key:>200}", "{video_key:s}", "{episode_index:e}",
    "{episode_index:,}", 7, None, ["{episode_index}"], "x" * 2000,
)  # fmt: skip
VALUES = {"episode_chunk": 0, "episode_index": 12, "video_key": "observation.images.front"}


def test_templates_that_lerobot_writes_are_filled() -> None:
    template = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    expected = "videos/chunk-000/observation.images.front/episode_000012.mp4"
    assert fill(template, **VALUES) == template.format(**VALUES) == expected
    kinds = {field: type(value) for field, value in VALUES.items()}
    assert pattern(template, **kinds) == "videos/chunk-*/*/episode_*.mp4"
    assert fill("{episode_index}-{episode_index:4d}", episode_index=12) == "12-  12"


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_with_other_fields_widths_or_places_are_refused(template: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        fill(template, **VALUES)


@pytest.mark.parametrize("name", ["action", "observation.images.front", "größe", "a b", "x" * 200])
def test_names_that_datasets_have_are_plain(name: str) -> None:
    assert plain_name(name) == name
    assert file_within(f"columns/{name}/c/0/0") == f"columns/{name}/c/0/0"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "a..b", "../x", "a\x00", "é" * 101, "a\x9bm", 7, None]
)
def test_names_that_could_be_paths_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="cannot be used as a file name"):
        plain_name(name)


@pytest.fixture(params=["disk", "bucket", "hub"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A folder of one file in a folder that holds a secret."""
    (tmp_path / "top/set/data").mkdir(parents=True)
    (tmp_path / "top/set/data/a").write_bytes(b"a")
    (tmp_path / "top/secret").write_bytes(b"secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "disk":
        yield str(tmp_path / "top/set")
    elif request.param == "bucket":
        memory = fsspec.filesystem("memory")
        memory.pipe({"/top/set/data/a": b"a", "/top/secret": b"secret"})
        yield "memory://top/set"
        memory.store.clear()
    else:
        with fake_hub(tmp_path / "top/set", tmp_path / "hub", monkeypatch):
            yield f"hf://{REPOSITORY}"


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_folder_is_left_by_a_name(url: str, name: str, tmp_path: Path) -> None:
    folder = open_folder(url)
    assert folder.local("data/a").read_bytes() == b"a"
    put = partial(folder.put, tmp_path / "top/secret")
    for use in (folder.exists, folder.list, folder.size, folder.local, folder.path, put):
        if use is put and url.startswith("hf://"):
            continue
        with pytest.raises(
            DatasetError, match=r"name .*: .* is not the name of a file inside"
        ) as error:
            use(name)
        assert str(error.value).startswith(url)
        assert str(error.value).isprintable()


CACHE = ("cache", "chiliad", "files")


def everything_outside(tmp_path: Path) -> set[str]:
    """All files but those of the server and those where a cache may have them."""
    found = (path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    return {str(p) for p in found if p.parts[0] != "served" and p.parts[:3] != CACHE}


@pytest.fixture
def served(tmp_path: Path, episodes: list[Episode], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A v2.1 dataset, deep below a file that Python would run at its next start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = write_v21(tmp_path / "served/a/b/c/d/e/set", episodes[:2], FEATURES, 20)
    return root


def poison(root: Path, field: str, template: str) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | {field: template}))


POISON = "../../../../victim_{episode_index:06d}.pth"


@pytest.mark.parametrize("field", ["data_path", "video_path"])
def test_a_dataset_of_a_server_writes_nothing_outside_the_cache(
    served: Path, tmp_path: Path, field: str
) -> None:
    poison(served, field, POISON)
    for up in served.parents[:5]:
        shutil.copy(served / "meta/info.json", up / "victim_000000.pth")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = partial(quiet, directory=str(tmp_path / "served"))
    before = everything_outside(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, http_without_aiohttp():
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a/b/c/d/e/set"
        problems = validate(url)
        server.shutdown()
    assert everything_outside(tmp_path) == before
    assert not list((tmp_path / "cache").rglob("victim*"))
    (problem, *_) = [problem for problem in problems if problem.field == field]
    assert problem.file == f"{url}/meta/info.json"
    assert POISON in problem.message


@pytest.mark.parametrize("field", ["data_path", "video_path"])
def test_a_dataset_of_a_bucket_writes_nothing_outside_the_cache(
    served: Path, tmp_path: Path, field: str
) -> None:
    poison(served, field, POISON)
    memory = fsspec.filesystem("memory")
    for path in (path for path in served.rglob("*") if path.is_file()):
        memory.pipe(f"/bucket/set/{path.relative_to(served)}", path.read_bytes())
    for number in range(2):
        memory.store[f"/bucket/set/../../../../victim_{number:06d}.pth"] = memory.open(
            "/bucket/set/meta/info.json"
        )
    before = everything_outside(tmp_path)
    try:
        fields = {p.field for p in validate("memory://bucket/set") if p.severity == "error"}
    finally:
        memory.store.clear()
    assert everything_outside(tmp_path) == before
    assert not list((tmp_path / "cache").rglob("victim*"))
    assert field in fields


@contextmanager
def http_without_aiohttp() -> Iterator[None]:
    """fsspec's HTTP on requests, as aiohttp is not among the packages of the tests."""
    usual = "fsspec.implementations.http.HTTPFileSystem"
    fsspec.register_implementation("http", usual.replace("http.", "http_sync."), clobber=True)
    try:
        yield
    finally:
        fsspec.register_implementation("http", usual, clobber=True)


def test_a_template_that_leads_out_of_a_local_dataset_is_refused(
    served: Path, tmp_path: Path
) -> None:
    for file in served.rglob("episode_00000*.parquet"):
        shutil.copy(file, served.parent / file.name)
    poison(served, "data_path", "../episode_{episode_index:06d}.parquet")
    with pytest.raises(DatasetError, match=r"meta/info\.json, data_path: is '\.\./episode"):
        open_dataset(served).column("action")


def test_a_symbolic_link_inside_a_local_dataset_is_its_owners_choice(
    served: Path, tmp_path: Path
) -> None:
    shutil.move(served / "data", tmp_path / "elsewhere")
    (served / "data").symlink_to(tmp_path / "elsewhere")
    assert open_dataset(served).column("action").shape == (19, 3)
    assert LocalFolder(served).exists("data/chunk-000/episode_000000.parquet")
    assert FRONT in open_dataset(served).cameras


RLDS = Path(__file__).parents[2] / "fixtures/rlds/tfrecord"
HOSTILE = ("../../../x", "a/b", "..", "a\\b", "a\x1bb", "", "é" * 101)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_feature_whose_name_could_be_a_path_is_refused_at_opening(copy: Path, name: str) -> None:
    info = copy / "meta/info.json"
    edit(info, lambda told: told["features"].update({name: told["features"]["action"]}))
    (problem,) = validate(copy)
    assert (problem.file, problem.field) == (str(info), "features")
    assert "cannot be used as a file name" in problem.message
    with pytest.raises(DatasetError, match="rename it"):
        open_dataset(copy)


@pytest.mark.parametrize("name", [n for n in HOSTILE if n])
def test_a_robot_whose_name_could_be_a_path_is_refused_at_opening(copy: Path, name: str) -> None:
    edit(copy / "meta/info.json", lambda info: info.update(robot_type=name))
    (problem,) = validate(copy)
    assert problem.field == "robot_type"
    with pytest.raises(DatasetError, match="cannot be used as a file name"):
        open_dataset(copy)


@pytest.mark.parametrize("name", ["../../../x", "a\\b", "a\x00b", "é" * 101, "observation/pose"])
def test_an_rlds_feature_whose_name_could_be_a_path_is_refused(tmp_path: Path, name: str) -> None:
    root = shutil.copytree(RLDS, tmp_path / "robot/1.0.0")
    edit(root / "features.json", lambda told: add_step_feature(told, name))
    with pytest.raises(
        DatasetError, match=r"features\.json, file: .*(cannot be used as|both called)"
    ):
        open_dataset(root)


def test_a_slash_in_an_rlds_name_is_a_dot_of_the_columns_name(tmp_path: Path) -> None:
    root = shutil.copytree(RLDS, tmp_path / "robot/1.0.0")
    edit(root / "features.json", lambda told: add_step_feature(told, "nested/name"))
    assert "nested.name" in open_dataset(root).column_names


def add_step_feature(told: Any, name: str) -> None:
    steps = told["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]
    steps["features"][name] = steps["features"]["action"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("filepathTemplate", "../{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"),
        ("filepathTemplate", "/etc/{DATASET}"),
        ("filepathTemplate", "{DATASET:>500000000}"),
        ("filepathTemplate", "{DATASET.__class__}"),
        ("filepathTemplate", "{NOTHING}"),
        ("name", "../../robot"),
        ("fileFormat", ["tfrecord"]),
        ("fileFormat", "/../../tfrecord"),
    ],
)
def test_an_rlds_template_that_leads_elsewhere_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    root = shutil.copytree(RLDS, tmp_path / "robot/1.0.0")

    def poisoned(info: Any) -> None:
        (info if field != "filepathTemplate" else info["splits"][0])[field] = value

    edit(root / "dataset_info.json", poisoned)
    with pytest.raises(DatasetError, match=r"dataset_info\.json, .*(do not use this|download it) "):
        open_dataset(root).digest  # noqa: B018


@pytest.fixture(scope="module")
def store(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s"
    build_store(open_dataset(recorded), path, 16, "raw")
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"cameras": ["../../../../victim/frames/x", WRIST]},
        {"columns": {"../../../x": 4}},
        {"name": "../robot"},
        {"cameras": None},
        {"columns": [[]]},
    ],
)
def test_a_foreign_frame_store_whose_names_could_be_paths_is_refused(
    store: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    root = shutil.copytree(store, tmp_path / "s")
    described = json.loads((root / "store.json").read_text()) | changes
    described["sum"] = checksum(described)
    (root / "store.json").write_text(json.dumps(described))
    with pytest.raises(DatasetError, match=rf"store\.json, {next(iter(changes))}: "):
        open_store(root)


def test_a_list_of_files_that_leads_out_of_a_store_is_refused(store: Path, tmp_path: Path) -> None:
    root = shutil.copytree(store, tmp_path / "s")
    (tmp_path / "secret").write_bytes(b"secret")
    files = json.loads((root / "files.json").read_text()) | {"../secret": [6, "0" * 64]}
    (root / "files.json").write_text(json.dumps(files))
    described = json.loads((root / "store.json").read_text())
    described["files"] = hashlib.sha256((root / "files.json").read_bytes()).hexdigest()
    described["sum"] = checksum(described)
    (root / "store.json").write_text(json.dumps(described))
    with pytest.raises(DatasetError, match=r"files\.json, files: '\.\./secret' is not the name"):
        open_store(root)


class Stub:
    """A dataset object that no reader checked."""

    root, name, digest, fps = "stub", "stub", "0" * 64, 10
    lengths, present = np.array([2]), np.ones((1, 1), bool)
    num_frames, prompts = 2, (("push",),)
    runs = Runs(*np.array([[0], [0], [2], [0]]))

    def __init__(self, name: str) -> None:
        self.cameras, self.column_names = (name,), (name,)
        self.features = {name: {"dtype": "float32", "shape": [1]}}

    def frames(self, i: int, camera: str) -> np.ndarray:
        return np.zeros((2, 8, 8, 3), np.uint8)

    def stream(self, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
        yield {name: np.zeros((2, 1), np.float32) for name in names}


def test_shard_files_and_columns_are_only_written_inside_their_folder(tmp_path: Path) -> None:
    dataset: Any = Stub("../../../../victim")
    folder, settings = LocalFolder(tmp_path / "a/b/c/store"), convert.Settings(8, "raw")
    folder.root.mkdir(parents=True)
    making = convert.PartMaking(dataset, settings, folder)
    for part in convert.parts_of(dataset, settings):
        with pytest.raises(ValueError, match="is not the name of a file inside"):
            making(part, lambda _: None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not list(tmp_path.rglob("victim*"))


def test_a_columns_name_is_no_part_of_a_url(tmp_path: Path) -> None:
    """Tensorstore decodes `%2e%2e%2f` where it is given a file's URL."""
    name = "%2e%2e%2f%2e%2e%2fvictim?#"
    (tmp_path / "store").mkdir()
    tables.write(cast(Any, Stub(name)), tmp_path / "store")
    assert {path.name for path in tmp_path.iterdir()} == {"store"}
    assert (tmp_path / "store/columns" / name / "zarr.json").is_file()


@pytest.mark.parametrize("name", ["../robot", "a\x1b]0;b", "/robot", "x" * 300])
def test_a_robots_name_that_could_be_a_path_is_refused(name: str) -> None:
    known = [Known("set", 10, ("front",), {"observation.state": 2, "action": 2}, 1, (("push",),))]
    for mixture in (
        Mixture((DatasetConfig("d", name),), (RobotConfig(name),)),
        Mixture((DatasetConfig("d"),), (RobotConfig("robot", (name,)),)),
    ):
        with pytest.raises(
            ValueError, match=r"embodiment .*: .* (cannot be used as|is not the name of)"
        ):
            resolve(mixture, known, 4)


def test_a_hub_repository_names_its_robot() -> None:
    known = Known("org/set", 10, ("front",), {"observation.state": 2, "action": 2}, 1, (("",),))
    (robot,), _ = resolve(Mixture((DatasetConfig("hf://org/set"),)), [known], 4)
    assert robot.name == "org/set"
