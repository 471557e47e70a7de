"""Predict a training run on machines you have not rented yet: the fastest mesh, memory, time, cost,
and how often to save.

    python -m tools.plan --preset pi05 --rows 8192 --gpus 1024 --gpu h100
    python -m tools.plan --preset pi05 --rows 256 --gpus 8 --precisions bf16 fp8 --out plan.md
    python -m tools.plan --preset groot --rows 4096 --cluster mine.json --dataset-frames 100000000
    python -m tools.plan --preset pi05 --rows 8192 --gpus 1024 --scaling scaling.svg
    python -m tools.plan --preset pi05 --gpus 8 --compile --explain

The command predicts every choice of mesh, micro-batches and remat, and ranks those that fit. For
the assumptions, and how far to trust them, see docs/planning.md.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.box import SIMPLE
from rich.table import Table

from models import Layout
from models.files.terminal import Console, guard_tracebacks, harmless
from models.inputs.packed_batch import PackedBatch, pack
from models.layers.layers import Remat
from models.layers.pipeline import Pipeline
from models.model import ModelConfig, QuantizedTrainable, build_model, require, rules_of
from parallel.mesh import MeshConfig
from parallel.optimizer import OptimizerConfig
from parallel.planning.cluster import Cluster, make_cluster, read_cluster
from parallel.planning.communication import seconds
from parallel.planning.deviceless import CompiledStep, compile_step, devices
from parallel.planning.explain import Explanation
from parallel.planning.explain import explain as explained
from parallel.planning.predict import Choice, Precision, Prediction, TrainingTask, search
from parallel.planning.reliability import Recovery, daly, goodput, mean_time_between_failures
from parallel.planning.report import as_json as explained_as_json
from parallel.planning.report import show
from parallel.planning.scaling import curve
from tools.command_line.options import cli
from tools.recipes.presets import load_preset
from tools.recipes.scaling import SIZES, markdown, write

_KEYS = 64
"""Keys of a block that attention visits or skips as one."""
_CAPABILITY = {"a100": 8.0, "b200": 10.0}


@dataclass(frozen=True)
class PlannedRun:
    """Training run to plan."""

    preset: str = "pi05"
    """Preset, as in tools.train."""
    rows: int = 0
    """Rows of the global batch; 0: 8 per GPU."""
    samples: int = 0
    """Samples that fill a row; 0: as in the preset."""
    cameras: int = 2
    """Cameras per sample."""
    text: int = 60
    """Text tokens per sample, including those of the state."""
    unroll: bool = False
    """Compile the layers one after the other, not as a loop (model.compute.unroll)."""
    targets: int = 64
    """Places per sample for the tokens that a model with cross-entropy losses predicts, where
    model.targets leaves the number to the data."""
    dataset_frames: int = 0
    """Samples in an epoch, to predict its hours and cost."""
    save_seconds: float = 5.0
    """Seconds for which a save blocks the run."""
    restart_seconds: float = 600.0
    """Seconds from an interruption to the next step."""

    @property
    def recovery(self) -> Recovery:
        """Overheads of the run; raises ValueError if they make no sense."""
        return Recovery(self.save_seconds, self.restart_seconds)


@dataclass(frozen=True)
class Machines:
    """Machines to plan for."""

    gpus: int = 8
    gpu: str = "h100"
    """a100, h100, h200 or b200; describe any other GPU in a --cluster file."""
    node_gpus: int = 8
    nic_gbps: float = 400
    """Network bandwidth of each GPU, Gbit/s."""
    price_per_gpu_hour: float | None = None
    cluster: Path | None = None
    """JSON file of a `parallel.planning.cluster.Cluster`, instead of the options above."""

    def read(self) -> Cluster:
        """The cluster described; raises ValueError or FileNotFoundError."""
        if self.cluster is None:
            return make_cluster(
                self.gpu, self.gpus, self.node_gpus, self.nic_gbps, self.price_per_gpu_hour
            )
        found = read_cluster(self.cluster)
        return (
            found
            if self.price_per_gpu_hour is None
            else replace(found, price=self.price_per_gpu_hour)
        )


def make_task(run: PlannedRun, cluster: Cluster) -> TrainingTask:
    """The training task of a preset, whose kernels are those of the cluster's chip.

    Raises:
      ValueError, FileNotFoundError: there is no such preset.
    """
    config, optimizer, layout = _read(run)
    blank = jax.eval_shape(lambda: pack([[]], layout))

    def batch(rows: int) -> PackedBatch:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), blank)

    return TrainingTask(
        model=lambda remat, precision: QuantizedTrainable(_model(config, remat, precision)),
        batch=batch,
        optimizer=replace(optimizer, decay_steps=optimizer.warmup_steps + 1),
        rules=rules_of(config.build()),
        stacks=require(config, "stacks", "tools.plan")(layout),
        rows=run.rows or 8 * cluster.devices,
        samples=layout.samples,
        trips=math.ceil(layout.prefix / layout.samples / _KEYS) + 1,
        capability=_CAPABILITY.get(cluster.chip.name, 9.0),
        pipelined=getattr(config, "pipelined", ()),
    )


def plan(
    run: PlannedRun, machines: Machines, precisions: Sequence[Precision], remats: Sequence[Remat]
) -> tuple[TrainingTask, Cluster, list[Prediction]]:
    """The task, the cluster, and all choices that fit, fastest first; raises as `search` does."""
    cluster = machines.read()
    task = make_task(run, cluster)
    return task, cluster, search(task, cluster, remats, precisions)


def describe(run: PlannedRun, cluster: Cluster, found: Prediction) -> dict[str, Any]:
    """A prediction as JSON, with its cost and how often to save."""
    recovery = run.recovery
    mtbf = mean_time_between_failures(cluster.devices, cluster.failures)
    interval = daly(recovery.save, mtbf)
    share = goodput(interval, recovery, mtbf)
    hours = run.dataset_frames / found.samples_per_second / share / 3600 if share else math.inf
    choice = found.choice
    return {
        "mesh": dict(choice.sizes),
        "accumulation": choice.accumulation,
        "microbatches": choice.microbatches,
        "remat": choice.remat,
        "precision": choice.precision,
        "memory_bytes": found.bytes,
        "memory": found.memory,
        "flops": found.flops,
        "collectives": [
            {**c._asdict(), "seconds": seconds(c, choice.sizes, cluster)} for c in found.collectives
        ],
        "parts": found.parts,
        "step_seconds": found.step,
        "mfu": found.mfu,
        "samples_per_second": found.samples_per_second,
        "save_every_seconds": interval,
        "goodput": share,
        "epoch_hours": hours if run.dataset_frames else None,
        "epoch_cost": (
            hours * cluster.devices * cluster.price
            if run.dataset_frames and cluster.price is not None
            else None
        ),
    }


_HEADINGS = (
    "mesh", "acc", "remat, dtype", "GiB", "step s", "exposed", "MFU", "samples/s",
    "TFLOP", "GB of collectives", "epoch h", "epoch cost", "save every", "goodput",
)  # fmt: skip
_SHOWN = 8
"""Columns of the terminal's table."""


def cells(row: dict[str, Any]) -> list[str]:
    """A described prediction as the table shows it."""
    mesh = " ".join(f"{axis}={n}" for axis, n in row["mesh"].items() if n > 1) or "1"
    by_axis: dict[str, float] = {}
    for c in row["collectives"]:
        by_axis[c["axis"]] = by_axis.get(c["axis"], 0) + c["bytes"]
    hours, cost = row["epoch_hours"], row["epoch_cost"]
    return [
        mesh,
        str(row["accumulation"]),
        f"{row['remat']} {row['precision']}",
        f"{row['memory_bytes'] / 2**30:.1f}",
        f"{row['step_seconds']:.3f}",
        f"{row['parts']['exposed communication'] / row['step_seconds']:.1%}",
        f"{row['mfu']:.1%}",
        f"{row['samples_per_second']:,.0f}",
        f"{row['flops'] / 1e12:,.0f}",
        ", ".join(f"{axis} {size / 1e9:.1f}" for axis, size in by_axis.items()) or "0",
        "" if hours is None else f"{hours:,.2f}",
        "" if cost is None else f"{cost:,.0f}",
        f"{row['save_every_seconds'] / 60:.0f} min",
        f"{row['goodput']:.1%}",
    ]


def main(
    run: tyro.conf.OmitArgPrefixes[PlannedRun],
    machines: tyro.conf.OmitArgPrefixes[Machines],
    precisions: tuple[Precision, ...] = ("bf16",),
    remats: tuple[Remat, ...] = ("none", "dots", "full"),
    top: int = 10,
    out: Path | None = None,
    scaling: Path | None = None,
    compile_best: Annotated[bool, tyro.conf.arg(name="compile")] = False,
    explain: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Rank the ways to run a training task on a cluster.

    Args:
      precisions: bf16, fp8 (delayed scaling), f32.
      remats: what may be recomputed in the backward pass.
      top: number of rows in the table.
      out: also write a file: all choices that fit (.json), or the table (.md, .html).
      scaling: instead, draw throughput from 8 to 10,240 GPUs to this file (.svg,
        .png), with the table beside it as Markdown and JSON; the rows per GPU stay
        the same.
      compile_best: also compile the best choice for the chip, for its exact memory
        and collectives (extra `plan`; a minute or more, with JAX_PLATFORMS=cpu).
      explain: also read the compiled program, kernel by kernel: part of the model,
        FLOPs, bytes, seconds by the same roofline, what waits for memory, moves
        and casts.
      as_json: print JSON instead of a table.
    """
    console = Console(stderr=as_json)
    cluster, recovery = machines.read(), run.recovery
    _check_path("--out", out, ".json", ".md", ".html")
    _check_path("--scaling", scaling, ".svg", ".png")
    if scaling is not None and (out or as_json or compile_best or explain):
        raise ValueError(
            "--scaling writes a figure, its table and its JSON; leave out --out, --json, --compile "
            "and --explain."
        )
    if compile_best or explain:
        devices(cluster.chip.name)
    task = make_task(run, cluster)
    if scaling is not None:
        points = curve(task, cluster, SIZES, recovery, remats, precisions)
        console.print(write(points, f"{run.preset} on {cluster.chip.name}", scaling, cluster))
        return
    found = search(task, cluster, remats, precisions)
    rows = [describe(run, cluster, one) for one in found]
    explanation = None
    if compile_best or explain:
        step = compiled(run, task, cluster, found[0].choice)
        rows[0]["compiled"] = _compiled(step)
        if explain:
            explanation = explained(step.program, step.mesh, cluster)
            rows[0]["explained"] = explained_step(explanation, found[0])
    if out is not None:
        _write(out, rows, top)
    if as_json:
        print(json.dumps(rows[:top]))
        return
    title = (
        f"{run.preset}: {task.rows:,} rows of {task.samples:.1f} samples on {cluster.devices:,} "
        f"{cluster.chip.name}; {len(found):,} choices fit"
    )
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for number, heading in enumerate(_HEADINGS[:_SHOWN]):
        table.add_column(heading, no_wrap=number > 0, justify="right" if number > 2 else "left")
    for row in rows[:top]:
        table.add_row(*cells(row)[:_SHOWN])
    console.print(table)
    _details(rows[0], console)
    if explanation is not None:
        show(explanation, console)


def compiled(run: PlannedRun, task: TrainingTask, cluster: Cluster, best: Choice) -> CompiledStep:
    """The step of a choice, compiled for the chip.

    Raises:
      ImportError: the compiler is not installed (extra `plan`).
      FileNotFoundError: the compiler has no description of the chip.
    """
    node = min(cluster.node, cluster.devices)
    config, _, layout = _read(run)
    if best.microbatches > 1:
        config = config.computing(pipeline=Pipeline(best.microbatches))
    return compile_step(
        QuantizedTrainable(_model(config, best.remat, best.precision)),
        task.optimizer,
        task.rules,
        MeshConfig(*best.mesh),
        layout,
        task.rows,
        accumulation=best.accumulation,
        target=cluster.chip.name,
        topology=f"1x{cluster.devices // node}x{node}",
    )


def explained_step(explanation: Explanation, predicted: Prediction) -> dict[str, Any]:
    """A program's report as JSON, with its `whole_step`."""
    return explained_as_json(explanation) | whole_step(explanation.seconds, predicted)


def whole_step(seconds: float, predicted: Prediction) -> dict[str, float]:
    """Step time and MFU of a program that takes `seconds`, with the prediction's host time and its
    wait for the slowest device."""
    waiting = predicted.step / (predicted.step - predicted.parts["slowest device"])
    step = (seconds + predicted.parts["host"]) * waiting
    return {"step_seconds": step, "mfu": predicted.mfu * predicted.step / step}


def _compiled(report: CompiledStep) -> dict[str, Any]:
    """Bytes held, FLOPs, and bytes sent by kind of collective and axes."""
    sent = {f"{kind} {'+'.join(axes)}": size for (kind, _, axes), size in report.sent.items()}
    return {"memory_bytes": report.memory.peak, "flops": sum(report.flops.values()), "sent": sent}


def _model(config: ModelConfig, remat: Remat, precision: Precision) -> Any:
    dtype = "float32" if precision == "f32" else "bfloat16"
    fp8 = "delayed" if precision == "fp8" else "none"
    if (dtype, fp8) != (config.compute.dtype, config.compute.fp8):
        config = config.computing(dtype=dtype, fp8=fp8)
    if remat != "none" or hasattr(config, "recomputing"):
        config = require(config, "recomputing", f"remat '{remat}'")(remat)
    return build_model(config)


def _read(run: PlannedRun) -> tuple[ModelConfig, OptimizerConfig, Layout]:
    """A preset's model and optimizer, and rows that the run's samples fill without a gap."""
    preset = load_preset(run.preset)
    samples = run.samples or preset.rows.samples
    model = preset.model.computing(unroll=True) if run.unroll else preset.model
    if model.cross_entropies and not model.targets:
        model = model.changed(targets=run.targets)
    images, text = samples * run.cameras, samples * run.text
    counts = {"samples": samples, "images": images, "text": text, "targets": model.targets}
    empty = model.layout(prefix=0, **counts)
    places = samples * int(empty.prefix_length(run.cameras, run.text))
    return model, preset.optimizer, replace(empty, prefix=places)


def _details(best: dict[str, Any], console: Console) -> None:
    """Prints details of the table's first row that the table has no room for."""
    step = best["step_seconds"]
    spent = ", ".join(f"{what} {s / step:.1%}" for what, s in best["parts"].items() if s)
    held = ", ".join(f"{what} {size / 2**30:.1f}" for what, size in best["memory"].items())
    lines = [f"First row: {best['flops'] / 1e12:,.0f} TFLOP per GPU; its step time: {spent}.",
             f"Its memory in GiB: {held}."]  # fmt: skip
    if best["microbatches"] > 1:
        lines.append(f"Train it with --model.compute.pipeline.microbatches {best['microbatches']}.")
    lines += [
        f"{c['kind']} along {c['axis']}: {c['bytes'] / 1e9:.2f} GB, {c['seconds'] * 1e3:.1f} ms."
        for c in best["collectives"]
    ]
    if best["epoch_hours"] is not None:
        cost = "" if best["epoch_cost"] is None else f" and costs {best['epoch_cost']:,.0f}"
        lines.append(f"An epoch takes {best['epoch_hours']:,.2f} h{cost}.")
    if exact := best.get("compiled"):
        sizes = ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in exact["sent"].items())
        share = exact["memory_bytes"] / best["memory_bytes"]
        lines.append(
            f"Compiled: {exact['memory_bytes'] / 2**30:.1f} GiB ({share:.0%} of the prediction); "
            f"each GPU sends {sizes}."
        )
    if program := best.get("explained"):
        lines.append(
            "By the kernels of the compiled program, a step takes "
            f"{program['step_seconds']:.3f} s, MFU {program['mfu']:.1%}; the plan predicts "
            f"{step:.3f} s and {best['mfu']:.1%}."
        )
    minutes = best["save_every_seconds"] / 60
    lines.append(f"Save every {minutes:.0f} min; goodput {best['goodput']:.1%}.")
    console.print("\n".join(lines))


def _check_path(option: str, path: Path | None, *endings: str) -> None:
    if path is None:
        return
    if path.suffix not in endings:
        said = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise ValueError(f"{option} is {path}; its name must end in {said}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{option} is {path}, but the folder {path.parent} does not exist; create it."
        )


def _write(path: Path, rows: Sequence[dict[str, Any]], top: int) -> None:
    shown = [cells(row) for row in rows[:top]]
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".md":
        path.write_text(markdown(_HEADINGS, shown))
    else:
        lines = [
            "".join(f"<{tag}>{cell}</{tag}>" for cell in line)
            for tag, line in (("th", _HEADINGS), *(("td", line) for line in shown))
        ]
        path.write_text(f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>\n")


if __name__ == "__main__":
    guard_tracebacks()
    try:
        cli(main, prog="python -m tools.plan", description=__doc__)
    except (ValueError, FileNotFoundError, ImportError) as error:
        sys.exit(harmless(f"error: {error}"))
