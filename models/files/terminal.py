r"""Terminal output of every command: rich's console and bars, logs and tracebacks.

Names, instructions and messages come from datasets, checkpoints and clients: nothing in them is
read as rich's markup, and control characters, which could move the cursor, rename the window or
fill the clipboard, are shown as `\x1b`.
"""

import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TypeVar

import rich.console
import rich.progress
from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

Value = TypeVar("Value")

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u202a-\u202e\u2066-\u2069"  # overrides of the writing direction
    "\ud800-\udfff]"  # surrogates, which cannot be encoded for a terminal
)


def harmless(text: str) -> str:
    r"""The text with its control characters, except tabs and newlines, spelled out (`\x1b`)."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def counted(number: int, noun: str) -> str:
    """A number and what it counts: "1 episode", "0 episodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """First line of an error's message without its period, and the second after one that ends with
    a colon; the error's kind if it says nothing. Of a SystemError, which C code raises over another
    error, that one's."""
    if isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    text = " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")
    return text or type(error).__name__


class Console(rich.console.Console):
    """rich's console without markup, emoji codes and highlighting; `options` are rich's own. To
    style text, pass `style` (`print(text, style="red")`) or a `rich.text.Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **how: Any) -> Text:
        """Renders any string that is shown: a line, a cell, a title."""
        return super().render_str(harmless(text), **how)

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """Renders anything else that is shown; only the sequences that rich itself sends pass
        unchanged."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))

    def status(self, status: rich.console.RenderableType, **how: Any) -> Status:
        """A line beside a spinner."""
        shown = self.render_str(status) if isinstance(status, str) else status
        return super().status(shown, **how)


def say(console: rich.console.Console, *parts: Any, **how: Any) -> None:
    """Prints a line that nothing but the terminal itself breaks."""
    console.print(*parts, soft_wrap=True, **how)


def draws(console: rich.console.Console) -> bool:
    """True where a bar can be redrawn: on a terminal, and in a notebook that has ipywidgets.
    Elsewhere a long job prints a line now and then."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


class TextColumn(rich.progress.ProgressColumn):
    """A progress bar's column: `template`, with fields such as `{task.description}` filled in."""

    def __init__(self, template: str, style: str = "none") -> None:
        super().__init__(rich.progress.Column(no_wrap=True))
        self._template, self._style = template, style

    def render(self, task: rich.progress.Task) -> Text:
        """The text, without markup."""
        return Text(harmless(self._template.format(task=task)), self._style)


class Progress(rich.progress.Progress):
    """rich's progress bars on a console of ours; `options` are rich's own. Nothing is drawn in a
    notebook without ipywidgets, nor on a quiet console."""

    def __init__(
        self, *columns: rich.progress.ProgressColumn, console: Console | None = None, **options: Any
    ) -> None:
        console = console or Console()
        unseen = console.quiet or (console.is_jupyter and not draws(console))
        disable = options.pop("disable", False) or unseen
        super().__init__(*columns, console=console, disable=disable, **options)

    def bar(self, what: str) -> Callable[[int, int], None]:
        """Adds a bar; returns the function that moves it, called with (done, total)."""
        task = self.add_task(what, total=None)
        return lambda done, total: self.update(task, completed=done, total=total)

    def stop(self) -> None:
        """Stops drawing, with the bars in their current state; rich itself leaves a notebook's bars
        as last drawn."""
        if self.console.is_jupyter and not self.disable:
            self.refresh()
        super().stop()

    @classmethod
    def get_default_columns(cls) -> tuple[rich.progress.ProgressColumn, ...]:
        """rich's default columns, with the description shown without markup."""
        _, *others = super().get_default_columns()
        return TextColumn("{task.description}", "progress.description"), *others


def track(
    values: Iterable[Value],
    doing: str,
    *,
    console: Console,
    total: int | None = None,
    transient: bool = False,
) -> Iterator[Value]:
    """Yields the values and draws a bar that shows how many have been taken."""
    with Progress(console=console, transient=transient) as progress:
        yield from progress.track(values, total, description=doing)


@contextmanager
def byte_bar(doing: str, total: int, least: int = 0) -> Iterator[Callable[[int], None]]:
    """Draws a bar of bytes on stderr, where a bar can be redrawn and if there are `least` in all;
    gives a function that adds some."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    hidden = not draws(console) or total < least
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda size: bar.advance(task, size)


class _Harmless(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = harmless(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = harmless(logging.Formatter().formatException(record.exc_info))
        return True


_HARMLESS = _Harmless()


def logger(name: str) -> logging.Logger:
    """The logger of that name; its lines pass through `harmless` in every process and handler."""
    found = logging.getLogger(name)
    found.addFilter(_HARMLESS)
    return found


def guard_tracebacks() -> None:
    """Passes the tracebacks with which Python ends a command's process or thread through
    `harmless`."""

    def on_thread(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_type is not SystemExit:
            _show(ended.exc_type, ended.exc_value, ended.exc_traceback)

    sys.excepthook, threading.excepthook = _show, on_thread


def _show(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    lines = traceback.format_exception(kind, error, trace)
    print(harmless("".join(lines)), end="", file=sys.stderr, flush=True)
