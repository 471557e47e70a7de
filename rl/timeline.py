"""What everyone in a run was doing and what they waited for: spans by lane, idle time by cause, and
a trace that Perfetto shows.

A lane is one thing that does one thing at a time: "slot 3", "inference", "learner 0". Idle time is
attributed by what the slots do in the meantime, each the same share of it: a slot that steps makes
it environment-bound, one that waits for its chunk inference-bound, one that admission holds back
learner-bound while the learner works, and staleness-bound while the learner waits too, since then
only a larger bound would let it act.
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Cause = Literal["environment", "inference", "learner", "staleness"]

CAUSES: tuple[Cause, ...] = get_args(Cause)
UNATTRIBUTED = "unattributed"
"""Cause of what was idle while there were no slots, or all of them were at rest."""

_REMEDIES: dict[str, str] = {
    "environment": "add slots, or act more steps of each chunk",
    "inference": "add inference devices or larger batches, or shorten the deadline",
    "learner": "add learner devices, or learn from fewer decisions a step",
    "staleness": "raise rollout.staleness, or learn from more tickets a step",
}


class Span(NamedTuple):
    """What a lane did, in seconds of the timeline's clock; with a cause it was a wait."""

    lane: str
    what: str
    cause: Cause | None
    begin: float
    end: float


@dataclass(frozen=True)
class Use:
    """How a lane's, or several lanes', seconds were spent."""

    busy: dict[str, float]
    """By what was done."""
    idle: dict[str, float]
    """By cause; `UNATTRIBUTED` is one."""

    @property
    def seconds(self) -> float:
        """Of all lanes together."""
        return sum(self.busy.values()) + sum(self.idle.values())

    @property
    def utilisation(self) -> float:
        """Share of the time that was busy."""
        return sum(self.busy.values()) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Summary:
    """A timeline up to a moment."""

    seconds: float
    lanes: dict[str, Use]

    def kinds(self) -> dict[str, Use]:
        """Lanes of a kind together, by the first word of their names."""
        found: dict[str, list[Use]] = defaultdict(list)
        for lane, use in self.lanes.items():
            found[_kind(lane)].append(use)
        return {
            kind: Use(_total([u.busy for u in uses]), _total([u.idle for u in uses]))
            for kind, uses in found.items()
        }

    def since(self, earlier: "Summary") -> "Summary":
        """What was added to an earlier summary of the same timeline."""
        nothing = Use({}, {})
        before = {lane: earlier.lanes.get(lane, nothing) for lane in self.lanes}
        return Summary(
            self.seconds - earlier.seconds,
            {
                lane: Use(_less(use.busy, before[lane].busy), _less(use.idle, before[lane].idle))
                for lane, use in self.lanes.items()
            },
        )

    def advice(self) -> str:
        """One line: what bounds the run, and what would help."""
        learner = self.kinds().get("learner")
        if learner is None or not learner.seconds:
            return "Nothing was learnt yet."
        if learner.utilisation >= 0.8:
            return f"Learner-bound: it is busy {learner.utilisation:.0%}; {_REMEDIES['learner']}."
        cause = max(learner.idle, key=learner.idle.__getitem__)
        share = learner.idle[cause] / learner.seconds
        if cause not in _REMEDIES:
            return f"The learner waits {share:.0%} of the time while no slot acts."
        return f"{cause.capitalize()}-bound: {share:.0%} of the learner's time; {_REMEDIES[cause]}."


class Timeline:
    """Spans of a run, by lane; any thread may add some.

    Totals are exact however long the run; of single spans the last `capacity` are kept.

    Args:
      clock: seconds, never going back.
    """

    def __init__(
        self, capacity: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all that follows
        self._began = self._now = clock()
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lanes: dict[str, _Lane] = {}
        self._slots: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._learners = 0
        self._blame = _NOTHING

    @contextmanager
    def span(self, lane: str, what: str, cause: Cause | None = None) -> Iterator[None]:
        """The lane is at it until the block ends; with a cause it waits for that. Spans of a lane
        nest, the innermost counts."""
        with self._lock, self._changed(lane) as found:
            opened = _Open(what, cause, self._now)
            found.open.append(opened)
        try:
            yield
        finally:
            with self._lock, self._changed(lane) as found:
                if opened in found.open:
                    found.open.remove(opened)
                    self._keep(lane, opened)

    def mark(self, lane: str, what: str | None, cause: Cause | None = None) -> None:
        """The lane is at it from now until it is marked again, at nothing if None; for what begins
        and ends in different places."""
        with self._lock, self._changed(lane) as found:
            for opened in found.open:
                self._keep(lane, opened)
            found.open = [] if what is None else [_Open(what, cause, self._now)]

    def summary(self) -> Summary:
        """Up to now."""
        with self._lock:
            self._advance()
            lanes = {name: self._settle(name) for name in self._lanes}
            return Summary(
                self._now - self._began,
                {name: Use(_spent(lane.busy), _spent(lane.idle)) for name, lane in lanes.items()},
            )

    def spans(self) -> list[Span]:
        """The last that have ended, in that order."""
        with self._lock:
            return list(self._spans)

    def trace(self) -> dict[str, Any]:
        """The spans as Chrome's trace events, which Perfetto reads: a thread for each lane, times
        in microseconds since the timeline began."""
        spans = self.spans()
        lanes = {n: i for i, n in enumerate(sorted({s.lane for s in spans}, key=_natural))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": lane}}
            for lane, i in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.what,
                "cat": "work" if span.cause is None else "wait",
                "pid": 1,
                "tid": lanes[span.lane],
                "ts": (span.begin - self._began) * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {} if span.cause is None else {"cause": span.cause},
            }
            for span in sorted(spans, key=lambda s: s.begin)
        ]
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        """The trace as a file for https://ui.perfetto.dev."""
        path.write_text(json.dumps(self.trace()))

    def _settle(self, name: str) -> "_Lane":
        """The lane, its time up to now accounted for."""
        lane = self._lanes.setdefault(name, _Lane(self._began))
        seconds, blame = self._now - lane.settled, self._blame.less(lane.blame)
        lane.settled, lane.blame = self._now, self._blame
        if not lane.open:
            for cause, share in zip(CAUSES, blame.shares, strict=True):
                lane.idle[cause] += share
            lane.idle[UNATTRIBUTED] += max(seconds - sum(blame.shares), 0.0)
        elif (top := lane.open[-1]).cause is None:
            lane.busy[top.what] += seconds
        elif top.cause == "staleness":
            lane.idle["learner"] += blame.learning
            lane.idle["staleness"] += seconds - blame.learning
        else:
            lane.idle[top.cause] += seconds
        return lane

    def _advance(self) -> None:
        now = max(self._clock(), self._now)
        passed, self._now = now - self._now, now
        counts = dict(self._slots)
        if self._learners:
            counts["learner"], counts["staleness"] = counts["learner"] + counts["staleness"], 0
        total = sum(counts.values())
        each = passed / total if total else 0.0
        shares = zip(self._blame.shares, CAUSES, strict=True)
        self._blame = _Blame(
            tuple(share + each * counts[cause] for share, cause in shares),
            self._blame.learning + (passed if self._learners else 0.0),
        )

    @contextmanager
    def _changed(self, name: str) -> Iterator["_Lane"]:
        """The lane, to change what is open in it."""
        self._advance()
        lane = self._settle(name)
        kind = _kind(name)
        self._count(kind, lane, -1)
        yield lane
        self._count(kind, lane, 1)

    def _count(self, kind: str, lane: "_Lane", by: int) -> None:
        if not lane.open:
            return
        cause = lane.open[-1].cause
        if kind == "slot":
            self._slots[cause or "environment"] += by
        elif kind == "learner" and cause is None:
            self._learners += by

    def _keep(self, lane: str, opened: "_Open") -> None:
        self._spans.append(Span(lane, opened.what, opened.cause, opened.begin, self._now))


class _Blame(NamedTuple):
    """What idle time since the beginning is put down to, and how long a learner worked, seconds."""

    shares: tuple[float, ...]
    learning: float

    def less(self, other: "_Blame") -> "_Blame":
        shares = tuple(a - b for a, b in zip(self.shares, other.shares, strict=True))
        return _Blame(shares, self.learning - other.learning)


_NOTHING = _Blame((0.0,) * len(CAUSES), 0.0)


@dataclass(eq=False)
class _Open:
    what: str
    cause: Cause | None
    begin: float


@dataclass(eq=False)
class _Lane:
    """Accounted for up to `settled`, where the blame was `blame`."""

    settled: float
    blame: _Blame = _NOTHING
    open: list[_Open] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def _kind(lane: str) -> str:
    return lane.split()[0]


def _natural(lane: str) -> tuple[str, int]:
    """ "slot 10" after "slot 9"."""
    kind, _, number = lane.partition(" ")
    return kind, int(number) if number.isdigit() else 0


def _total(parts: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        for key, seconds in part.items():
            found[key] += seconds
    return dict(found)


def _spent(seconds: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in seconds.items() if value > 0}


def _less(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {key: seconds - before.get(key, 0.0) for key, seconds in now.items()}
