"""Success rates with an interval that is right for few episodes and for rates near 0 or 1.

The score interval of E. B. Wilson, "Probable inference, the law of succession, and statistical
inference" (JASA 22, 1927); unlike mean ± 2 standard errors it is not empty at 0/n and n/n.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal."""


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Lower and upper end of the score interval of a binomial rate:
    (p + z²/2n ± z·sqrt(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    Raises:
      ValueError: no trials, or successes outside 0..trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(
            f"A success rate needs 0 <= successes <= trials and at least one trial, "
            f"got {successes} of {trials}."
        )
    p, n = successes / trials, trials
    centre = p + z * z / (2 * n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == trials else (centre + half) / scale
    return low, high


@dataclass(frozen=True)
class Rate:
    """Successes out of trials, with their 95 % Wilson interval."""

    successes: int
    trials: int

    def __post_init__(self) -> None:
        wilson(self.successes, self.trials)

    @classmethod
    def of(cls, outcomes: Iterable[bool]) -> "Rate":
        """The rate of True among outcomes."""
        outcomes = list(outcomes)
        return cls(sum(outcomes), len(outcomes))

    @property
    def value(self) -> float:
        """The rate, 0..1."""
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval, 0..1."""
        return wilson(self.successes, self.trials)

    @property
    def interval_text(self) -> str:
        """Such as "93.3–99.2 %"."""
        low, high = self.interval
        return f"{100 * low:.1f}–{100 * high:.1f} %"

    def __str__(self) -> str:
        return (
            f"{100 * self.value:.1f} % ({self.successes}/{self.trials}, "
            f"95 % CI {self.interval_text})"
        )

    def to_json(self) -> dict[str, float]:
        """Plain numbers, all rates 0..1."""
        low, high = self.interval
        return {
            "rate": self.value,
            "successes": self.successes,
            "trials": self.trials,
            "low": low,
            "high": high,
        }
