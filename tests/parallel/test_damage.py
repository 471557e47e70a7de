"""Bits turned over, files cut off, lost and added: nothing of it may load."""

import io
import json
import random
import shutil

import jax
import pytest
from rich.console import Console

from models.checkpoints import digests, own
from parallel import checkpoint
from parallel.mesh import make_mesh
from tests.helpers.parallel import checkpoint_host as host

MESH = make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    host.save(directory, MESH, (1, 2, 3))
    return directory


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def restore(path):
    return checkpoint.restore(path, host.abstract(MESH))


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def some_file(path, rng, by_bytes):
    """One with something in it, each as likely as its bytes are many or as any other."""
    full = [file for file in files(path) if file.stat().st_size]
    return rng.choices(full, [file.stat().st_size if by_bytes else 1 for file in full])[0]


def set_bytes(file, content):
    """Anew, as the copy may share its bytes with the original."""
    file.unlink()
    file.write_bytes(content)


@pytest.mark.parametrize("problems", [1, 2])
def test_a_damaged_checkpoint_is_set_aside_with_its_first_problem_and_their_number(run, problems):
    whole = [file for file in files(run / "3") if file.stat().st_size and file.suffix != ".json"]
    for file in whole[:problems]:
        set_bytes(file, file.read_bytes()[:-1])
    said = io.StringIO()
    assert checkpoint.newest_good(run, Console(file=said)) == 2
    assert said.getvalue().startswith("Checkpoint 3 is damaged and was set aside as 3.damaged: ")
    assert said.getvalue().count(" (2 problems in all)") == problems - 1
    assert said.getvalue().count("in all") == problems - 1


def test_none_of_200_bit_flips_and_50_truncations_loads(run):
    path, rng = run / "3", random.Random(0)
    hit = set()
    for trial in range(250):
        file = some_file(path, rng, by_bytes=trial % 2 == 0)
        sound = file.read_bytes()
        if trial < 200:
            bit = rng.randrange(8 * len(sound))
            damaged = bytearray(sound)
            damaged[bit // 8] ^= 1 << bit % 8
        else:
            damaged = sound[: rng.randrange(len(sound))]
        set_bytes(file, damaged)
        with pytest.raises(ValueError, match=r"3 is damaged and was not loaded: ") as error:
            restore(path) if trial % 3 else own.restore_params(path)
        assert str(file) in str(error.value)
        set_bytes(file, sound)
        hit.add(file)
    assert hit == {file for file in files(path) if file.stat().st_size}
    assert host.differing(restore(path), MESH, 3) == []


def test_without_digests_a_flipped_bit_would_load(run, monkeypatch):
    monkeypatch.setattr(digests, "damage", lambda *_, **__: [])
    file = max(files(run / "3" / "state"), key=lambda file: file.stat().st_size)
    sound = file.read_bytes()
    middle = len(sound) // 2
    set_bytes(file, sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :])
    assert len(host.differing(restore(run / "3"), MESH, 3)) == 1


@pytest.mark.parametrize("change", ["lost", "lost digests", "added", "emptied", "unreadable"])
def test_the_run_goes_back_to_the_newest_good_step_and_says_why(run, change, capsys):
    file = next((run / "3" / "state" / "d").iterdir())
    if change == "lost":
        file.unlink()
        said = f"{file} is missing."
    elif change == "lost digests":
        (run / "3" / "digests.json").unlink()
        said = f"{run / '3' / 'digests.json'} is missing."
    elif change == "added":
        (run / "3" / "state" / "x").write_text("")
        said = f"{run / '3' / 'state' / 'x'} was not saved with the checkpoint."
    elif change == "emptied":
        size = file.stat().st_size
        set_bytes(file, b"")
        said = f"{file} has 0 bytes, but was saved with {size}."
    else:
        file.unlink()
        file.symlink_to(file.name)  # in a circle: opening it fails as on a bad disk
        said = f"{file} cannot be read: Too many levels of symbolic links."
    assert checkpoint.newest_good(run, Console()) == 2
    assert f"Checkpoint 3 is damaged and was set aside as 3.damaged: {said}" in (
        capsys.readouterr().out.replace("\n", "")
    )
    assert {path.name for path in run.iterdir()} == {"1", "2", "3.damaged"}
    assert host.differing(restore(run / "2"), MESH, 2) == []


def test_several_damaged_steps_are_passed_and_a_second_one_of_a_number_is_kept_too(run):
    for step in (2, 3):
        (run / str(step) / "orbax.checkpoint").unlink()
    assert checkpoint.newest_good(run) == 1
    host.save(run, MESH, (2,))
    (run / "2" / "_CHECKPOINT_METADATA").unlink()
    assert checkpoint.newest_good(run) == 1
    assert {path.name for path in run.iterdir()} == {"1", "2.damaged", "2.damaged-2", "3.damaged"}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(run):
    for step in (1, 2, 3):
        (run / str(step) / "state" / "manifest.ocdbt").unlink()
    for _ in range(2):
        with pytest.raises(
            FileNotFoundError, match=r"no intact checkpoint left, only 1\.damaged, 2"
        ):
            checkpoint.newest_good(run)
    shutil.rmtree(run)
    assert checkpoint.newest_good(run) is None


def test_acting_refuses_the_damaged_step_by_name_and_names_others(run):
    position = run / "3" / "position" / "data.json"
    position.write_text('{"next": 31}')
    for read in (own.restore_params, lambda path: own.read_json(path, "position")):
        with pytest.raises(ValueError, match=f"{position} has digest ") as error:
            read(run)
        assert str(error.value).endswith("Copy it again or use another step: 1, 2.")


def test_a_checkpoint_without_digests_is_never_taken_for_good_until_it_is_sealed(run):
    for step in (1, 2, 3):
        (run / str(step) / digests.NAME).unlink()
    for load in (restore, own.restore_params, checkpoint.newest_good):
        with pytest.raises(ValueError, match=r"3 cannot be verified.*tools\.checkpoint seal .*3"):
            load(run)
    assert checkpoint.steps(run) == [1, 2, 3]
    path = run / "3"
    digests.write_digests(path, digests.digest_files(path, digests.names(path)))
    assert checkpoint.newest_good(run) == 3


def test_every_reader_takes_a_share_and_together_they_find_all(run):
    path = run / "3"
    full = [file for file in files(path) if file.name != digests.NAME and file.stat().st_size]
    for file in full:
        *others, last = file.read_bytes()
        set_bytes(file, bytes([*others, last ^ 1]))
    shares = [digests.damage(path, index=i, count=3) for i in range(3)]
    assert min(map(len, shares)) >= 3
    together = [sentence for share in shares for sentence in share]
    assert sorted(together) == sorted(digests.damage(path))
    assert len(together) == len(full)


def test_digests_have_one_spelling_only(run):
    file = run / "3" / digests.NAME
    sound = file.read_text()
    for other in (sound.replace(" ", "  "), sound.rstrip(), json.dumps(json.loads(sound)), "{}"):
        set_bytes(file, other.encode())
        assert digests.damage(run / "3") == [
            f"{file} is damaged: it does not match its own digest."
        ]
