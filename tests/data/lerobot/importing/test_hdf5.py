"""HDF5 as ALOHA, robomimic and LIBERO write it, by h5py, becomes the same numbers and pictures."""

import io
import json
import tracemalloc
from contextlib import suppress

import h5py
import numpy as np
import pytest
from PIL import Image

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit
from data.errors import DatasetError
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.validation.validate import validate
from data.view.view import write_page

STATE, TOP = "observation.state", "observation.images.top"


def pictures(length, seed=0, height=32, width=48):
    """Smooth pictures, which a video keeps, with an edge at the left and a bright top."""
    y, x = np.mgrid[:height, :width]
    base = np.stack([40 + 2 * x, 200 - 4 * y, np.full_like(x, 60 + 10 * seed)], axis=-1)
    return np.stack([base + 2 * step for step in range(length)]).astype(np.uint8)


def aloha(path, length=6, seed=0, cameras=("top", "angle"), encode=False, size=(32, 48), **changed):
    """An episode as `record_sim_episodes.py` or, with JPEG, `record_episodes.py` writes it."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w", rdcc_nbytes=1024**2 * 2) as root:
        root.attrs["sim"] = True
        obs = root.create_group("observations")
        image = obs.create_group("images")
        for camera in cameras:
            frames = pictures(length, seed, *size)
            if encode:
                cells = [jpeg(frame) for frame in frames]
                longest = max(map(len, cells))
                padded = [np.frombuffer(c.ljust(longest, b"\0"), np.uint8) for c in cells]
                image.create_dataset(camera, data=np.stack(padded), chunks=(1, longest))
            else:
                shape = frames.shape
                made = image.create_dataset(camera, shape, dtype="uint8", chunks=(1, *shape[1:]))
                made[...] = frames
        obs.create_dataset("qpos", data=changed.get("qpos", rng.normal(size=(length, 14))))
        obs.create_dataset("qvel", data=rng.normal(size=(length, 14)))
        root.create_dataset("action", data=changed.get("action", rng.normal(size=(length, 14))))
    return path


def jpeg(frame):
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=95)
    return file.getvalue()


def libero(path, demos=3, instruction="pick the bowl"):
    """Demonstrations as LIBERO's `create_dataset.py` writes them: pictures upside down."""
    with h5py.File(path, "w") as root:
        data = root.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": instruction})
        data.attrs["macros_image_convention"] = "opengl"
        data.attrs["num_demos"] = demos
        for number in range(demos):
            length, rng = 5 + number, np.random.default_rng(number)
            demo = data.create_group(f"demo_{number}")
            obs = demo.create_group("obs")
            for name, size in (("gripper_states", 2), ("joint_states", 7), ("ee_states", 6)):
                obs.create_dataset(name, data=rng.normal(size=(length, size)))
            for name in ("agentview_rgb", "eye_in_hand_rgb"):
                obs.create_dataset(name, data=pictures(length, number)[:, ::-1, ::-1])
            demo.create_dataset("actions", data=rng.normal(size=(length, 7)))
            demo.create_dataset("dones", data=np.zeros(length, np.uint8))
            demo.attrs["num_samples"] = length
    return path


def robomimic(path, demos=12):
    with h5py.File(path, "w") as root:
        data = root.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        for number in range(demos):
            demo = data.create_group(f"demo_{number}")
            for group in ("obs", "next_obs"):
                obs = demo.create_group(group)
                obs.create_dataset("agentview_image", data=pictures(4))
                obs.create_dataset("robot0_eef_pos", data=np.full((4, 3), float(number)))
                obs.create_dataset("robot0_eef_quat", data=np.tile([0.0, 0, 0, 1], (4, 1)))
                obs.create_dataset("robot0_gripper_qpos", data=np.zeros((4, 2)))
            demo.create_dataset("actions", data=np.full((4, 7), float(number)))
            demo.attrs["num_samples"] = 4
        root.create_group("mask").create_dataset("train", data=np.array([b"demo_0", b"demo_1"]))
    return path


def read(path, out, layout="aloha", **options):
    import_dataset([path], out, read_layout(layout, **{"task": "lift it"} | options))
    return open_dataset(out)


def test_alohas_episodes_are_imported_in_the_order_of_their_numbers(tmp_path):
    for number in (2, 10, 1):
        aloha(tmp_path / f"episode_{number}.hdf5", 4 + number, number)
    found = read(tmp_path, tmp_path / "out")
    assert found.lengths.tolist() == [5, 6, 14]
    assert (found.fps, found.robot_type, found.prompts) == (50, "aloha", (("lift it",),))
    assert found.cameras == ("observation.images.angle", TOP)
    with h5py.File(tmp_path / "episode_2.hdf5") as root:
        columns = found.columns(1)
        assert np.array_equal(columns[STATE], root["observations/qpos"][:].astype(np.float32))
        assert np.array_equal(columns["action"], root["action"][:].astype(np.float32))
        seen = found.frames(1, TOP).astype(int) - root["observations/images/top"][:]
    assert np.abs(seen).mean() < 4
    assert not validate(tmp_path / "out")


def test_pictures_in_padded_jpeg_are_decoded(tmp_path):
    found = read(aloha(tmp_path / "episode_0.hdf5", encode=True), tmp_path / "out")
    seen = found.frames(0, TOP).astype(int) - pictures(6)
    assert np.abs(seen).mean() < 5


def test_liberos_demonstrations_stand_upright_and_are_called_as_their_file(tmp_path):
    path = libero(tmp_path / "KITCHEN_SCENE3_turn_on_the_stove_demo.hdf5")
    import_dataset([path], tmp_path / "out", read_layout("libero"))
    found = open_dataset(tmp_path / "out")
    assert found.prompts == (("turn on the stove",),)
    assert found.lengths.tolist() == [5, 6, 7]
    seen = found.frames(1, "observation.images.image2").astype(int) - pictures(6, 1)
    assert np.abs(seen).mean() < 4
    with h5py.File(path) as root:
        obs = root["data/demo_2/obs"]
        expected = np.concatenate([obs["ee_states"], obs["gripper_states"]], axis=1)
    assert np.array_equal(found.columns(2)[STATE], expected.astype(np.float32))


def test_robomimics_demonstrations_keep_their_order(tmp_path):
    found = read(robomimic(tmp_path / "image.hdf5"), tmp_path / "out", "robomimic", task="")
    assert found.prompts == (("Lift",),)
    assert found.column("action")[::4, 0].tolist() == list(range(12))
    assert found.cameras == ("observation.images.agentview",)


def test_a_layout_of_ones_own_takes_some_dims_and_turns_colours(tmp_path):
    layout = tmp_path / "mine.json"
    layout.write_text(
        json.dumps(
            {
                "like": "aloha",
                "fps": 25,
                "columns": {
                    "observation.state": {
                        "from": "observations/qpos",
                        "dims": [6, 0],
                        "names": ["gripper", "waist"],
                    },
                    "action": ["action", "observations/qvel"],
                },
                "cameras": {TOP: {"from": "observations/images/top", "colour": "bgr"}},
            }
        )
    )
    path = aloha(tmp_path / "a.hdf5")
    found = read(path, tmp_path / "out", str(layout))
    with h5py.File(path) as root:
        assert np.array_equal(
            found.columns(0)[STATE], root["observations/qpos"][:][:, [6, 0]].astype(np.float32)
        )
    assert found.features[STATE]["names"] == ["gripper", "waist"]
    assert found.features["action"]["shape"] == [28]
    seen = found.frames(0, TOP).astype(int) - pictures(6)[..., ::-1]
    assert np.abs(seen).mean() < 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: aloha(p, action=np.zeros((5, 14))),
            r"'action': has 5 frames, but '.*' has 6",
        ),
        (lambda p: aloha(p, action=np.zeros((6, 2, 7))), r"float64 of shape \(6, 2, 7\); column"),
        (lambda p: aloha(p, action=np.array([b"x"] * 6)), "column 'action' needs numbers"),
        (lambda p: aloha(p, cameras=()), r"'observations/images/\*': is missing"),
        (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "is not a readable HDF5"),
        (lambda p: p.write_text("qpos,action\n1,2\n"), "is not a readable HDF5"),
        (lambda p: libero(p), "'observations/qpos': is missing"),
        (
            lambda p: aloha(p, action=np.zeros((6, 7))),
            r"'action': has shape \(7,\), but \(14,\) in .*episode_0\.hdf5; import it separately",
        ),
        (
            lambda p: aloha(p, qpos=np.zeros((6, 14), np.int64)),
            r"'observation.state': has type int64, but float32 in .*episode_0\.hdf5",
        ),
        (lambda p: aloha(p, cameras=("top",)), "lacks 'observation.images.angle', which .*_0"),
        (lambda p: aloha(p, size=(64, 64)), r"has shape \(64, 64, 3\), but \(32, 48, 3\) in"),
    ],
)
def test_what_cannot_be_read_is_said_before_anything_is_written(tmp_path, make, message):
    aloha(tmp_path / "episode_0.hdf5")
    make(tmp_path / "episode_1.hdf5")
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, tmp_path / "out")
    assert "episode_1.hdf5" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_integers_of_several_widths_are_said_before_anything_is_written(tmp_path):
    aloha(tmp_path / "episode_0.hdf5", qpos=np.full((6, 14), 100, np.int16))
    aloha(tmp_path / "episode_1.hdf5", qpos=np.full((6, 14), 70_000, np.int64))
    with pytest.raises(ValueError, match=r"_1.hdf5.*has type int64, but int16 in .*_0.hdf5"):
        read(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_demonstrations_of_one_file_that_are_unlike_are_named(tmp_path):
    path = libero(tmp_path / "a_demo.hdf5")
    with h5py.File(path, "a") as root:
        del root["data/demo_2/actions"]
        root["data/demo_2/actions"] = np.zeros((7, 6))
    with pytest.raises(ValueError, match=r"demo_2 'action': has shape \(6,\), but \(7,\) in .*_0"):
        import_dataset([path], tmp_path / "out", read_layout("libero"))
    assert not (tmp_path / "out").exists()


def test_times_that_go_backwards_are_said_before_anything_is_written(tmp_path):
    layout = tmp_path / "mine.json"
    layout.write_text(json.dumps({"like": "aloha", "time": "seconds", "task": "lift"}))
    for number, times in enumerate(([0, 1, 2, 3, 4, 5], [0, 1, 2, 1.5, 4, 5])):
        with h5py.File(aloha(tmp_path / f"in_{number}.hdf5"), "a") as root:
            root["seconds"] = np.array(times) / 50
    with pytest.raises(ValueError, match=r"in_1\.hdf5, 'seconds': time goes back in time"):
        import_dataset([tmp_path], tmp_path / "out", read_layout(str(layout)))
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_are_named_and_finished_episodes_stay(tmp_path):
    bad = np.zeros((6, 14))
    bad[3, 2] = np.nan
    aloha(tmp_path / "in_0.hdf5")
    aloha(tmp_path / "in_1.hdf5", qpos=bad)
    with pytest.raises(ValueError, match=r"in_1.*Episode 1, column 'observation.state', step 3"):
        read(tmp_path, tmp_path / "out")
    aloha(tmp_path / "in_1.hdf5", seed=1)
    layout = read_layout("aloha", task="lift it")
    import_dataset([tmp_path], tmp_path / "out", layout, resume=True)
    assert open_dataset(tmp_path / "out").lengths.tolist() == [6, 6]


def test_an_interrupted_import_comes_to_the_same_dataset(tmp_path):
    libero(tmp_path / "a_demo.hdf5")
    libero(tmp_path / "b_demo.hdf5")
    layout = read_layout("libero")
    import_dataset([tmp_path], tmp_path / "whole", layout)

    class StopError(Exception):
        pass

    def stop(what, done, total):
        assert total in (2, 6)
        if what == "Importing" and done == 4:
            raise StopError

    files = [tmp_path / "a_demo.hdf5", tmp_path / "b_demo.hdf5"]
    with pytest.raises(StopError):
        import_dataset(files, tmp_path / "out", layout, progress=stop)
    assert open_dataset(tmp_path / "out").num_episodes == 4
    with pytest.raises(ValueError, match=r"was started with .*a_demo.* but now there is .*b_demo"):
        import_dataset(files[::-1], tmp_path / "out", layout, resume=True)
    with pytest.raises(ValueError, match=r"has episodes of .*b_demo.*, which is no longer among"):
        import_dataset(files[:1], tmp_path / "out", layout, resume=True)
    import_dataset(files, tmp_path / "out", layout, resume=True)
    assert open_dataset(tmp_path / "out").digest == open_dataset(tmp_path / "whole").digest


def test_an_import_goes_on_from_another_folder(tmp_path, monkeypatch):
    libero(tmp_path / "a_demo.hdf5")

    def stop(what, done, total):
        if what == "Importing" and done == 1:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        import_dataset(["a_demo.hdf5"], "out", read_layout("libero"), progress=stop)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    import_dataset(["../a_demo.hdf5"], "../out", read_layout("libero"), resume=True)
    assert open_dataset(tmp_path / "out").num_episodes == 3


def nested(root):
    group = root["observations/images"]
    for _ in range(150):
        group = group.create_group("g")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: root.__setitem__("action", h5py.SoftLink("/nowhere")), "cannot be read"),
        (lambda root: root.__setitem__("action", h5py.SoftLink("/action")), "cannot be read"),
        (nested, "'observations/images/g/g/.*is nested beyond 100 groups"),
    ],
    ids=["to nothing", "to itself", "deep"],
)
def test_links_and_groups_without_end_are_refused(tmp_path, change, message):
    with h5py.File(aloha(tmp_path / "a.hdf5"), "r+") as root:
        del root["action"]
        change(root)
    with pytest.raises(DatasetError, match=message):
        read(tmp_path / "a.hdf5", tmp_path / "out")


def linked(root, other, secret):
    root["action"] = h5py.ExternalLink(str(other), "action")


def linked_softly(root, other, secret):
    root["away"] = h5py.ExternalLink(str(other), "/")
    root["action"] = h5py.SoftLink("/away/action")


def stored_elsewhere(root, other, secret):
    root.create_dataset("action", (6, 14), "f8", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def virtual(root, other, secret):
    sources = h5py.VirtualLayout((6, 14), "f8")
    sources[:] = h5py.VirtualSource(str(other), "action", (6, 14))
    root.create_virtual_dataset("action", sources)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (linked, "'action': is a link to '.*other.h5'"),
        (linked_softly, "'action': is a link to '.*other.h5'"),
        (stored_elsewhere, "'action': is stored in other files"),
        (virtual, "'action': is stored in other files"),
    ],
)
def test_what_lies_outside_of_the_file_is_refused(tmp_path, make, message):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.zeros((6, 14)).tobytes())
    other, path = aloha(tmp_path / "other.h5"), aloha(tmp_path / "in.hdf5")
    with h5py.File(path, "a") as root:
        del root["action"]
        make(root, other, secret)
    with pytest.raises(ValueError, match=message):
        import_dataset([path], tmp_path / "out", read_layout("aloha", task="x"))


def test_a_link_within_the_file_is_followed(tmp_path):
    path = aloha(tmp_path / "in.hdf5")
    with h5py.File(path, "a") as root:
        root.move("action", "kept")
        root["action"] = h5py.SoftLink("/kept")
    assert read(path, tmp_path / "out").num_frames == 6


@pytest.mark.parametrize("seed", range(24))
def test_damage_within_an_hdf5_file_is_an_error_that_names_it_or_other_numbers(tmp_path, seed):
    path, rng = aloha(tmp_path / "a.hdf5", cameras=("top",)), np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    for at in rng.integers(96, 6000, 12):
        content[at] ^= 1 << rng.integers(8)
    path.write_bytes(content)
    with suppress(DatasetError):
        read(path, tmp_path / "out")


def test_html_in_an_instruction_stays_text(tmp_path):
    text = "<script>alert(1)</script> & lift"
    found = read(aloha(tmp_path / "a.hdf5"), tmp_path / "out", task=text)
    assert found.prompts == ((text,),)
    write_page(found, 0, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_no_more_than_an_episode_is_held(tmp_path):
    """The first is read to import the libraries."""
    peaks = []
    for number, count in enumerate((1, 2, 8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for k in range(count):
            aloha(folder / f"{k}.hdf5", 40, cameras=("top",))
        tracemalloc.start()
        read(folder, tmp_path / f"out{number}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 6 * pictures(40).nbytes / 4


def unwritten(path, rows=10, chunked=True, **parts):
    """An episode whose arrays were created in full, and written as far as `parts` say."""
    aloha(path, rows, cameras=("top",))
    with h5py.File(path, "r+") as root:
        for name, count in parts.items():
            name = {"top": "observations/images/top", "qpos": "observations/qpos"}.get(name, name)
            values = root[name][:]
            del root[name]
            chunk = (1, *values.shape[1:]) if chunked else None
            made = root.create_dataset(name, values.shape, values.dtype, chunks=chunk)
            if count:
                made[:count] = values[:count]


@pytest.mark.parametrize(
    ("chunked", "parts", "message"),
    [
        (True, {"action": 7}, r"'action': 3 of 10 chunks were never written .*from row 7 on"),
        (True, {"qpos": 0}, r"qpos': 10 of 10 chunks were never written .*from row 0 on"),
        (False, {"action": 0}, "'action': 1 of 1 chunks were never written"),
    ],
)
def test_rows_of_a_column_that_were_never_written_are_counted(tmp_path, chunked, parts, message):
    unwritten(tmp_path / "a.hdf5", chunked=chunked, **parts)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.hdf5", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("filled", [0, 6])
def test_an_episode_that_ends_in_rows_that_were_only_allocated_is_refused(tmp_path, caplog, filled):
    rows = np.where(np.arange(10)[:, None] < filled, np.ones((10, 14)), 0.0)
    aloha(tmp_path / "a.hdf5", 10, qpos=rows, action=rows)
    said = f"rows: the last {10 - filled} of 10 are zeros in all columns"
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "a.hdf5", tmp_path / "out")
    layout = tmp_path / "actions.json"
    layout.write_text(json.dumps({"like": "aloha", "columns": {"action": "action"}}))
    found = read(tmp_path / "a.hdf5", tmp_path / "rest", str(layout))
    assert said in caplog.text
    np.testing.assert_array_equal(found.column("action"), rows)


def test_pictures_that_were_never_written_are_counted_in_a_warning(tmp_path, caplog):
    unwritten(tmp_path / "a.hdf5", top=8)
    found = read(tmp_path / "a.hdf5", tmp_path / "out")
    assert "images/top': 2 of 10 chunks were never written (the first from row 8" in caplog.text
    assert found.frames(0, TOP)[8:].max() < 20 < found.frames(0, TOP)[7].mean()


def test_a_second_arm_is_taken_and_what_a_layout_leaves_out_is_listed(tmp_path):
    robomimic(tmp_path / "two.hdf5", demos=1)
    with h5py.File(tmp_path / "two.hdf5", "r+") as root:
        obs = root["data/demo_0/obs"]
        for name, dims in (("eef_pos", 3), ("eef_quat", 4), ("gripper_qpos", 2)):
            obs[f"robot1_{name}"] = np.full((4, dims), 5.0)
        obs["robot0_base_to_eef_pos"] = np.zeros((4, 3))
        obs["object"] = np.ones((4, 10))
    layout = read_layout("robomimic")
    summary = import_dataset([tmp_path / "two.hdf5"], tmp_path / "out", layout)
    state = open_dataset(tmp_path / "out").column(STATE)
    np.testing.assert_array_equal(state, [[*[0] * 6, 1, 0, 0, *[5] * 9]] * 4)
    assert "obs/object" in summary.unused
    assert "obs/robot0_base_to_eef_pos" in summary.unused
    assert not {"obs/robot1_eef_pos", "obs/agentview_image", "actions"} & {*summary.unused}


@pytest.mark.parametrize(
    ("only", "numbers"),
    [("mask/train", [0, 1]), ("@success", [0, 2]), ("", [0, 1, 2])],
)
def test_episodes_are_selected_by_a_list_or_an_attribute(tmp_path, only, numbers):
    robomimic(tmp_path / "a.hdf5", demos=3)
    with h5py.File(tmp_path / "a.hdf5", "r+") as root:
        for number in range(3):
            root[f"data/demo_{number}"].attrs["success"] = number != 1
    found = read(tmp_path / "a.hdf5", tmp_path / "out", "robomimic", only=only)
    assert found.column("action")[::4, 0].tolist() == numbers


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("mask/valid", "'mask/valid': is missing"),
        ("@good", "'data/demo_0': has no attribute 'good'"),
        ("data/demo_0/actions", "is not a list of names"),
        ("@none", "'@none': selects no episode"),
    ],
)
def test_a_selection_that_is_not_there_is_named(tmp_path, only, message):
    robomimic(tmp_path / "a.hdf5", demos=3)
    with h5py.File(tmp_path / "a.hdf5", "r+") as root:
        for number in range(3):
            root[f"data/demo_{number}"].attrs["none"] = False
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.hdf5", tmp_path / "out", "robomimic", only=only)


def test_a_depth_camera_of_a_pattern_is_left_out_and_a_named_one_refused(tmp_path):
    aloha(tmp_path / "a.hdf5", cameras=("top",))
    with h5py.File(tmp_path / "a.hdf5", "r+") as root:
        root["observations/images/top_depth"] = np.full((6, 32, 48), 700, np.uint16)
    summary = import_dataset(
        [tmp_path / "a.hdf5"], tmp_path / "out", read_layout("aloha", task="lift it")
    )
    assert open_dataset(tmp_path / "out").cameras == (TOP,)
    assert summary.unused == ("observations/images/top_depth", "observations/qvel")
    named = tmp_path / "named.json"
    camera = {"observation.images.d": "observations/images/top_depth"}
    named.write_text(json.dumps({"like": "aloha", "cameras": camera}))
    with pytest.raises(ValueError, match=r"top_depth': is uint16 of shape \(6, 32, 48\)"):
        read(tmp_path / "a.hdf5", tmp_path / "other", str(named))


def test_a_resumed_import_refuses_an_earlier_file_with_other_content_of_the_same_size(tmp_path):
    bad = np.zeros((6, 14))
    bad[3, 2] = np.nan
    aloha(tmp_path / "in_0.hdf5")
    aloha(tmp_path / "in_1.hdf5", qpos=bad)
    with pytest.raises(ValueError, match="is not finite"):
        read(tmp_path, tmp_path / "out")
    layout = read_layout("aloha", task="lift it")
    aloha(tmp_path / "in_1.hdf5", seed=1)
    size = (tmp_path / "in_0.hdf5").stat().st_size
    kept = (tmp_path / "in_0.hdf5").read_bytes()
    with h5py.File(tmp_path / "in_0.hdf5", "r+") as root:
        root["action"][...] = 7.0
    assert (tmp_path / "in_0.hdf5").stat().st_size == size
    with pytest.raises(ValueError, match=r"in_0\.hdf5, whose content has changed since"):
        import_dataset([tmp_path], tmp_path / "out", layout, resume=True)
    (tmp_path / "in_0.hdf5").write_bytes(kept)
    import_dataset([tmp_path], tmp_path / "out", layout, resume=True)
    assert open_dataset(tmp_path / "out").lengths.tolist() == [6, 6]


def test_resuming_a_finished_import_says_so_and_changes_nothing(tmp_path):
    for number in range(2):
        aloha(tmp_path / f"in_{number}.hdf5", seed=number, cameras=("top",))
    layout = read_layout("aloha", task="lift it")
    import_dataset([tmp_path], tmp_path / "out", layout)
    before = open_dataset(tmp_path / "out").digest
    left = tmp_path / "out.partial"  # of a kill between the exchange and the removal
    (left / "meta").mkdir(parents=True)
    (left / "meta/recording.jsonl").write_text("{}\n")
    found = import_dataset([tmp_path], tmp_path / "out", layout, resume=True)
    assert (found.complete, found.episodes, found.frames) == (True, 2, 12)
    assert not left.exists()
    assert open_dataset(tmp_path / "out").digest == before
    with pytest.raises(ValueError, match="already exists and is not empty; choose another path"):
        import_dataset([tmp_path], tmp_path / "out", layout)


def test_resuming_another_import_than_the_finished_one_is_refused(tmp_path):
    path, out = aloha(tmp_path / "in_0.hdf5", cameras=("top",)), tmp_path / "out"
    read(path, out)
    assert [p for p in validate(out) if p.severity == "error"] == []
    velocity = tmp_path / "velocity.json"
    velocity.write_text(json.dumps({"like": "aloha", "columns": {"action": "observations/qvel"}}))

    def resumed(*paths, layout="aloha", task="lift it"):
        import_dataset(paths, out, read_layout(layout, task=task), resume=True)

    other = r"finished dataset that was imported with another layout or task \(see meta/imported"
    for changed in ({"task": "drop it"}, {"layout": str(velocity)}):
        with pytest.raises(ValueError, match=other):
            resumed(path, **changed)
    second = aloha(tmp_path / "in_1.hdf5", seed=1, cameras=("top",))
    for paths in ([second], [path, second]):
        with pytest.raises(ValueError, match="imported from other recordings"):
            resumed(*paths)
    edit_dataset([out], tmp_path / "copied", Edit())
    assert not (tmp_path / "copied/meta/imported.json").exists()
    (out / "meta/imported.json").unlink()
    with pytest.raises(ValueError, match=r"no meta/imported\.json tells what was imported"):
        resumed(path)
