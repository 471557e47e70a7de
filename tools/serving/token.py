"""The token that a server requires of its clients, in a file of its own so that no command line
shows it."""

from pathlib import Path


def read_token(file: Path | None) -> str | None:
    """The only line of a file; None without one.

    Raises:
      ValueError: it holds none, or more than one word.
      FileNotFoundError: there is no such file.
    """
    if file is None:
        return None
    token = file.read_text().strip()
    if not token or len(token.split()) > 1:
        raise ValueError(f"{file} holds no token; write one without spaces into it.")
    return token
