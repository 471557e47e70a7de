"""Bash completion of commands, subcommands and options. Every command's `--help` is read once, when
the script is made: printing a help takes most of a second, too long for each press of Tab.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from shlex import quote

_SCRIPT = """\
_chiliad() {{
  local now=${{COMP_WORDS[COMP_CWORD]}} words={commands} options="--help --version"
  (( COMP_CWORD < 2 )) || case "${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in
{cases}
    *) words= options= ;;
  esac
  [[ $now != -* ]] || words=$options
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$now")
}}
complete -o default -F _chiliad chiliad
"""


def bash_completion(commands: Iterable[str]) -> str:
    """A bash script that completes these commands, then what their help lists, then file names.

    Raises:
      ValueError: the `--help` of a command fails.
    """
    names = [name.replace("_", "-") for name in commands]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        known = dict(zip(names, pool.map(_listed, names), strict=True))
        pairs = [(n, word) for n, words in known.items() for word in words if word[0] != "-"]
        found = pool.map(lambda pair: _listed(*pair), pairs)
        below = {" ".join(pair): words for pair, words in zip(pairs, found, strict=True)}
    cases = [
        f"    {quote(typed)}\\ *) words={_which(words, False)} options={_which(words, True)} ;;"
        for typed, words in (below | known).items()
    ]
    return _SCRIPT.format(commands=quote(" ".join(names)), cases="\n".join(cases))


def words_of(help_text: str) -> list[str]:
    """Options and subcommands in the boxes of a command's help, in its order."""
    found = []
    for line in help_text.splitlines():
        told = re.match(r"│ (?:\s*• (\S+)|(-.*?)(?:\s{2}|│|$))", line)
        if told is not None and told[1]:
            found.append(told[1])
        elif told is not None:
            found += re.findall(r"(?:^|, )(--[\w.-]+)", told[2])
    return list(dict.fromkeys(found))


def _listed(name: str, *more: str) -> list[str]:
    module = f"tools.{name.replace('-', '_')}"
    said = subprocess.run(
        [sys.executable, "-m", module, *more, "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
    )
    if said.returncode:
        raise ValueError(f"{module}: `--help` failed: {said.stderr.strip()[-200:]}")
    return words_of(said.stdout)


def _which(words: Iterable[str], options: bool) -> str:
    return quote(" ".join(word for word in words if word.startswith("-") == options))
