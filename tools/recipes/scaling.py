"""The page that shows how a run would scale: a figure, and beside it a table in Markdown and its
numbers as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.markdown import Markdown

from parallel.planning.cluster import Cluster
from parallel.planning.predict import Prediction
from parallel.planning.scaling import DAYS, SEEDS, ScalingPoint

SIZES = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 10_240)
"""Devices of the points."""


def write(points: Sequence[ScalingPoint], title: str, path: Path, cluster: Cluster) -> Markdown:
    """Draws the figure (.svg, .png) at `path` and writes the page, which is returned, and the JSON
    beside it."""
    draw(points, title, path)
    best, per = points[-1].best, cluster.failures * 1e5
    text = (
        f"# Scaling of {title}, predicted\n\n"
        "This page predicts throughput and goodput as the number of GPUs grows and rows per GPU "
        f"stay the same ({best.samples_per_second * best.step / points[-1].devices:.0f} samples "
        f"per GPU in each step). `python -m tools.plan ... --scaling {path.name}` writes it. The "
        f"prediction is for NICs of {cluster.across.bandwidth * 8e-9:.0f} Gb/s per GPU, nodes of "
        f"{cluster.node}, step times that vary by {cluster.jitter:.0%}, and {per:.2f} "
        f"interruptions per 100,000 GPU-hours. {SEEDS} runs of {DAYS} days are simulated for each "
        "size. For the assumptions, see [planning](../planning.md).\n\n"
        f"![Throughput and efficiency]({path.name})\n\n"
        f"{markdown(_HEADINGS, [_row(point) for point in points])}"
    )
    path.with_suffix(".md").write_text(text)
    told = json.dumps(as_json(points, title, cluster), indent=1)
    path.with_suffix(".json").write_text(f"{told}\n")
    return Markdown(text)


def as_json(points: Sequence[ScalingPoint], title: str, cluster: Cluster) -> dict[str, Any]:
    """The points by number of devices, and the assumptions about the cluster."""
    return {
        "title": title,
        "nic_gbps": cluster.across.bandwidth * 8e-9,
        "node": cluster.node,
        "jitter": cluster.jitter,
        "interruptions_in_100k_gpu_hours": cluster.failures * 1e5,
        "simulated_days": DAYS,
        "simulated_runs": SEEDS,
        "rows": {
            point.devices: {
                "devices": point.devices,
                "mesh": _mesh(point.best),
                "remat": point.best.choice.remat,
                "precision": point.best.choice.precision,
                "step_seconds": point.best.step,
                "mfu": point.best.mfu,
                "samples_per_second": point.best.samples_per_second,
                "samples_per_device": point.best.samples_per_second / point.devices,
                "efficiency": point.efficiency,
                "save_every_minutes": point.interval / 60,
                "goodput": point.goodput,
                "simulated": point.simulated,
                "simulated_range": [point.low, point.high],
                "interruptions": point.failures,
                "kept_per_second": point.best.samples_per_second * point.simulated,
            }
            for point in points
        },
    }


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(points: Sequence[ScalingPoint], title: str, path: Path) -> None:
    """Throughput over devices, ideal, predicted and with interruptions; and both efficiencies."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    devices = [p.devices for p in points]
    rate = [p.best.samples_per_second for p in points]
    ideal = [rate[0] / devices[0] * n for n in devices]
    left.loglog(devices, ideal, ":", color="grey", label="linear")
    left.loglog(devices, rate, "o-", label="steps")
    left.loglog(
        devices, [r * p.simulated for r, p in zip(rate, points, strict=True)], "s-",
        label="steps kept, interruptions simulated",
    )  # fmt: skip
    left.set(xlabel="GPUs", ylabel="samples per second", title=title)
    right.semilogx(devices, [p.efficiency for p in points], "o-", label="step efficiency")
    right.semilogx(devices, [p.simulated for p in points], "^-", label="goodput")
    right.fill_between(
        devices, [p.low for p in points], [p.high for p in points], alpha=0.2, color="C1"
    )
    both = [p.efficiency * p.simulated for p in points]
    right.semilogx(devices, both, "s-", label="both")
    right.set(xlabel="GPUs", ylabel=f"share of {devices[0]} GPUs' rate", ylim=(0.5, 1.02))
    for axes in (left, right):
        axes.set_xticks(devices[::2], [f"{n:,}" for n in devices[::2]])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


_HEADINGS = (
    "GPUs", "mesh", "step s", "MFU", "samples/s", "step efficiency", "save every",
    "goodput (Daly)", "goodput simulated (5–95 %)", "interruptions in 30 days", "samples/s kept",
)  # fmt: skip


def _row(point: ScalingPoint) -> list[str]:
    best = point.best
    return [
        f"{point.devices:,}",
        f"{_mesh(best)}, {best.choice.remat}, {best.choice.precision}",
        f"{best.step:.3f}",
        f"{best.mfu:.1%}",
        f"{best.samples_per_second:,.0f}",
        f"{point.efficiency:.1%}",
        f"{point.interval / 60:.0f} min",
        f"{point.goodput:.2%}",
        f"{point.simulated:.2%} ({point.low:.2%}–{point.high:.2%})",
        f"{point.failures:.1f}",
        f"{best.samples_per_second * point.simulated:,.0f}",
    ]


def _mesh(best: Prediction) -> str:
    return " ".join(f"{axis}={n}" for axis, n in best.choice.sizes.items() if n > 1)
