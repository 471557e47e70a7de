"""Runs as rows of text: the same columns in a terminal and on a page."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from models.files.terminal import Console, say
from parallel.evaluations import HELD_OUT_LOSS
from tools.runs.run_record import Json, RunRecord, differences, finite

HEADS = ("run", "preset", "data", "step", "loss", "held-out", "success", "time", "status")
_STYLES = {"running": "cyan", "finished": "green", "interrupted": "red"}
_LONGEST = 60


def cells(run: RunRecord, brief: bool = False) -> list[str]:
    """One run's cells under `HEADS`, with a dash where there is no value; if `brief`, without
    intervals and without the best held-out loss."""
    loss, held_out = run.points("loss"), run.points(HELD_OUT_LOSS)
    best = min(finite(held_out), key=lambda point: point[1], default=None)
    data = run.origin.get("data") or "–"
    lowest = f", best {best[1]:.3g}" if best and best != held_out[-1] and not brief else ""
    return [
        run.name,
        run.origin.get("preset") or "–",
        Path(data).name or data,
        f"{run.done:,}" + (f"/{run.steps:,}" if run.steps is not None else ""),
        f"{loss[-1][1]:.3g}" if loss else "–",
        f"{held_out[-1][1]:.3g}{lowest}" if held_out else "–",
        _success(run, brief),
        duration(run.seconds) if run.seconds else "–",
        run.status,
    ]


def show_runs(runs: Sequence[RunRecord], console: Console) -> None:
    """Prints a table of the runs, and below it what is damaged in them."""
    rows = [cells(run, brief=console.width < 110) for run in runs]
    table = Table(box=None, pad_edge=False, header_style="bold")
    least = []
    for head, *column in zip(HEADS, *rows, strict=True):
        text = head in HEADS[:3]
        least.append({"run": 8}.get(head, 4) if text else max(map(len, (head, *column))))
        table.add_column(
            head,
            overflow="fold",
            no_wrap=not text,
            min_width=least[-1],
            justify="right" if head in ("step", "loss") else "left",
        )
    for *others, status in rows:
        table.add_row(*others, Text(status, _STYLES.get(status, "")))
    whole = sum(least) + 2 * len(least)
    table.width = whole if whole > console.width else None  # the terminal breaks the lines then
    console.print(table, crop=False)
    for sentence in (sentence for run in runs for sentence in run.damage):
        say(console, sentence, style="yellow")


def show_differences(runs: Sequence[RunRecord], console: Console) -> None:
    """Prints the fields of the configs that differ."""
    found = differences(runs)
    if not found:
        console.print("Their configs are the same.")
        return
    heads = (Column(head, overflow="fold") for head in ("config", *(run.name for run in runs)))
    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for name, values in found.items():
        table.add_row(name, *map(written, values))
    console.print(table)


def written(value: Json) -> str:
    """A config's value as text, not too long."""
    text = "–" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def duration(seconds: float) -> str:
    """Such as "42 s", "3 min", "5 h 07 min" or "2 d 3 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02d} min" if days < 1 else f"{days} d {hours % 24} h"


def _success(run: RunRecord, brief: bool) -> str:
    rates = [*run.judged.values(), *(line["success"] for line in run.evaluations[-1:])]
    if rates:
        rate, low, high = (round(100 * rates[0][name]) for name in ("rate", "low", "high"))
        return f"{rate}%" if brief else f"{rate}% ({low}–{high})"
    acted = run.points("success")
    return f"{acted[-1][1]:.0%} in training" if acted else "–"
