"""Rate of a run's interruptions, the best interval between saves, and the share of time left for
steps, both in closed form and simulated event by event.

Young (1974) and Daly (2006) give the interval between saves; the rate of interruptions is Llama 3's
(arXiv 2407.21783: 419 unexpected in 54 days on 16,384 H100), as a Poisson process.
"""

import math
from dataclasses import dataclass

import numpy as np

LLAMA3_FAILURES = 419 / (16_384 * 54 * 24)
"""Interruptions per GPU and hour of Llama 3's training."""


@dataclass(frozen=True)
class Recovery:
    """Overheads of a run, in seconds: `save` while a checkpoint blocks the step, `restart` from an
    interruption to the next step."""

    save: float = 5.0
    restart: float = 600.0

    def __post_init__(self) -> None:
        if not (self.save > 0 and self.restart >= 0):
            raise ValueError(
                f"--save-seconds (how long a save blocks) is {self.save} and --restart-seconds "
                f"{self.restart}; the first must be above 0, such as 0.1 if saving continues in "
                f"the background, the second at least 0."
            )


@dataclass(frozen=True)
class SimulatedGoodput:
    """Seconds of a simulated run by use: kept steps, saves, steps lost to interruptions (with the
    saves that they cut off), and restarts."""

    useful: float
    saving: float
    lost: float
    restarting: float
    failures: int

    @property
    def goodput(self) -> float:
        """Share of the time that was spent on steps that were kept."""
        return self.useful / (self.useful + self.saving + self.lost + self.restarting)


def mean_time_between_failures(devices: int, failures: float = LLAMA3_FAILURES) -> float:
    """Seconds between interruptions of a run on that many devices.

    Raises:
      ValueError: `devices` or `failures` is not above 0.
    """
    if devices < 1 or failures <= 0:
        raise ValueError(
            f"{devices} devices with {failures} failures per device and hour have no mean time "
            f"between failures; both must be above 0."
        )
    return 3600 / (devices * failures)


def young(save: float, mtbf: float) -> float:
    """Seconds of steps between saves that minimise the lost time, to first order: √(2 · save ·
    mtbf)."""
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """The same to higher order (Daly 2006, equation 37); `mtbf` once a save takes twice that."""
    ratio = save / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young(save, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, recovery: Recovery, mtbf: float) -> float:
    """Expected share of time in steps that are kept, with a save after every `interval` seconds of
    steps. Interruptions are a Poisson process and also hit saves and restarts (Daly 2006, equation
    20)."""
    cycle = (interval + recovery.save) / mtbf
    if cycle + recovery.restart / mtbf > 700:
        return 0.0
    return interval / (mtbf * math.exp(recovery.restart / mtbf) * math.expm1(cycle))


def simulate(
    work: float, interval: float, recovery: Recovery, mtbf: float, seed: int = 0
) -> SimulatedGoodput:
    """Simulates one run of `work` seconds of steps; each interruption sends it back to the last
    save."""
    rng = np.random.default_rng(seed)
    useful = saving = lost = restarting = 0.0
    failures, cycle = 0, interval + recovery.save
    while True:
        until = rng.exponential(mtbf)
        left = work - useful
        saves = max(math.ceil(left / interval) - 1, 0)  # none after the last step
        needed = left + saves * recovery.save
        if until >= needed:
            return SimulatedGoodput(
                work, saving + saves * recovery.save, lost, restarting, failures
            )
        done = min(int(until // cycle), saves)
        useful, saving = useful + done * interval, saving + done * recovery.save
        lost, failures = lost + until - done * cycle, failures + 1
        while (until := rng.exponential(mtbf)) < recovery.restart:
            restarting, failures = restarting + until, failures + 1
        restarting += recovery.restart
