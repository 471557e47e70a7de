"""The page of a checkpoint on the Hugging Face hub: README.md, with front matter (YAML) that the
hub reads, what the policy was trained on, what it scored, and the command that acts with it.

It is written from the checkpoint's own config and what lies beside it. Nothing is guessed; what is
not known is left out.
"""

from collections.abc import Mapping
from typing import Any

from models.files.address import parse
from models.files.hub import HubPlace
from models.files.markdown import cell, front_matter

Json = Any


def model_card(
    url: str,
    licence: str,
    config: Mapping[str, Json],
    step: int | None,
    evaluations: Mapping[str, Json],
    version: str,
    dataset: str | None = None,
) -> str:
    """README.md of a checkpoint.

    Args:
      url: where it is pushed to.
      licence: the hub's identifier, such as apache-2.0.
      config: the checkpoint's config; {} for another code's checkpoint.
      step: updates made, None if not known.
      evaluations: success rates by suite, as evaluation.json has them; {} if none were measured.
      version: of Chiliad.
      dataset: the dataset that it was trained on.
    """
    model = config.get("model", {})
    family, name = model.get("family"), parse(url).name
    matter: dict[str, Any] = {
        "license": licence,
        "pipeline_tag": "robotics",
        "tags": ["robotics", "vision-language-action", "chiliad", *([family] if family else [])],
    }
    if dataset and parse(dataset).protocol == "hf":
        matter["datasets"] = [HubPlace.parse(dataset, "dataset").repository]
    facts = [
        ("Model", family),
        ("Steps trained", step or None),
        ("Trained on", dataset),
        ("Horizon", model.get("horizon")),
        ("Saved by", f"Chiliad {version}"),
    ]
    rows = [f"| {fact} | {cell(value)} |" for fact, value in facts if value is not None]
    parts = [
        front_matter(matter),
        f"# {cell(name)}\n",
        "A policy for robots. See it act in simulation before it moves one.\n",
        "\n".join(["| | |", "|---|---|", *rows]) + "\n",
        *(_scores(suite, found) for suite, found in evaluations.items()),
        "## Use\n",
        f"```\npython -m tools.evaluate --checkpoint {url} --suite SUITE --out evaluation\n"
        f"python -m tools.serve --checkpoint {url}\n"
        f"python -m tools.train --data PATH --preset NAME --init {url}\n```\n",
        f'```python\nfrom models import load_policy\n\npolicy = load_policy("{url}")\n```\n',
    ]
    return "\n".join(parts)


def _scores(suite: str, rates: Mapping[str, Json]) -> str:
    rows = [
        f"| {cell(name)} | {rate['success']:.1%} | {rate['episodes']} |"
        for name, rate in rates.items()
    ]
    return "\n".join(
        [f"## {cell(suite)}\n", "| policy | success | episodes |", "|---|---|---|", *rows, ""]
    )
