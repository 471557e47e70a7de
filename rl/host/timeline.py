"""Spans of work and waits in a run by lane, idle time by cause, and a trace that Perfetto shows.

A lane does one thing at a time: "slot 3", "inference", "learner 0". Idle time is attributed by what
the slots do meanwhile, each for an equal share: stepping is environment-bound; waiting for a chunk
is inference-bound while a policy works, else environment-bound (the batch waits for other slots);
being held back is learner-bound while a learner works, else inference-bound while every policy
does, else staleness-bound: only a larger bound would let it act.
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
"""Cause of idle time while there were no slots, or all of them were at rest."""

_REMEDIES: dict[str, str] = {
    "environment": "add slots, or execute more steps of each chunk",
    "inference": "add inference devices or larger batches, or shorten the deadline",
    "learner": "add learner devices, or learn from fewer decisions a step",
    "staleness": "raise rollout.staleness, or learn from more tickets a step",
}


class Span(NamedTuple):
    """Work of a lane, in seconds of the timeline's clock; with a cause it was a wait."""

    lane: str
    what: str
    cause: Cause | None
    begin: float
    end: float


@dataclass(frozen=True)
class Use:
    """Seconds that a lane, or several, spent busy and idle."""

    busy: dict[str, float]
    """Seconds by kind of work."""
    idle: dict[str, float]
    """Seconds by cause; `UNATTRIBUTED` is one."""

    @property
    def seconds(self) -> float:
        """Total of all lanes."""
        return sum(self.busy.values()) + sum(self.idle.values())

    @property
    def utilisation(self) -> float:
        """Share of the time that was busy."""
        return sum(self.busy.values()) / self.seconds if self.seconds else 0.0

    def since(self, earlier: "Use") -> "Use":
        """Difference from an earlier use of the same lanes."""
        return Use(_less(self.busy, earlier.busy), _less(self.idle, earlier.idle))


@dataclass(frozen=True)
class Summary:
    """A timeline up to a moment."""

    seconds: float
    lanes: dict[str, Use]
    resting: Use
    """Use of a lane that has done nothing, such as one that has not appeared yet."""

    def kinds(self) -> dict[str, Use]:
        """Use of all lanes of a kind together; the kind is the first word of their names."""
        found: dict[str, list[Use]] = defaultdict(list)
        for lane, use in self.lanes.items():
            found[_kind(lane)].append(use)
        return {
            kind: Use(_total([u.busy for u in uses]), _total([u.idle for u in uses]))
            for kind, uses in found.items()
        }

    def since(self, earlier: "Summary") -> "Summary":
        """Difference from an earlier summary of the same timeline."""
        return Summary(
            self.seconds - earlier.seconds,
            {
                lane: use.since(earlier.lanes.get(lane, earlier.resting))
                for lane, use in self.lanes.items()
            },
            self.resting.since(earlier.resting),
        )

    def advice(self) -> str:
        """One line: what bounds the run, and what would help."""
        learner = self.kinds().get("learner")
        if learner is None or not learner.seconds:
            return "Nothing has been learnt yet."
        if learner.utilisation >= 0.8:
            return f"Learner-bound: it is busy {learner.utilisation:.0%}; {_REMEDIES['learner']}."
        cause = max(learner.idle, key=learner.idle.__getitem__)
        share = learner.idle[cause] / learner.seconds
        if cause not in _REMEDIES:
            return f"For {share:.0%} of the time, the learner waits while no slot acts."
        remedy = _REMEDIES[cause]
        return f"{cause.capitalize()}-bound: the learner waits {share:.0%} of the time; {remedy}."


class Timeline:
    """Spans of a run, by lane; any thread may add some.

    Totals are exact, however long the run is; only the last `capacity` single spans are kept.

    Args:
      clock: returns seconds that never decrease.
    """

    def __init__(
        self, capacity: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all that follows
        self._began = self._now = clock()
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lanes: dict[str, _Lane] = {}
        self._slots = [0] * len(CAUSES)  # how many slots have each cause
        self._policies = 0  # inference lanes
        self._inferring = self._learning = 0  # lanes that work
        self._put = [0.0] * 3 * len(CAUSES)

    @contextmanager
    def span(self, lane: str, what: str, cause: Cause | None = None) -> Iterator[None]:
        """The lane does `what` until the block ends; with a cause, it waits for that. Spans of a
        lane nest, and the innermost counts."""
        opened = _Open(what, cause)
        with self._lock:
            self._change(lane, add=opened)
        try:
            yield
        finally:
            with self._lock:
                self._change(lane, drop=opened)

    def mark(self, lane: str, what: str | None, cause: Cause | None = None) -> None:
        """The lane does `what` (nothing if None) from now until it is marked again; for spans that
        begin and end in different places of the code."""
        with self._lock:
            self._change(lane, add=None if what is None else _Open(what, cause), drop="all")

    def summary(self) -> Summary:
        """Summary up to now."""
        with self._lock:
            self._advance()
            lanes = {name: self._settle(name) for name in self._lanes}
            return Summary(
                self._now - self._began,
                {name: lane.use() for name, lane in lanes.items()},
                self._accounted(_Lane("", self._began)).use(),
            )

    def spans(self) -> list[Span]:
        """The last spans that have ended, in the order in which they ended."""
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
        """Writes the trace as a file for https://ui.perfetto.dev."""
        path.write_text(json.dumps(self.trace()))

    def _change(
        self, name: str, add: "_Open | None" = None, drop: "_Open | Literal['all'] | None" = None
    ) -> None:
        self._advance()
        lane = self._settle(name)
        self._count(lane, -1)
        for opened in [o for o in lane.open if drop == "all" or o is drop]:
            lane.open.remove(opened)
            self._spans.append(Span(name, opened.what, opened.cause, opened.begin, self._now))
        if add is not None:
            add.begin = self._now
            lane.open.append(add)
        self._count(lane, 1)

    def _count(self, lane: "_Lane", by: int) -> None:
        """Adds `by` to the count of what a lane is doing."""
        if not lane.open:
            return
        cause = lane.open[-1].cause
        if lane.kind == "slot":
            self._slots[CAUSES.index(cause or "environment")] += by
        elif cause is None:
            self._inferring += by * (lane.kind == "inference")
            self._learning += by * (lane.kind == "learner")

    def _advance(self) -> None:
        now = self._clock()
        passed = now - self._now
        if passed <= 0:
            return
        self._now, put = now, self._put
        asked = _INFERENCE if self._inferring else _ENVIRONMENT
        held = _STALENESS
        if self._learning:
            held = _LEARNER
        elif self._policies and self._inferring == self._policies:
            held = _INFERENCE
        put[_ASKED + asked] += passed
        put[_HELD + held] += passed
        if total := sum(self._slots):
            for count, cause in zip(
                self._slots, (_ENVIRONMENT, asked, _LEARNER, held), strict=True
            ):
                put[cause] += passed * count / total

    def _settle(self, name: str) -> "_Lane":
        """The lane, with its time up to now accounted for."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(_kind(name), self._began)
            self._policies += lane.kind == "inference"
        return self._accounted(lane)

    def _accounted(self, lane: "_Lane") -> "_Lane":
        seconds, before = self._now - lane.settled, lane.put
        if not seconds:
            return lane
        lane.settled, lane.put = self._now, list(self._put)
        cause = lane.open[-1].cause if lane.open else None
        if lane.open and cause is None:
            lane.busy[lane.open[-1].what] += seconds
            return lane
        of = {"inference": _ASKED, "staleness": _HELD}.get(cause or "", 0)
        if of or cause is None:
            spent = [self._put[of + k] - before[of + k] for k in range(len(CAUSES))]
        else:
            spent = [seconds * (cause == other) for other in CAUSES]
        lane.idle = [a + b for a, b in zip(lane.idle, spent, strict=True)]
        lane.unattributed += max(seconds - sum(spent), 0.0)
        return lane


_ENVIRONMENT, _INFERENCE, _LEARNER, _STALENESS = range(len(CAUSES))
_ASKED, _HELD = len(CAUSES), 2 * len(CAUSES)
"""Offsets in `_put`, after the seconds of idle time by cause, of the same seconds for lanes that
have asked and for lanes that are held back."""


@dataclass(eq=False)
class _Open:
    what: str
    cause: Cause | None
    begin: float = 0.0


@dataclass(eq=False)
class _Lane:
    """A lane, accounted for up to `settled`, when the timeline's totals were `put`."""

    kind: str
    settled: float
    put: list[float] = field(default_factory=lambda: [0.0] * 3 * len(CAUSES))
    open: list[_Open] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle: list[float] = field(default_factory=lambda: [0.0] * len(CAUSES))
    unattributed: float = 0.0

    def use(self) -> Use:
        idle = dict(zip(CAUSES, self.idle, strict=True)) | {UNATTRIBUTED: self.unattributed}
        return Use(dict(self.busy), {cause: spent for cause, spent in idle.items() if spent > 0})


def _kind(lane: str) -> str:
    return lane.split()[0]


def _natural(lane: str) -> tuple[str, int]:
    """Sort key that puts "slot 10" after "slot 9"."""
    kind, _, number = lane.partition(" ")
    return kind, int(number) if number.isdigit() else 0


def _total(parts: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        for key, seconds in part.items():
            found[key] += seconds
    return dict(found)


def _less(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {key: seconds - before.get(key, 0.0) for key, seconds in now.items()}
