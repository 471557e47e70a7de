"""Scales of state and actions that a policy keeps from its training when it is fine-tuned on data
of its robot: with a small dataset's own statistics, the same motion would have other numbers than
the policy knows. The idea is openpi's `AssetsConfig`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from data.dataset import open_dataset
from data.frames import usual_columns
from data.mixture.mixed import Mixed, Scales
from data.mixture.mixture import RobotConfig
from data.mixture.outside import REACH, outside, require_near
from data.statistics.stats import compute, numeric_columns
from models import Embodiment, Normalizer, Scaling
from models.checkpoints import own
from models.checkpoints.remote import local
from models.checkpoints.statistics_file import read_scales, scale_of
from models.files.foreign_json import section
from models.files.terminal import Console
from models.formats import ReadScales, formats, require_scaling
from models.load import inspect_checkpoint

_STATS = "norm_stats.json"
_PROCESSOR = "policy_preprocessor.json"


class Scalings(NamedTuple):
    """Kinds of scaling of a robot's states and actions."""

    state: Scaling
    actions: Scaling


_Reader = Callable[[RobotConfig, Scalings], Scales]


def kept_scales(
    path: Path, robots: Sequence[RobotConfig], scalings: Mapping[str, Scalings]
) -> dict[str, Scales]:
    """The scales of every robot by its name: those at `path` for the same name, or the only ones
    there.

    Args:
      path: a checkpoint of ours, of openpi's (with assets), of LeRobot's (with its processor) or of
        NVIDIA's (with experiment_cfg), a LeRobot dataset, or a file of statistics: norm_stats.json,
        policy_preprocessor.json or stats.json.
      scalings: kinds of scaling by robot; what a file records must be of that kind.

    Raises:
      FileNotFoundError: nothing there has statistics.
      ValueError: they are of another kind, of several robots of other names, of actions relative to
        other state dims, or damaged.
    """
    sources, found = dict(_sources(path)), {}
    for robot in robots:
        if robot.name in sources:
            read = sources[robot.name]
        elif len(sources) == 1:
            (read,) = sources.values()
        else:
            raise ValueError(
                f"{path} has statistics of {sorted(sources)}, but none of '{robot.name}'; give "
                "the file of one of them, or set 'embodiment' to its name in a mixture."
            )
        found[robot.name] = read(robot, scalings[robot.name])
    return found


def show_outside(
    mixed: Mixed, scalings: Mapping[str, Scalings], path: Path, console: Console
) -> None:
    """Prints how far each dim of the data lies outside the kept scales.

    Raises:
      ValueError: a dim would have enormous values in these scales.
    """
    found = [
        x
        for n, robot in enumerate(mixed.embodiments)
        for x in outside(mixed, n, *scalings[robot.name])
    ]
    table = Table(
        *("robot", "dim", "data", "range of the statistics", "outside", "largest excess"),
        title=f"This data on the scales of {path}",
        caption=f"Range: ±{REACH['quantile']:g} scale unit of quantiles and min-max, "
        f"±{REACH['z-score']:g} of z-scores.",
    )
    for x in found:
        table.add_row(
            x.robot,
            f"{x.feature}[{x.dim}]",
            f"{x.low:.4g}..{x.high:.4g}",
            f"{x.offset - x.reach * x.scale:.4g}..{x.offset + x.reach * x.scale:.4g}",
            f"{x.share:.1%}",
            f"{x.excess:.3g}" if x.excess else "",
        )
    console.print(table)
    require_near(found, str(path))


def _sources(path: Path) -> Iterator[tuple[str, _Reader]]:
    """Readers of the statistics at `path`, by the robot's name, or "" if they name no robot."""
    path = local(path, "statistics")
    if path.is_file() and path.name != _PROCESSOR and path.suffix == ".json":
        yield "", partial(_of_format, partial(read_scales, path))
        return
    folder = path.parent if path.is_file() else path
    known = next(filter(None, (kind.statistics(folder) for kind in formats())), {})
    if known:
        for robot, read in known.items():
            yield robot, partial(_of_format, read)
    elif (folder / "meta/stats.json").is_file():
        yield "", partial(_of_format, partial(read_scales, folder / "meta/stats.json"))
    elif (folder / "meta/info.json").is_file():
        yield "", partial(_of_format, partial(_computed, folder))
    else:
        yield from _in_checkpoint(path)


def _in_checkpoint(path: Path) -> Iterator[tuple[str, _Reader]]:
    try:
        found = own.find(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} has no statistics; give a run or checkpoint of ours, openpi's with "
            f"assets/ROBOT/{_STATS}, LeRobot's with {_PROCESSOR}, or one of these files."
        ) from None
    processor = inspect_checkpoint(found).processor
    if processor is None:
        raise ValueError(f"{found} has no processor, and so no scales; give another checkpoint.")
    for embodiment in processor.embodiments:
        yield embodiment.name, partial(_of_ours, found, embodiment)


def _of_format(read: ReadScales, robot: RobotConfig, scalings: Scalings) -> Scales:
    return Scales(*read(scalings.state, scalings.actions))


def _computed(path: Path, state: Scaling, actions: Scaling) -> tuple[Normalizer, Normalizer]:
    """Scales from the frames of a dataset without a stats.json, such as LeRobot's of v2.1."""
    dataset = open_dataset(path)
    columns = usual_columns(numeric_columns(dataset))
    if not all(columns):
        raise ValueError(
            f"{path} has the columns {list(dataset.column_names)}, and none of a usual name for "
            f"{'actions' if columns[0] else 'states'}; give a file of statistics."
        )
    found = compute(dataset, names=[*columns[0], *columns[1]])

    def scale(names: Sequence[str], kind: Scaling) -> Normalizer:
        parts = [found[name] for name in names]
        joined = {of: np.concatenate([part[of] for part in parts]).tolist() for of in parts[0]}
        return scale_of(joined, str(path), ", ".join(names), kind)

    return scale(columns[0], state), scale(columns[1], actions)


def _of_ours(path: Path, kept: Embodiment, robot: RobotConfig, scalings: Scalings) -> Scales:
    told = section(own.read_json(path, "config"), "data", str(path))
    for what, wanted in (("state", scalings.state), ("action", scalings.actions)):
        require_scaling(str(path), what, told.get(f"{what}_scaling", "quantile"), wanted)
    if any(x >= 0 for x in (*kept.relative, *robot.relative)) and kept.relative != robot.relative:
        raise ValueError(
            f"{path}: its actions are relative to state dims {list(kept.relative)}, but those "
            f"of '{robot.name}' to {list(robot.relative)}; set the same dims in a mixture."
        )
    return Scales(kept.state, kept.actions)
