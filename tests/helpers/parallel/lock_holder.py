"""`python -m tests.helpers.parallel.lock_holder FOLDER [fork | exec]`: holds a folder until its
input ends.

With "fork" or "exec" it starts a child that lives as long, says so, and waits to be killed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from parallel.runs.run_lock import locked


def main(folder: Path, child: str = "") -> None:
    with locked(folder):
        if child == "fork" and os.fork() == 0:
            print("child", os.getpid(), flush=True)
            sys.stdin.read()
            return  # through the end of the block, where a lock of its own would be given back
        if child == "exec":
            subprocess.Popen(["sh", "-c", "echo child $$; read x"], close_fds=False)
        if child:
            signal.pause()
        print("held", os.getpid(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
