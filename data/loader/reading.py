"""Reading that may fail: retried with growing waits, because network file systems fail at times.

Data that stays unreadable ends the run with an error that names its file, or is left out on
request.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from data.errors import DatasetError
from models.files.terminal import logger

_log = logger(__name__)


class RetryingReader:
    """Calls functions that read from storage; may be called by any number of threads.

    Args:
      tries: number of attempts in total.
      seconds: wait before the second attempt; doubled before each further one.
      skip: leaves out items that are still unreadable then, and warns once per file.

    Raises:
      ValueError: `tries` is less than 1.
    """

    def __init__(self, tries: int = 3, seconds: float = 1.0, skip: bool = False) -> None:
        if tries < 1:
            raise ValueError(f"tries is {tries}; give at least 1.")
        self._tries, self._seconds, self._skip = tries, seconds, skip
        self._given_up: set[str] = set()

    def __call__(
        self, read: Callable[[Int64[np.ndarray, " _n"]], None], number: int
    ) -> Bool[np.ndarray, " n"]:
        """Calls `read` with the items 0..number-1, and returns which of them are left out.

        Raises:
          DatasetError, OSError: as the last attempt did.
        """
        left_out = np.zeros(number, bool)
        try:
            self._patiently(read, np.arange(number))
        except (DatasetError, OSError) as error:
            if not self._skip:
                raise
            self._give_up(error)
            for item in range(number):
                try:
                    read(np.array([item]))
                except (DatasetError, OSError) as error:
                    left_out[item] = True
                    self._give_up(error)
        return left_out

    def _patiently(self, read: Callable[[Any], None], items: Int64[np.ndarray, " n"]) -> None:
        for number in range(self._tries - 1):
            try:
                return read(items)
            except (DatasetError, OSError) as error:
                if _file(error) in self._given_up:
                    raise
                wait = self._seconds * 2**number
                _log.warning("%s Trying again in %g s.", error, wait)
                time.sleep(wait)
        return read(items)

    def _give_up(self, error: DatasetError | OSError) -> None:
        if _file(error) not in self._given_up:
            self._given_up.add(_file(error))
            _log.warning("%s Samples that cannot be read because of this are skipped.", error)


def _file(error: DatasetError | OSError) -> str:
    return str(error.file if isinstance(error, DatasetError) else error.filename)
