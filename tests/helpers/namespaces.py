"""Namespaces of Linux that stand for machines of their own; they need root, iproute2 and
util-linux."""

import os
import shutil
import subprocess
from pathlib import Path


def available() -> bool:
    """True where namespaces can be made."""
    tools = all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter"))
    return tools and os.geteuid() == 0


def begun(process: "subprocess.Popen[bytes]") -> bool:
    """True once `unshare` has made its namespaces and begun their first process."""
    return bool(_children(process))


def first_process(process: "subprocess.Popen[bytes]") -> int:
    """Number of the first process in the namespaces that `unshare` made, as seen from outside."""
    return int(_children(process)[0])


def ip(*words: str) -> None:
    """Calls iproute2, which must succeed."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _children(process: "subprocess.Popen[bytes]") -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
