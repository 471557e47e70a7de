"""A page in a real browser, where there is one: its document after its scripts ran."""

import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--virtual-time-budget=5000",
)

needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason="no chromium is on this machine")


def shown(page: Path, scratch: Path, fragment: str = "") -> str:
    """The document a browser makes of the page at `#fragment`; its profile goes to `scratch`."""
    assert _CHROMIUM is not None
    url = page.as_uri() + (f"#{fragment}" if fragment else "")
    command = [_CHROMIUM, *_FLAGS, f"--user-data-dir={scratch / 'profile'}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
