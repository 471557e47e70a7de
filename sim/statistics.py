"""Success rates with an interval that is correct for few episodes and for rates near 0 or 1, and
comparison of two policies on the same starts.

The interval is the score interval of E. B. Wilson, "Probable inference, the law of succession, and
statistical inference" (JASA 22, 1927); unlike mean ± 2 standard errors, it is not empty at 0/n and
n/n.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb, sqrt

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
        """The interval as text, such as "93.3–99.2 %"."""
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


@dataclass(frozen=True)
class Paired:
    """Two policies on the same starts, counted by which of them succeeded."""

    both: int
    first_only: int
    second_only: int
    neither: int

    def __post_init__(self) -> None:
        if min(counts := vars(self).values()) < 0 or not sum(counts):
            raise ValueError(
                f"A paired comparison needs counts of at least 0 and one pair, got {vars(self)}."
            )

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool]]) -> "Paired":
        """Counts of (first succeeded, second succeeded)."""
        pairs = list(pairs)
        kinds = ((True, True), (True, False), (False, True), (False, False))
        return cls(*(sum(pair == kind for pair in pairs) for kind in kinds))

    @property
    def trials(self) -> int:
        """Starts that were compared."""
        return sum(vars(self).values())

    @property
    def p_value(self) -> float:
        """P-value of McNemar's test, two-sided and exact: if the policies were equally good, either
        would win a discordant pair with probability 1/2, so that the smaller of the two counts is
        binomial. Q. McNemar, Psychometrika 12 (1947); the exact form is F. Mosteller's, Biometrics
        8 (1952).
        """
        n = self.first_only + self.second_only
        tail = sum(comb(n, k) for k in range(min(self.first_only, self.second_only) + 1))
        return min(1.0, 2 * tail / 2**n)

    @property
    def difference(self) -> float:
        """First success rate minus the second, -1 … 1."""
        return (self.first_only - self.second_only) / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference: the Wilson intervals of both rates, combined with regard
        to their correlation φ, whose numerator is reduced by n/2 if it is positive. Method 10 of R.
        G. Newcombe, "Improved confidence intervals for the difference between binomial proportions
        based on paired data" (Statistics in Medicine 17, 1998, 2635)."""
        n, product = self.trials, self.both * self.neither - self.first_only * self.second_only
        one, two = self.both + self.first_only, self.both + self.second_only
        scale = sqrt(one * (n - one) * two * (n - two))
        phi = (max(product - n / 2, 0) if product > 0 else product) / scale if scale else 0.0
        (low1, high1), (low2, high2) = wilson(one, n), wilson(two, n)
        down1, up1, down2, up2 = one / n - low1, high1 - one / n, two / n - low2, high2 - two / n
        below = sqrt(down1**2 - 2 * phi * down1 * up2 + up2**2)
        above = sqrt(up1**2 - 2 * phi * up1 * down2 + down2**2)
        return self.difference - below, self.difference + above

    def __str__(self) -> str:
        low, high = (f"{100 * end:+.1f}" for end in self.interval)
        return (
            f"{100 * self.difference:+.1f} points (95 % CI {low} to {high}; {self.first_only} "
            f"starts won, {self.second_only} lost; exact McNemar p = {self.p_value:.3g})"
        )

    def to_json(self) -> dict[str, float]:
        """Counts, difference with its interval, and p-value."""
        low, high = self.interval
        return {
            **vars(self),
            "difference": self.difference,
            "low": low,
            "high": high,
            "p_value": self.p_value,
        }
