"""Options of the commands: read by tyro, with values that no command can use refused, and former
names that work for one more release with a warning."""

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
)

from models.files.address import parse
from models.files.renamed import old_paths, old_values
from models.files.terminal import harmless
from parallel.hosts import exits
from tools.command_line.completion import words_of

T = TypeVar("T")


def cli(command: Any, *, only_reads: bool = False, **options: Any) -> Any:
    """`tyro.cli` of a function or dataclass, or of an app of subcommands. An empty path, a URL that
    names no place, and a number that is not finite or beyond any use end the program.

    Args:
      only_reads: the function prints nothing, as a dataclass does; an option that is not known
        then gets one sentence, without tyro's list of subcommands.
    """
    read = command.cli if hasattr(command, "cli") else partial(tyro.cli, command)
    quiet, said = only_reads or isinstance(command, type), io.BytesIO()
    try:
        with _VALUES, redirect_stderr(_Console(said)) if quiet else nullcontext():
            return read(**options)
    except _Refused as refused:
        arguments = list(options.get("args") or sys.argv[1:])
        _end(f"{_flag(arguments, refused.value)}{refused}")
    except SystemExit:
        unknown = re.search(r"Unrecognized options:[\s│]*(-[^\s,]*)", said.getvalue().decode())
        if unknown is None:
            raise
        said.truncate(0)
        name = unknown[1].partition("=")[0]
        near = get_close_matches(name, _listed(read, options), cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        _end(f"there is no option {name}; {hint}{options.get('prog', '')} --help lists all.")
    finally:
        print(harmless(said.getvalue().decode()), end="", file=sys.stderr)


class _Console(io.TextIOWrapper):
    """Text for `said`, in UTF-8, for which tyro draws its usual boxes."""

    def __init__(self, said: io.BytesIO) -> None:
        super().__init__(said, "utf-8", write_through=True)

    def close(self) -> None:
        """Keeps `said` open when this is collected."""


def _listed(read: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Options that the command's help lists."""
    said = io.BytesIO()
    with _VALUES, redirect_stdout(_Console(said)), suppress(SystemExit):
        read(**{**options, "args": ["--help"]})
    return words_of(said.getvalue().decode())


def _end(sentence: str) -> NoReturn:
    print(harmless(f"error: {sentence}"), file=sys.stderr)
    sys.exit(exits.REFUSED)


def current_options(arguments: Sequence[str], *kinds: Any, **renamed: str) -> list[str]:
    """The arguments with old spellings of options and values replaced, each with a warning on
    stderr.

    Args:
      kinds: configs or their classes; their fields, and those of nested ones, are the options.
      renamed: further options, old name to new (`steps="euler_steps"`).
    """
    paths = {old: new for kind in kinds for old, new in old_paths(kind)} | renamed
    names = {_option(old): _option(new) for old, new in paths.items()}
    values = {_option(path): new for kind in kinds for path, new in old_values(kind)}
    found: list[str] = []
    for argument in arguments:
        if found and argument in values.get(found[-1], {}):
            argument = _warned(argument, values[found[-1]][argument], f"{found[-1]} ")
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            if (old := _option(name.removeprefix("--"))) in names:
                name = _warned(name, names[old])
            if value in values.get(_option(name.removeprefix("--")), {}):
                value = _warned(value, values[_option(name.removeprefix("--"))][value], f"{name}=")
            argument = f"{name}{equals}{value}"
        found.append(argument)
    return found


def with_value(arguments: Sequence[str], flag: str, value: str, warn: bool = True) -> list[str]:
    """The arguments with a value after a flag that stands alone, with a warning on stderr where it
    took none before; `--no-FLAG` gives "True" its opposite."""
    off = flag.replace("--", "--no-", 1) if value == "True" else None
    found = [f"{flag}=False" if argument == off else argument for argument in arguments]
    if flag in found:
        at = found.index(flag) + 1
        if at == len(found) or found[at].startswith("--"):
            if warn:
                _warned(flag, f"{flag} {value}")
            found.insert(at, value)
    return found


_VALUES = ConstructorRegistry()
_HUGE = 2**53
"""The largest whole number that is exact as a float."""
_LARGEST = 3.4e38
"""About the largest float32, in which programs compute."""


class _Refused(BaseException):
    """A value that no command can use; tyro would lose the sentence among its own."""

    def __init__(self, value: str, sentence: str) -> None:
        super().__init__(sentence)
        self.value = value


@_VALUES.primitive_rule
def _path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    def given(arguments: Sequence[str]) -> Path:
        try:
            return Path(str(parse(arguments[0])))
        except ValueError as error:
            raise _Refused(arguments[0], str(error)) from None

    return _spec("PATH", given, Path) if info.type is Path else None


@_VALUES.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
    def given(arguments: Sequence[str]) -> float:
        value = info.type(arguments[0])
        if not abs(value) <= (_HUGE if info.type is int else _LARGEST):
            limit = f"; give at most {_HUGE}" if info.type is int else "; give another"
            raise _Refused(arguments[0], f"{arguments[0]} is no number to work with{limit}.")
        return value

    return (
        _spec(info.type.__name__.upper(), given, info.type) if info.type in (int, float) else None
    )


def _spec(
    metavar: str, given: Callable[[Sequence[str]], T], kind: type
) -> PrimitiveConstructorSpec[T]:
    return PrimitiveConstructorSpec(
        1, metavar, given, lambda value: isinstance(value, kind), lambda value: [str(value)]
    )


def _flag(arguments: Sequence[str], value: str) -> str:
    """The option that has this value, as the head of a sentence; "" for none."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, _, given = argument.partition("=")
        if given == value and name.startswith("--"):
            return f"{name}: "
        if argument == value and before.startswith("-"):
            return f"{before}: "
    return ""


def _option(path: str) -> str:
    return "--" + path.replace("_", "-")


def _warned(old: str, new: str, where: str = "") -> str:
    sentence = (
        f"warning: {where}{old} is now {where}{new}; the next release accepts only the new form."
    )
    print(harmless(sentence), file=sys.stderr)
    return new
