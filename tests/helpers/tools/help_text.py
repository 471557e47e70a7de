"""Help of commands in this process; as a program, of those in its JSON, and which of JAX's modules
that took."""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from unittest import mock

import tools.__main__ as main


def help_of(words: Sequence[str]) -> str:
    """Output of `chiliad WORDS --help`."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        mock.patch.object(sys, "argv", ["chiliad", *words, "--help"]),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        main.main()
    out.seek(0)
    return out.read()


if __name__ == "__main__":
    texts = [help_of(words) for words in json.loads(sys.argv[1])]
    imported = [name for name in ("jax.version", "jaxlib.version") if name in sys.modules]
    print(json.dumps([texts, imported]))
