"""The page of what `tools.bench.gpu` measured, made from its JSON alone; without any JSON, the page
says that nothing has been measured yet."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_INTRO = """# GPU results

Made by `python -m tools.bench.gpu --unpack` from the JSON in `docs/results/gpu`, which `make gpu`
measures ([how to run it](../gpu.md)); a test checks that this page and the JSON agree.
"""
_NOTHING = """
Nothing has been measured on a GPU yet, so there are no figures here or elsewhere.
"""

Result = Mapping[str, Any]


def page(folder: Path, measurements: Sequence[Any]) -> str:
    """Markdown of the results in a folder, in the order of the measurements."""
    files = [folder / f"{each.name}.json" for each in measurements]
    results = [json.loads(f.read_text(encoding="utf-8")) for f in files if f.is_file()]
    if not results:
        return _INTRO + _NOTHING
    abouts = {each.name: each.about for each in measurements}
    missing = [
        each.name for each, file in zip(measurements, files, strict=True) if not file.is_file()
    ]
    parts = [_INTRO]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    parts += [section(result, abouts[result["name"]]) for result in results]
    return "\n".join(parts)


def section(result: Result, about: str) -> str:
    """Markdown of one result."""
    machine = result.get("machine", {})
    lines = [f"## {result['name']}: {about}", ""]
    where = f"{machine.get('device')}, Python {machine.get('python')}, {machine.get('packages')}"
    took = f", {result['seconds']} s in all" if "seconds" in result else ""
    lines += [f"{result['began']} on {where}{took}.", ""]
    if isinstance(result.get("error"), str):
        lines += ["Failed:", "", "```", result["error"].strip(), "```", ""]
    if "stopped" in result:
        lines += [
            f"Stopped after {result['stopped']} s; the rows are those measured until then.",
            "",
        ]
    if "ratio" in result:
        said = f"{_number(result['ratio'])} times: {result['ours']}, {result['other']}."
        lines += [said, ""]
    for title, rows in _OWN.get(result["name"], _plain)(result):
        lines += [*([f"{title}:", ""] if title else []), *_table(rows), ""]
    return "\n".join(lines)


def _plain(result: Result) -> Iterator[tuple[str, list[Result]]]:
    if rows := result.get("rows"):
        yield "", rows


def _attention(result: Result) -> Iterator[tuple[str, list[Result]]]:
    for case in result.get("released", ()):
        heads = f"{case['heads']} heads of {case['head_dim']}, {case['kv_heads']} of keys"
        heads += ", causal" if case["causal"] else ""
        yield f"{case['name']}, {case['case']}, {heads}; auto is {case['auto']}", case["rows"]
    if "packed" in result:
        rows: list[Result] = []
        for row in result["packed"]:
            told = {name: row[name] for name in ("auto", "dense")}
            ms = {n: x.get("ms", x.get("error") or x.get("cannot")) for n, x in told.items()}
            rows.append({"case": row["case"], "auto is": row["auto is"], **ms})
        yield "Rows as the tiny preset packs them, milliseconds", rows


def _sim(result: Result) -> Iterator[tuple[str, list[Result]]]:
    for backend, kinds in result.get("figures", {}).items():
        rows: list[Result] = []
        for kind, rated in kinds.items():
            if isinstance(rated, str):
                rows.append({"what": kind, "error": rated})
            else:
                rows += [{"what": kind, "batch or shading": at, **row} for at, row in rated.items()]
        yield backend, rows


def _pi05(result: Result) -> Iterator[tuple[str, list[Result]]]:
    for what in ("training", "sampling"):
        rated = result.get(what, {})
        yield what, [{"who": who, **row} for who, row in rated.items()]


_OWN: dict[str, Callable[[Result], Iterator[tuple[str, list[Result]]]]] = {
    "attention": _attention,
    "sim": _sim,
    "pi05": _pi05,
}
"""Tables of a result by title, as the benchmark of that name lays out its rows."""


def _table(rows: Sequence[Result]) -> list[str]:
    """Markdown of rows, with a column for each key that holds a number or a text in some row."""
    plain = (str, int, float, bool)
    keys = list(dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, plain)))
    lines = [" | ".join(keys), " | ".join("---" for _ in keys)]
    lines += [" | ".join(_cell(row.get(key)) for key in keys) for row in rows]
    return [f"| {line} |" for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return _number(value)
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
