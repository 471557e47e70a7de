"""Signals to stop are noted, whoever still listens."""

import os
import signal
import subprocess
import sys

from parallel.hosts.stop import StopSignals
from tests.helpers.parallel.toy import environment


def test_a_signal_is_noted_where_stderr_has_no_reader_any_more():
    """As Ctrl-C ends the `tee` that reads it, too."""
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import os, signal; from parallel.hosts.stop import StopSignals\n"
        "with StopSignals() as stop: os.kill(os.getpid(), signal.SIGINT)\n"
        "print(stop.number)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=writer, text=True, timeout=240
    )
    os.close(writer)
    assert done.stdout == f"{int(signal.SIGINT)}\n"


def test_a_second_ctrl_c_interrupts(capfd):
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.should_stop()
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        return
    raise AssertionError("the second Ctrl-C was only noted")
