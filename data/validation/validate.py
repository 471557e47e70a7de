"""Finds problems of a dataset before hours of training are spent on it.

Each finding names the file and the field; errors stop training, warnings do not. Content is never
trusted: whatever the files hold, the result is a list.
"""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from data.dataset import Report, find_format, open_as
from data.errors import DatasetError, Problem, caught, error, from_error
from data.validation.check_dataset import check_dataset
from data.validation.looks import check_looks

__all__ = ["Problem", "require_valid", "validate"]


def validate(
    path: str | Path,
    progress: Report | None = None,
    columns: Sequence[str] = (),
    look: bool = False,
) -> list[Problem]:
    """All problems of the dataset at `path`, errors first; an empty list if it is sound.

    Args:
      path: anything that `open_dataset` opens.
      progress: called with the name of the check, how much of it is done and how much there is.
      columns: those that a policy is trained on; if none, the states and actions that have a usual
        name (`data.frames.usual_columns`).
      look: also look at pictures of up to 64 episodes (`check_looks`), if they can be read.
    """
    try:
        kind = find_format(path)
        dataset = open_as(kind, path)
    except DatasetError as raised:
        return [from_error(raised)]
    check = kind.validate or check_dataset
    report = progress or (lambda what, done, total: None)
    try:
        signature(check).bind(dataset, report, columns)
    except TypeError as raised:
        sentence = (
            f"has a `validate` that cannot be called with a dataset, a report and the columns that "
            f"are trained on ({raised}); add `columns` as its third parameter."
        )
        return [error(dataset.root, f"format '{kind.name}'", sentence)]
    if unknown := [name for name in columns if name not in dataset.column_names]:
        sentence = f"is none of {list(dataset.column_names)}; name some of those."
        return [error(dataset.root, f"column '{unknown[0]}'", sentence)]
    problems = dict.fromkeys(caught(check(dataset, report, columns)))
    if look and all(problem.severity == "warning" for problem in problems):
        problems |= dict.fromkeys(caught(check_looks(dataset, columns, report)))
    return sorted(problems, key=lambda problem: problem.severity)


def require_valid(path: str | Path, columns: Sequence[str] = ()) -> list[Problem]:
    """The warnings about the dataset at `path`, of which `columns` are trained on (`validate`), and
    about its pictures.

    Raises:
      ValueError: it has errors; the message is the first error's sentence and the number of further
        errors.
    """
    problems = validate(path, columns=columns, look=True)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(errors[0].message + more)
    return problems
