"""The command `python -m tools.data import`: recordings of other formats as a LeRobot dataset."""

from pathlib import Path
from typing import Annotated

import tyro

from data.errors import DatasetError
from data.lerobot.growing import is_growing
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from models.files.terminal import Console, counted, say
from tools.command_line.bars import steps
from tools.command_line.ending import in_a_line
from tools.datasets.place import ALONE, LakeOptions, lake

_MOST_SHOWN = 20
"""Most names of data that a layout leaves out."""
RecordingPaths = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH …")]


def import_command(
    paths: RecordingPaths,
    layout: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")],
    out: Annotated[Path, tyro.conf.arg(metavar="NEW")],
    task: str = "",
    fps: int | None = None,
    robot: str = "",
    only: str = "",
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    where: Annotated[LakeOptions, tyro.conf.arg(name="")] = ALONE,
) -> None:
    """Make a LeRobot dataset (v3.0) from recordings in other formats: HDF5, zarr, MCAP, ROS bags,
    images with a CSV, or RLDS. Needs `pip install -e '.[import]'`.

    Args:
        paths: Files of recordings, or folders of them.
        layout: Mapping of recordings to columns and cameras: aloha, robomimic, libero,
            diffusion_policy, umi, rlds, or a file as described in docs/importing.md.
        out: Folder to create for the dataset.
        task: Instruction of all episodes, instead of the layout's.
        fps: Frames per second, instead of the layout's.
        robot: Name of the robot, instead of the layout's.
        only: HDF5: read the episodes that a list in the file names, such as mask/train, or those
            whose attribute is true, such as @success.
        resume: Resume an import that was interrupted; give the same recordings and options.
        where: Work on a cluster, and a catalogue.
    """
    read, console = read_layout(layout, task=task, fps=fps, robot=robot, only=only), Console()
    kept = "Finished episodes are kept; continue with --resume."
    made = lake(where, console, paths, recorded=True)
    with in_a_line(kept, writing=out), made as note, steps() as report:
        try:
            found = import_dataset(paths, out, read, resume=resume, progress=report)
        except DatasetError as error:
            if not is_growing(out):
                raise
            raise ValueError(f"{error} {kept}") from None
        note(out)
    say(
        console,
        f"{out}: LeRobot v3.0, {counted(found.episodes, 'episode')}, "
        f"{counted(found.frames, 'frame')} of "
        f"{found.recordings} recordings"
        + f"; gaps of {found.left_out:.1f} s in all were cut out" * (found.left_out > 0)
        + "; the import was already complete" * found.complete
        + ".",
    )
    if found.unused:
        more = len(found.unused) - _MOST_SHOWN
        names = ", ".join(found.unused[:_MOST_SHOWN]) + f" and {more} more" * (more > 0)
        say(console, f"The layout takes nothing from {names}.")
