"""Dataset card of a LeRobot dataset on the Hugging Face hub: README.md, with front matter (YAML)
for the hub and LeRobot's dataset viewer, and what the dataset holds."""

from data.dataset import Dataset, first_prompts
from models.files.markdown import cell, front_matter
from models.files.terminal import counted

_MOST_TASKS = 20


def dataset_card(url: str, licence: str, dataset: Dataset, version: str) -> str:
    """README.md of a dataset that is pushed to `url`, under the licence with this identifier."""
    matter = {
        "license": licence,
        "task_categories": ["robotics"],
        "tags": ["LeRobot", "chiliad"],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    told = first_prompts(dataset)
    facts = [
        ("Robot", dataset.robot_type or "unknown"),
        ("Episodes", len(dataset.lengths)),
        ("Frames", f"{dataset.lengths.sum()} at {dataset.fps:g} per second"),
        ("Cameras", ", ".join(dataset.cameras) or "none"),
        ("Written by", f"Chiliad {version}"),
    ]
    rows = [f"| {fact} | {cell(value)} |" for fact, value in facts]
    tasks = [
        f"- {cell(task)} ({counted(count, 'episode')})"
        for task, count in told.most_common(_MOST_TASKS)
    ]
    more = [f"- and {len(told) - _MOST_TASKS} more"] if len(told) > _MOST_TASKS else []
    return "\n".join(
        [
            *[front_matter(matter), f"# {cell(url.rpartition('/')[2])}", ""],
            *["A LeRobot dataset.", "", "| | |", "|---|---|", *rows, ""],
            *["## Tasks", "", *tasks, *more, "", "## Use", ""],
            *["```", f"python -m tools.data stats {url}"],
            *[f"python -m tools.train --data {url} --preset NAME", "```", ""],
        ]
    )
