"""List the checkpoints of a run; verify, compare, export and push checkpoints.

Arrays are read a piece at a time, so any machine with enough disk space can compare or export a
checkpoint of any size.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from flax.traverse_util import flatten_dict
from huggingface_hub import split_state_dict_into_shards_factory
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from models.checkpoints import digests, own
from models.checkpoints.card import model_card
from models.checkpoints.remote import local, needed
from models.checkpoints.safetensors_format import write_file
from models.checkpoints.sources import CheckpointSource, open_orbax
from models.files.terminal import Console, guard_tracebacks, say
from parallel.checkpoint import CheckpointWriter, copy
from parallel.monitor.metrics import read_metrics
from tools.command_line.commands import Commands
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.command_line.push import PushOptions, licence, push
from tools.command_line.versions import own_version
from tools.runs.judged import evaluations_in, read_rates

Where = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_STEP")]
Url = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
ALONE = PushOptions()
Out = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]

_PIECE_BYTES = 64 * 2**20
_SHARD_BYTES = 5 * 10**9  # of a file, as on the Hugging Face hub

app = Commands()


@app.command(name="ls")
def ls_command(run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]) -> None:
    """List the checkpoints of a run: which are complete, set aside as damaged, or unfinished.

    Looks at the names and sizes of the files; `verify` reads the files.

    Args:
        run: A run's directory or its checkpoints folder.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    entries = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    if not entries:
        raise FileNotFoundError(f"{run} holds no checkpoints; give a run's directory.")
    losses = {line["step"]: line["loss"] for line in read_metrics(folder.parent) if "loss" in line}
    saved, table = set(own.steps(folder)), Table("Step", "Size", "Age", "Loss", "", box=SIMPLE_HEAD)
    for entry in sorted(entries, key=_number):
        number = _number(entry)
        if entry.name == str(number) and number in saved:
            found = digests.damage(entry, skip="") if digests.is_sealed(entry) else None
            sound = "no digests" if found is None else "complete"
            status = Text("damaged", "red") if found else Text(sound)
        else:
            aside = ".damaged" in entry.name
            status = Text("set aside", "red") if aside else Text("unfinished", "yellow")
        loss = losses.get(number - 1)
        table.add_row(
            entry.name,
            _bytes(sum(_sizes(entry))),
            _age(time.time() - entry.stat().st_mtime),
            "" if loss is None else f"{loss:.4g}",
            status,
        )
    Console().print(table)


@app.command(name="verify")
def verify_command(
    path: Where, all_steps: Annotated[bool, tyro.conf.arg(name="all")] = False
) -> None:
    """Read every byte of a checkpoint and compare it with what was saved; exits with code 1 if the
    checkpoint is damaged.

    Args:
        path: A run (its last checkpoint) or one numbered folder.
        all_steps: Verify all checkpoints of the run.
    """
    console, newest = Console(), own.find(path)
    paths = [newest]
    if all_steps:
        paths = [newest.parent / str(step) for step in own.steps(newest.parent)]
    damaged = 0
    for at in paths:
        begin = time.perf_counter()
        with console.status(f"Reading {at}"):
            found = digests.damage(at)
        damaged += bool(found)
        sizes = _sizes(at)
        told = f"{len(sizes)} files, {_bytes(sum(sizes))}, {time.perf_counter() - begin:.1f} s"
        state = Text("damaged", "red") if found else Text("good")
        say(console, f"{at}: ", state, f" ({told})", sep="")
        for sentence in found:
            say(console, f"  {sentence}")
    sys.exit(1 if damaged else 0)


@app.command(name="diff")
def diff_command(
    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
) -> None:
    """Show which arrays and config fields of two checkpoints differ; exits with code 1 if any do.

    Args:
        first: A run (its last checkpoint) or one numbered folder.
        second: Another one.
    """
    console = Console()
    with console.status("Verifying"):
        sources = [_open(own.find(path)) for path in (first, second)]
    table = Table(Column("Array", overflow="fold"), box=SIMPLE_HEAD)
    for heading in ("A", "B", "Largest difference", "Relative"):
        table.add_column(heading, no_wrap=heading != "Largest difference")
    names = sorted({name for source in sources for name in source.arrays})
    differences = [found for name in names if (found := _compare(name, *sources)) is not None]
    for each in differences:
        relative = each.largest / each.scale if each.scale else math.inf
        table.add_row(*astuple(each)[:3], f"{each.largest:.3g}", f"{relative:.3g}")
    if differences:
        console.print(table)
    configs = [flatten_dict(own.read_json(path, "config"), sep=".") for path in (first, second)]
    lines = [
        f"config {name}: {configs[0].get(name, 'absent')} → {configs[1].get(name, 'absent')}"
        for name in sorted(set(configs[0]) | set(configs[1]))
        if configs[0].get(name, "absent") != configs[1].get(name, "absent")
    ]
    for line in lines:
        say(console, line)
    console.print(
        f"{len(differences)} of {len(names)} arrays and {len(lines)} fields of the config differ."
    )
    sys.exit(1 if differences or lines else 0)


@app.command(name="export")
def export_command(
    path: Where,
    out: Out,
    which: Literal["ema", "params"] = "ema",
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint as safetensors, under our names with dots instead of
    slashes, and the run's config and assets beside them.

    For the formats of other codes, use `python -m tools.convert_checkpoint`.

    Args:
        path: A run (its last checkpoint) or one numbered folder.
        out: Directory to write.
        which: Parameters to write: their running average (ema), or as trained (params).
        shard_bytes: Size in bytes beyond which several files with an index are written, as on the
            Hugging Face hub.
    """
    console, path = Console(), own.find(path)
    if out.is_dir() and any(out.glob("*.safetensors*")):
        raise ValueError(f"{out} already holds safetensors; give another directory.")
    with console.status("Verifying"):
        source = _open(path)
    held = {
        name.removeprefix(f"{which}/").replace("/", "."): name
        for name in sorted(source.arrays)
        if name.startswith(f"{which}/")
    }
    if not held:
        raise ValueError(
            f"{path} has no '{which}' parameters; set `--which` to ema or params, whichever was "
            "saved."
        )
    arrays = {name: source.arrays[saved] for name, saved in held.items()}
    dtypes = {name: array.dtype.numpy_dtype for name, array in arrays.items()}
    split = split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.size * array.dtype.numpy_dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    out.mkdir(parents=True, exist_ok=True)
    config = own.read_json(path, "config")
    metadata = {"format": "flax", "which": which, "step": path.name, "config": json.dumps(config)}
    for file, members in split.filename_to_tensors.items():
        with console.status(f"Writing {file}"):
            entries = {
                name: (source.shapes[held[name]], partial(source.read, held[name], ()))
                for name in members
            }
            write_file(out / file, entries, {name: dtypes[name] for name in members}, metadata)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name in ("config", "assets"):
        (out / f"{name}.json").write_text(json.dumps(own.read_json(path, name), indent=2) + "\n")
    files = len(split.filename_to_tensors)
    say(console, f"{out}: {which} of step {path.name} in {files} files.")


@app.command(name="seal")
def seal_command(path: Where) -> None:
    """Accept a checkpoint without digests as it is and write its digests. Damage from before cannot
    be detected.

    Args:
        path: A run (its last checkpoint) or one numbered folder.
    """
    path = own.find(path)
    if digests.is_sealed(path):
        raise ValueError(
            f"{path} already has digests; run `verify` to compare its files with them."
        )
    digests.write_digests(path, digests.digest_files(path, digests.names(path)))
    say(Console(), f"{path / digests.NAME}: written.")


@app.command(name="push")
def push_command(
    path: Where,
    url: Url,
    dataset: str | None = None,
    whole: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    options: Annotated[PushOptions, tyro.conf.arg(name="")] = ALONE,
) -> None:
    """Upload a checkpoint, with a card, to the Hugging Face hub or a bucket, from where
    every --checkpoint and --init can load it.

    Args:
        path: A run (its last checkpoint) or one numbered folder; or a folder of openpi's, LeRobot's
            or NVIDIA's, which is uploaded as is.
        url: hf://ORG/NAME, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.
        dataset: Dataset that it was trained on, for the card (hf://ORG/NAME).
        whole: Include the optimizer's state, to continue training from; otherwise only what is
            needed to act.
        options: Licence, branch, and treatment of what is there already.
    """
    console, path = Console(), local(path)
    kind = licence(options, console)
    with TemporaryDirectory() as made:
        try:
            found, folder = own.find(path), Path(made)
        except FileNotFoundError:
            config, step, folder = {}, None, path
            there = [p for p in path.rglob("*") if p.is_file()]
            names = needed(str(path), [p.relative_to(path).as_posix() for p in there])
            scores: dict[str, Any] = {}
        else:
            config, step = own.read_json(found, "config"), int(found.name)
            with console.status(f"Reading {found}"):
                _stage(found, folder / "checkpoints", whole)
            names = [
                f"checkpoints/{step}/{n}" for n in digests.names(folder / f"checkpoints/{step}")
            ]
            names.append(f"checkpoints/{step}/{digests.NAME}")
            scores = _evaluations(found.parent.parent, console)
        card = model_card(url, kind, config, step, scores, own_version(), dataset)
        page = push(folder, names, url, card, options, kind="model")
    say(console, f"Pushed {path} to {page}; load it with load_policy('{url}').")


def _stage(found: Path, folder: Path, whole: bool) -> None:
    """Puts into `folder` the checkpoint in the form in which it is pushed, as the only one."""
    if whole:
        copy(found, folder)
        return
    config, assets = (own.read_json(found, name) for name in ("config", "assets"))
    with CheckpointWriter(folder, config, assets) as writer:
        writer.save(int(found.name), {"ema": own.restore_params(found)}, {})


def _evaluations(run: Path, console: Console) -> dict[str, Any]:
    """Success rates of a run's evaluations, by suite: {policy: {"success", "episodes"}}; files that
    are damaged or another program's are left out, with a line on `console`."""
    found = {}
    for path in evaluations_in(run):
        try:
            suite, rates = read_rates(path)
        except (ValueError, OSError) as error:
            say(console, f"warning: the card leaves out an evaluation: {error}")
            continue
        found[suite] = {
            name: {"success": rate.value, "episodes": rate.trials} for name, rate in rates.items()
        }
    return found


def main() -> None:
    """Command line."""
    with in_a_line():
        cli(app, prog="python -m tools.checkpoint", description=__doc__)


@dataclass(frozen=True)
class Difference:
    """Difference of an array between two checkpoints: what each holds, the largest difference of an
    entry and the largest entry of the first; NaN where they cannot be compared."""

    name: str
    first: str
    second: str
    largest: float = math.nan
    scale: float = math.nan


def _compare(name: str, first: CheckpointSource, second: CheckpointSource) -> Difference | None:
    """None if both hold the same numbers; NaNs at the same place count as the same."""
    kinds = (_kind(first, name), _kind(second, name))
    if "absent" in kinds or first.shapes[name] != second.shapes[name]:
        return Difference(name, *kinds)
    largest = scale = 0.0
    for region in _regions(first.shapes[name]):
        a, b = (source.read(name, region).astype(np.float64) for source in (first, second))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0, np.abs(a - b))
        largest = float(np.maximum(largest, apart.max(initial=0)))  # NaN if there is one
        scale = float(np.fmax(scale, np.fmax.reduce(np.abs(a), axis=None, initial=0)))
    if largest == 0 and kinds[0] == kinds[1]:
        return None
    return Difference(name, *kinds, largest, scale)


def _open(path: Path) -> CheckpointSource:
    own.refuse(path, digests.damage(path))
    return open_orbax(path / "state")


def _kind(source: CheckpointSource, name: str) -> str:
    if name not in source.arrays:
        return "absent"
    shape = "×".join(map(str, source.shapes[name]))
    return f"{source.arrays[name].dtype.numpy_dtype} {shape}".strip()


def _regions(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Parts of an array along its first axis, of at most about 64 MiB as float64."""
    if not shape:
        yield ()
        return
    rows = max(1, _PIECE_BYTES // (8 * max(1, int(np.prod(shape[1:])))))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])),)


def _number(entry: Path) -> int:
    """The step in a folder's name, wherever it stands; -1 if there is none."""
    digits = entry.name.lstrip(".").partition(".")[0]
    return int(digits) if digits.isdigit() else -1


def _sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _age(seconds: float) -> str:
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < length:
            return f"{seconds:.0f} {unit}"
        seconds /= length
    return f"{seconds:.0f} d"


if __name__ == "__main__":
    guard_tracebacks()
    main()
