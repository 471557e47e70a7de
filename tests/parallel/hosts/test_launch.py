"""The launcher with processes that compute nothing: what is printed, what fails, what is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from parallel.hosts import exits, job, supervisor
from parallel.hosts.supervisor import LaunchPlan, _devices, _next_slots, supervise
from tests.helpers.parallel.toy import environment

RANK = "import os, sys, time, signal; rank = int(os.environ['CHILIAD_RANK']); "


def python(body: str) -> list[str]:
    return [sys.executable, "-c", RANK + body]


def test_every_line_comes_whole_with_its_rank(capfd):
    body = "print(f'out {rank}', end='' if rank else '\\n'); print('err', file=sys.stderr)"
    assert supervise(LaunchPlan(python(body), 3)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1", "[2] out 2"]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err", "[2] err"]


def test_a_line_without_an_end_is_broken_and_nothing_is_lost(capfd):
    assert supervise(LaunchPlan(python("sys.stdout.write('x' * 5_000_000)"), 1)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.count("x") for line in lines) == 5_000_000
    assert max(map(len, lines)) == 2**16 + len("[0] ")


def test_a_child_that_holds_the_output_is_not_waited_for(capfd):
    body = "import subprocess; print('told', flush=True)\n"
    body += "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    assert supervise(LaunchPlan(python(body), 1)) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "relay"]
    told, pid = (line.split()[1] for line in capfd.readouterr().out.splitlines())
    os.kill(int(pid), signal.SIGKILL)
    assert told == "told"


def test_output_that_cannot_be_written_holds_up_no_process(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        body = "print('x' * 300_000, flush=True); sys.exit(7)"  # more than a pipe takes
        assert supervise(LaunchPlan(python(body), 1)) == 7
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_sigterm_while_processes_are_started_reaches_all(monkeypatch):
    begin = supervisor._Attempt._start

    def start(attempt, index, where):
        os.kill(os.getpid(), signal.SIGTERM)
        return begin(attempt, index, where)

    monkeypatch.setattr(supervisor._Attempt, "_start", start)
    assert supervise(LaunchPlan(python("time.sleep(1000)"), 2)) == 128 + signal.SIGTERM


def test_the_first_to_fail_ends_all_and_its_error_comes_last(capfd):
    body = "time.sleep(0 if rank == 1 else 1000); sys.exit('no such thing')"
    begin = time.monotonic()
    assert supervise(LaunchPlan(python(body), 3)) == 1
    assert time.monotonic() - begin < 500
    lines = capfd.readouterr().err.splitlines()
    assert "rank 1 ended with exit code 1; all processes were ended" in lines[-2]
    assert lines[-1] == "    [1] no such thing"


def test_a_process_that_only_lost_its_peer_is_not_the_cause(capfd):
    """Rank 0 ends first, but as JAX ends a process whose peer died."""
    body = "time.sleep(0.2) if rank else os.abort(); sys.exit(7)"
    assert supervise(LaunchPlan(python(body), 2)) == 7
    assert "rank 1 ended with exit code 7" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.abort()", 134, "was killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", exits.STALLED, "was stopped"),
    ],
)
def test_how_a_process_died_is_named_and_gives_the_exit_code(capfd, body, code, says):
    assert supervise(LaunchPlan(python(f"time.sleep(1000) if rank else {body}"), 2)) == code
    assert f"rank 0 {says}" in capfd.readouterr().err


def test_a_job_begins_anew_on_another_port_and_is_told_so(capfd):
    body = "print(os.environ['CHILIAD_COORDINATOR'], os.environ['CHILIAD_RESTARTS']); "
    body += "sys.exit(int(os.environ['CHILIAD_RESTARTS']) < 2)"
    assert supervise(LaunchPlan(python(body), 1, max_restarts=2)) == 0
    out, err = capfd.readouterr()
    found = [line.split()[1:] for line in out.splitlines()]
    assert [restarts for _, restarts in found] == ["0", "1", "2"]
    assert all(where.startswith("127.0.0.1:") for where, _ in found)
    assert len({where for where, _ in found}) > 1
    assert "restarting with 1 processes, restart 2 of 2" in err


@pytest.mark.parametrize("code", [exits.REFUSED, exits.NON_FINITE])
def test_what_would_fail_again_is_not_begun_anew(capfd, code):
    assert supervise(LaunchPlan(python(f"sys.exit({code})"), 1, max_restarts=5)) == code
    assert "restarting" not in capfd.readouterr().err


@pytest.mark.parametrize("code", [75, 130])
def test_a_job_that_was_told_to_stop_is_no_failure_and_not_begun_anew(capfd, code):
    body = f"time.sleep(0.3 * rank); print('saved'); sys.exit({code})"
    assert supervise(LaunchPlan(python(body), 2, max_restarts=5)) == code
    out, err = capfd.readouterr()
    assert out.count("saved") == 2
    assert err == ""


@pytest.mark.parametrize("code", [75, 130])
def test_a_process_that_stops_alone_ends_its_job(capfd, monkeypatch, code):
    monkeypatch.setattr(supervisor, "_ALONE", 0.2)
    body = f"time.sleep(1000) if rank else sys.exit({code})"
    assert supervise(LaunchPlan(python(body), 2, max_restarts=5)) == code
    assert capfd.readouterr().err == "launch: rank 0 was told to stop; the others were ended\n"


def test_an_interrupted_process_is_the_cause_of_its_peers_end(capfd):
    body = f"sys.exit(130) if rank else (time.sleep(0.3), sys.exit({exits.PEER_LOST}))"
    assert supervise(LaunchPlan(python(body), 2, max_restarts=5)) == 130
    assert "restarting" not in capfd.readouterr().err


def test_restarts_by_the_scheduler_are_counted_too(capfd, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    body = "count = int(os.environ['CHILIAD_RESTARTS']); print(count); sys.exit(count < 3)"
    assert supervise(LaunchPlan(python(body), 1, max_restarts=5)) == 0
    assert capfd.readouterr().out == "[0] 2\n[0] 3\n"
    assert job.restarts() == 2


def test_a_smaller_job_leaves_out_the_process_at_fault(capfd):
    body = "size = int(os.environ['CHILIAD_PROCESSES']); print(size); "
    body += "time.sleep(1000) if size > 2 and rank != 1 else sys.exit(size > 2)"
    assert supervise(LaunchPlan(python(body), 4, max_restarts=1, min_processes=1)) == 0
    assert capfd.readouterr().out.splitlines()[-2:] in (["[0] 2", "[1] 2"], ["[1] 2", "[0] 2"])


def test_smaller_jobs_keep_to_divisors_and_to_the_least():
    plan = LaunchPlan((), 8, min_processes=2)
    assert _next_slots(plan, list(range(8)), 0) == [1, 2, 3, 4]
    assert _next_slots(plan, [1, 2, 3, 4], 1) == [1, 3]
    assert _next_slots(plan, [1, 3], 1) == [1, 3]
    assert _next_slots(LaunchPlan((), 8), list(range(8)), 0) == list(range(8))


def test_each_process_has_its_own_devices():
    plan = LaunchPlan((), 2)
    forced = "--xla_force_host_platform_device_count"
    assert _devices(plan, 1, 8, {}) == {"JAX_LOCAL_DEVICE_IDS": "4,5,6,7"}
    cpu = _devices(LaunchPlan((), 2, devices=16), 1, 0, {"XLA_FLAGS": f"--a=1 {forced}=8"})
    assert cpu == {"XLA_FLAGS": f"--a=1 {forced}=16", "NPROC": "64"}
    assert _devices(plan, 0, 8, {"JAX_PLATFORMS": "cpu"})["XLA_FLAGS"] == f"{forced}=1"
    assert _devices(plan, 0, 0, {"NPROC": "4"})["NPROC"] == "32"  # the launcher's own is too small
    with pytest.raises(ValueError, match="-n is 2 with 1 devices each, but this machine has 1"):
        _devices(plan, 0, 1, {})


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (LaunchPlan((), 0), "-n is 0"),
        (LaunchPlan((), 2, max_restarts=-1), "--max-restarts is -1"),
        (LaunchPlan((), 2, min_processes=3), "--min-processes is 3; expected at most 2"),
        (LaunchPlan((), 10**11), "-n is 100000000000; expected a whole number from 1 to 4096"),
        (
            LaunchPlan((), 2, nodes=2, node=2, coordinator="a:1"),
            "--node-rank is 2; expected 0 to 1",
        ),
        (LaunchPlan((), 2, nodes=2), "Several machines .* need --coordinator"),
        (LaunchPlan((), 2, nodes=2, coordinator="host0"), "--coordinator is 'host0'; expected HOS"),
        (LaunchPlan(["no-such-program"], 1), "no-such-program: no such program"),
        (LaunchPlan([__file__], 1), "test_launch.py: no such program, or it is not executable"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(plan, named):
    with pytest.raises(ValueError, match=named):
        supervise(plan)


def test_several_machines_share_an_address_and_count_their_ranks_on(capfd):
    body = "print(os.environ['CHILIAD_COORDINATOR'], os.environ['CHILIAD_PROCESSES'])"
    plan = LaunchPlan(python(body), 2, nodes=3, node=1, coordinator="host0:9000")
    assert supervise(plan) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[2] host0:9000 6",
        "[3] host0:9000 6",
    ]


def launch(body: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tools.launch", *options, "--", *python(body)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(), text=True, **pipes)


def heard(process: "subprocess.Popen[str]", pattern: str, count: int) -> list[str]:
    """Waits for lines that match, and returns what they matched."""
    found: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        found += re.findall(pattern, line)
        if len(found) == count:
            return found
    pytest.fail(f"{count} lines of {pattern!r} were expected, but only {found} came")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 120
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < until, f"some of {pids} are still there"
        time.sleep(0.05)


CHILD = "import subprocess; c = subprocess.Popen(['sleep', '1000']); print('pid', c.pid); "


@pytest.mark.slow
def test_nothing_is_left_when_one_fails_not_even_their_children():
    process = launch(CHILD + "print('pid', os.getpid()); sys.exit(3) if rank else c.wait()", "-n=2")
    pids = [int(pid) for pid in heard(process, r"pid (\d+)", 4)]
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 3, output
    wait_until_gone(pids)


@pytest.mark.slow
def test_processes_do_not_outlive_a_launcher_that_is_killed():
    process = launch("print('pid', os.getpid()); time.sleep(1000)", "-n", "2")
    pids = [int(pid) for pid in heard(process, r"pid (\d+)", 2)]
    process.kill()
    process.wait()
    wait_until_gone(pids)


def test_sigterm_reaches_all_and_a_clean_end_is_one():
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved'))); print('ready'); "
    process = launch(body + "time.sleep(1000)", "-n", "2", "--max-restarts", "3")
    heard(process, "ready", 2)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert (process.returncode, output.count("saved")) == (0, 2), output


@pytest.mark.slow
def test_a_second_ctrl_c_kills():
    process = launch(
        "signal.signal(signal.SIGINT, lambda *_: print('asked')); print('ready')\n"
        "while True: time.sleep(1)",
        "-n=2",
    )
    heard(process, "ready", 2)
    process.send_signal(signal.SIGINT)
    heard(process, "asked", 2)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGKILL, output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["-n", "2"], "give the command to run"), (["-n", "0", "--", "true"], "-n is 0")],
)
def test_a_wrong_command_line_is_refused_in_a_sentence(arguments, says):
    command = [sys.executable, "-m", "tools.launch", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == exits.REFUSED
    assert says in done.stderr
    assert "Traceback" not in done.stderr
