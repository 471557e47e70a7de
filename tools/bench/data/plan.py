"""The packing plan compared with grain's best-fit packer: how full rows get, and how fast.

Samples come from the same five datasets, ten million in all, into rows of the same sizes; grain
packs some of them, with all three budgets and with prefix places alone, which suits it best, and
the last rows that it closes do not count. A second result is, by number of ranks, how much more
attention costs the slowest rank than the mean, with a step's rows in the order of packing and in
the plan's order.
"""

import resource
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset
from rich.table import Table

from data.frames import Runs
from data.packing.balance import excess
from data.packing.plan import Plan, PlanSource
from models import Layout
from models.files.terminal import Console, track
from tools.bench.timing import timed
from tools.recipes.presets import PI05, TINY, RunConfig

_SAMPLES, _PEER_SAMPLES, _BINS = 10_000_000, 50_000, 1024
_ROWS, _EXCESS_STEPS = 256, 100
_RANKS = 8, 16, 32, 64, 128

_COLUMNS = {
    "rate": ("per s", "{:,.0f}"),
    "fill": ("fill", "{:.2%}"),
    "image slots": ("slots", "{:.2%}"),
    "text": ("text", "{:.2%}"),
    "samples a row": ("a row", "{:.2f}"),
}

Shape = tuple[str, list[PlanSource], Layout]


def mixture(samples: int, config: RunConfig, seed: int = 0) -> list[PlanSource]:
    """Five datasets with `samples` frames in all. Prompts have 5 to 60 tokens and, if the model
    reads the state as text, the most that a robot's 7 to 32 dims can take."""
    rng = np.random.default_rng(seed)
    sources = []
    for name, weight, share, cameras, dims, tasks, wordings in (
        ("kitchen", 0.37, 0.3, 1, 7, 20_000, 1),
        ("bench", 0.211, 0.1, 2, 8, 400, 2),
        ("droid", 0.1, 0.4, 3, 8, 30_000, 3),
        ("pair of arms", 0.29, 0.15, 2, 14, 40, 1),
        ("humanoid", np.pi / 100, 0.05, 3, 32, 10, 1),
    ):
        episodes = max(1, round(samples * share / 150))
        length = rng.integers(50, 251, episodes)
        text = rng.integers(5, 61, (tasks, wordings))
        text += 4 * dims if config.model.state_input == "text" else 0
        number = np.arange(episodes)
        runs = Runs(number, np.zeros_like(number), length, rng.integers(0, tasks, episodes))
        sources.append(PlanSource(name, weight, runs, np.full(episodes, cameras), text))
    return sources


def shapes(samples: int) -> Iterator[Shape]:
    """Rows as presets size them, and of fixed numbers of places."""
    large, small = mixture(samples, PI05), mixture(samples, TINY)
    yield "pi05", large, PI05.layout(large)
    yield "tiny", small, TINY.layout(small)
    for prefix in (2048, 4096):
        yield (
            f"{prefix} places",
            large,
            PI05.model.layout(prefix=prefix, samples=16, images=16),
        )


def planned(sources: list[PlanSource], layout: Layout, samples: int) -> dict[str, float]:
    """Plans `samples` draws step by step; returns rates, shares of each budget used, and memory."""
    before = _peak_memory()
    with timed() as making:
        plan = Plan(sources, layout, _ROWS)
    after, counts, rows, step = _peak_memory(), np.zeros(plan.kinds.shape[1], np.int64), 0, 0
    with timed() as planning:
        while counts.sum() < samples:
            drawn = plan.draws(step)
            counts += np.bincount(drawn.kind, minlength=len(counts))
            rows, step = rows + drawn.number, step + 1
    images, text = plan.kinds @ counts
    places = images * layout.tokens_per_image + text + counts.sum() * layout.state_tokens
    return {
        "rate": counts.sum() / planning.cpu,
        "fill": places / (rows * layout.prefix),
        "image slots": images / (rows * layout.images),
        "text": text / (rows * layout.text),
        "samples a row": counts.sum() / rows,
        "seconds to begin": making.cpu,
        "MB to begin": after - before,
        "MB while planning": _peak_memory() - after,
    }


def slowest(sources: list[PlanSource], layout: Layout) -> dict[str, dict[str, float]]:
    """Excess of the slowest rank's attention, mean and largest over 100 steps, by number of ranks:
    with rows in the order of packing, and in the plan's order."""
    steps, plain = range(_EXCESS_STEPS), Plan(sources, layout, _ROWS)
    found = {}
    for ranks in _RANKS:
        plan = Plan(sources, layout, _ROWS, ranks=ranks)
        before = [excess(plain.costs(step), ranks) for step in steps]
        with timed() as took:
            after = [plan.excess(step) for step in steps]
        found[str(ranks)] = {
            "as packed": float(np.mean(before)),
            "as packed, most": max(before),
            "ordered": float(np.mean(after)),
            "ordered, most": max(after),
            "ms a step": took.cpu / len(steps) * 1e3,
        }
    return found


def packed(
    sources: list[PlanSource], layout: Layout, budgets: Sequence[str], samples: int
) -> dict[str, float]:
    """The same for grain within some of the budgets, on randomly chosen samples."""
    plan = Plan(sources, layout, _ROWS)
    drawn = plan.draws(0, 0, -(-samples // plan.window) * plan.rows_per_window)
    chosen = np.random.default_rng(0).permutation(len(drawn.kind))[:samples]
    images, text = plan.kinds[:, drawn.kind[chosen]]
    lengths = {"prefix": layout.prefix_length(images, text), "images": images, "text": text}
    zeros = np.zeros(layout.prefix, np.int8)

    def sample(number: int) -> dict[str, np.ndarray]:
        return {name: zeros[: lengths[name][number]] for name in budgets}

    parent = grain.MapDataset.range(samples).map(sample)
    rows = BestFitPackIterDataset(
        parent.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={name: getattr(layout, name) for name in budgets},
        num_packing_bins=_BINS,
        max_sequences_per_bin=layout.samples,
    )
    with timed() as took:
        filled = [np.count_nonzero(row["prefix_segment_ids"]) for row in rows]
    return {
        "rate": samples / took.cpu,
        "fill": float(np.mean(filled[:-_BINS]) / layout.prefix),
    }


def run(
    console: Console, samples: int = _SAMPLES, peer_samples: int = _PEER_SAMPLES
) -> dict[str, Any]:
    """Samples planned per second of CPU over grain's, and both fills, for each shape."""
    results: dict[str, dict[str, Any]] = {}
    for name, sources, layout in track(list(shapes(samples)), "Packing", console=console):
        results[name] = {
            "row": vars(layout),
            "ours": planned(sources, layout, samples),
            "slowest": slowest(sources, layout),
            "grain": packed(sources, layout, ["prefix"], peer_samples),
            "grain, all": packed(sources, layout, ["prefix", "images", "text"], peer_samples),
        }
    table = Table("rows", "by", *(heading for heading, _ in _COLUMNS.values()))
    for name, result in results.items():
        for who in ("ours", "grain", "grain, all"):
            figures = result[who]
            cells = [f.format(figures[k]) if k in figures else "" for k, (_, f) in _COLUMNS.items()]
            table.add_row(name, who, *cells)
    console.print(table)
    table = Table("rows", "attention of the slowest rank", *map(str, _RANKS))
    for name, result in results.items():
        for order in ("as packed", "ordered"):
            figures = (f"+{own[order]:.2%}" for own in result["slowest"].values())
            table.add_row(name, order, *figures)
    console.print(table)
    ours, other = results["pi05"]["ours"], results["pi05"]["grain"]
    return {
        "ratio": ours["rate"] / other["rate"],
        "ours": f"{ours['rate']:,.0f} samples/s at {ours['fill']:.2%} fill",
        "other": f"{other['rate']:,.0f} samples/s at {other['fill']:.2%} fill by grain",
        "unit": "samples per second of CPU",
        "samples": samples,
        "shapes": results,
    }


def _peak_memory() -> float:
    """The most that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
