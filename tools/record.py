"""Record demonstrations of a suite's tasks, by its scripted expert or by a trained policy, as a
LeRobot v3.0 dataset.

    python -m tools.record --suite tabletop-lift --episodes 2048 --out datasets/lift
    python -m tools.record --suite metaworld --tasks reach-v3 drawer-open-v3 --out datasets/mt2
    python -m tools.record --suite libero_spatial --checkpoint runs/mine --out datasets/own

For each task, the first episodes that succeed are kept, in the order of their seeds; the others are
counted. An episode is on disk when it ends, and --resume continues an interrupted recording.
"""

import sys

from models.files.terminal import Console, counted, guard_tracebacks, say
from tools.command_line.bars import progress
from tools.command_line.ending import following, in_a_line
from tools.command_line.options import cli, current_options
from tools.recipes.recording import RecordConfig, record_dataset


def main(config: RecordConfig, console: Console) -> None:
    """Records with a progress bar and reports the result."""
    kept = "Finished episodes are kept; continue with --resume."
    with (
        progress("Recording", "episodes", digits=1, before="Starting", console=console) as report,
        in_a_line(kept, writing=config.out),
    ):
        summary = record_dataset(config, report)
    kept = counted(summary["kept"], "episode")
    made = f"{config.out}: {kept}, {counted(summary['frames'], 'frame')}"
    if summary["tried"] is None:
        console.print(f"{made}; the recording was already complete.")
        return
    lost = summary["tried"] - summary["kept"] - summary["failed"]
    console.print(
        f"{made}; of {summary['tried']} episodes tried, {lost} did not succeed and "
        f"{summary['failed']} were lost to simulator failures; all of these were left out."
    )
    say(console, following("train", "--data", config.out, "--preset", "tiny"))


if __name__ == "__main__":
    guard_tracebacks()
    with in_a_line():
        arguments = current_options(sys.argv[1:], RecordConfig)
        prog = "python -m tools.record"
        main(cli(RecordConfig, args=arguments, prog=prog, description=__doc__), Console())
