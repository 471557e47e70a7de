"""The entry of RLDS in the table of formats."""

from collections.abc import Iterator, Sequence

from data.dataset import Format, Report
from data.errors import Problem
from data.files.checksums import check_sums
from data.files.folder import Folder
from data.rlds.dataset import RldsDataset, open_rlds
from data.validation.check_dataset import check_dataset

_FILES = ("features.json", "dataset_info.json")


def _recognises(folder: Folder) -> bool:
    """The folder of one version, or the one above it."""
    return any(all(folder.list(top + file) for file in _FILES) for top in ("", "*/"))


def _validate(dataset: RldsDataset, report: Report, columns: Sequence[str]) -> Iterator[Problem]:
    return check_sums(dataset.folder, check_dataset(dataset, report, columns), report)


RLDS = Format("RLDS", _recognises, open_rlds, validate=_validate)
