"""Commands whose disk is full or read-only, or that are interrupted, end with one line."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.hosts import exits
from tests.helpers.parallel.toy import environment
from tests.helpers.tools.small_run import write_dataset
from tools.command_line.ending import following, in_a_line


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


def ended(error, capsys, **told):
    """The exit code and what is said."""
    with pytest.raises(SystemExit) as ending, in_a_line(**told):
        raise error
    code = ending.value.code
    return (exits.FAILED, code) if isinstance(code, str) else (code, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "Interrupted."), (signal.SIGTERM, 75, "Stopped by SIGTERM.")],
)
def test_a_signal_has_its_code_and_says_what_is_kept(number, code, said, capsys):
    def struck():
        try:
            os.kill(os.getpid(), number)
        finally:
            if number == signal.SIGTERM:  # SLURM sends another while the work ends
                os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ending, in_a_line("The store is kept."):
        struck()
    assert ending.value.code == code
    assert capsys.readouterr().err == f"{said} The store is kept.\n"


def test_an_error_of_the_disk_names_what_was_written_and_what_is_kept(capsys):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert ended(full, capsys, kept="The store is kept.", writing="out") == (
        exits.FAILED,
        "error: out: No space left on device; make room. The store is kept.",
    )


def test_the_next_command_can_be_typed():
    line = following("train", "--data", Path("my sets/a"), "--preset", "tiny")
    assert line == "Next: python -m tools.train --data 'my sets/a' --preset tiny"


def test_tensorstores_words_for_a_full_disk_are_read(capsys):
    words = (
        'RESOURCE_EXHAUSTED: Error writing local file "out/c/0": Failed writing: "out/c/0.__lock": '
        "Failed to write 12292 bytes to file 6: No space left on device [os_error_code='28']"
    )
    said = "error: out/c/0: No space left on device; make room."
    assert ended(ValueError(words), capsys) == (exits.FAILED, said)


def test_a_refusal_keeps_its_words_and_its_code(capsys):
    refused = ValueError("fps is 0.")
    assert ended(refused, capsys, kept="Unsaid.") == (exits.FAILED, "error: fps is 0.")
    refused.exit_code = exits.REFUSED
    assert ended(refused, capsys) == (exits.REFUSED, "error: fps is 0.\n")


def test_a_fault_of_the_code_keeps_its_traceback():
    with pytest.raises(KeyError), in_a_line():
        raise KeyError("x")


PROGRAM = """
import resource, runpy, sys
sys.argv[0] = "-m"
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
for options in sys.argv.pop(1).split(";"):
    module, *sys.argv[1:] = options.split()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def run(limit, *commands):
    """Runs commands whose files cannot take more than so many bytes."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limit), ";".join(commands)],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=240,
    )


def lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_commands_on_a_full_disk_say_which_file_in_one_line(dataset, tmp_path):
    done = run(
        60_000,
        *(
            f"tools.data convert {dataset} {tmp_path / how} --image-size 128 --encoding {how}"
            for how in ("raw", "jpeg")
        ),
    )
    raw, jpeg = lines(done)
    too_large = "File too large; raise the limit on the size of files (ulimit -f). "
    kept = "The finished part of the store is kept; run the same command again to continue."
    assert raw == f"error: {tmp_path / 'raw'}: {too_large}{kept}"
    assert jpeg.startswith(f"error: {tmp_path / 'jpeg'}/.making-")
    assert jpeg.endswith(f".array_record: {too_large}{kept}")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_commands_that_cannot_write_their_folder_say_so_in_one_line(dataset, tmp_path):
    """A path below a file refuses writes like a read-only disk, which root's tests do not have."""
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    done = run(
        10**9,
        f"tools.data convert {dataset} {out}",
        f"tools.data stats {dataset} --json {out}",
        f"tools.record --suite tabletop-lift --episodes 1 --out {out}",
        f"tools.train --data {dataset} --preset tiny --out {out}",
    )
    found = lines(done)
    assert len(found) == 4, done.stderr
    for line in found:
        assert line.startswith(f"error: {out}"), line
        assert "Not a directory; remove the file that is in its folder's place" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, -signal.SIGINT, "Interrupted."), (signal.SIGTERM, 75, "Stopped by SIGTERM.")],
)
@pytest.mark.parametrize("program", ["-m", "/usr/bin/chiliad"])
def test_a_signal_while_a_command_imports_is_one_line(program, number, code, said):
    command = "import tools, sys, time; print('begins', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.argv[0] = {program!r}; {command}"],
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begins\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == f"{said}\n"
    assert process.returncode == code
