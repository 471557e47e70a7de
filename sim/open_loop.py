"""Comparison of predicted with recorded action chunks: errors by dimension, step and episode,
baselines that ignore the observation, and sentences on what stands out.

Pure numpy on arrays that the caller has read and predicted. Errors are mean absolute differences,
averaged over the entries that lie within an episode; "scaled" errors are in units of the policy's
own action scale, so that metres, radians and grippers can be averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from models.files import html

POLICY, HOLD, MEAN = "policy", "repeat last action", "mean action"
BLIND, TOLD, STILL, AGAIN = "blind", "other prompt", "mean state", "other noise"

_RESAMPLES = 1000
_FAR = 5.0
"""Scaled values beyond this do not fit the policy's scale: quantile ranges end at 1, and only one
in two million values of a normal z-score lies so far out."""
_HARDLY = 0.02
"""Change of the chunks, as a fraction of their spread, below which an input is reported as
unused."""
_AGAINST = -0.3
_SPREAD = (0.2, 5.0)


@dataclass(frozen=True)
class ChunkErrors:
    """Errors of chunks. `mean`, `interval` (95 %, over episodes; None with fewer than three),
    `by_step`, `by_episode` and `by_dim_scaled` are scaled; `by_dim` (mean absolute), `root` (root
    mean square) and `bias` (mean of predicted minus recorded) are by dim, in the robot's units."""

    mean: float
    interval: tuple[float, float] | None
    by_dim: tuple[float, ...]
    by_dim_scaled: tuple[float, ...]
    root: tuple[float, ...]
    bias: tuple[float, ...]
    by_step: tuple[float, ...]
    by_episode: Mapping[int, float]


@dataclass(frozen=True, eq=False)
class RecordedChunks:
    """The chunks that followed n observations of a recording, in the robot's units.

    `valid`: steps within the episode. `before`: the action before the observation, NaN where there
    is none. `scale`: the policy's scale of each action dim; for dims that are `relative` to the
    state, the scale of the differences.

    Raises:
      ValueError: there are no observations, or a recorded action that counts is not finite.
    """

    episode: Int64[np.ndarray, " n"]
    frame: Int64[np.ndarray, " n"]
    actions: Float[np.ndarray, "n h a"]
    valid: Bool[np.ndarray, "n h"]
    before: Float[np.ndarray, "n a"]
    scale: Float[np.ndarray, " a"]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.valid.any():
            raise ValueError("No recorded action follows these observations; choose others.")
        self._require_finite(self.actions, "recorded actions")

    @property
    def episodes(self) -> tuple[int, ...]:
        """Episodes that the observations are from, in order."""
        return tuple(np.unique(self.episode).tolist())

    @cached_property
    def constant(self) -> Float[np.ndarray, "n h a"]:
        """The mean of all recorded actions that count, at every step: the best constant in the
        least-squares sense, chosen with hindsight."""
        return np.broadcast_to(self.actions[self.valid].mean(0), self.actions.shape)

    @cached_property
    def held(self) -> Float[np.ndarray, "n h a"]:
        """The action before each observation, at every step; the mean if there is none."""
        before = np.where(np.isfinite(self.before), self.before, self.constant[:, 0])
        return np.broadcast_to(before[:, None], self.actions.shape)

    def errors(self, predicted: Float[np.ndarray, "n h a"]) -> ChunkErrors:
        """Errors of predicted chunks.

        Raises:
          ValueError: a predicted action that counts is not finite.
        """
        self._require_finite(predicted, "predicted actions")
        off = np.where(self.valid[..., None], predicted.astype(np.float64) - self.actions, 0)
        scaled, count = np.abs(off) / self.scale, self.valid.sum()
        dims = len(self.scale)
        of_row, counts = scaled.sum((1, 2)), dims * self.valid.sum(1)
        which = np.searchsorted(self.episodes, self.episode)
        total, entries = (np.bincount(which, x) for x in (of_row, counts))
        steps = np.maximum(self.valid.sum(0), 1)
        return ChunkErrors(
            mean=float(total.sum() / entries.sum()),
            interval=_interval(total, entries),
            by_dim=_tuple(np.abs(off).sum((0, 1)) / count),
            by_dim_scaled=_tuple(scaled.sum((0, 1)) / count),
            root=_tuple(np.sqrt((off**2).sum((0, 1)) / count)),
            bias=_tuple(off.sum((0, 1)) / count),
            by_step=_tuple(scaled.sum((0, 2)) / (steps * dims)),
            by_episode={
                e: float(t / max(n, 1))
                for e, t, n in zip(self.episodes, total, entries, strict=True)
            },
        )

    def change(
        self, first: Float[np.ndarray, "n h a"], second: Float[np.ndarray, "n h a"]
    ) -> float:
        """Mean absolute difference of two predictions, scaled."""
        off = np.abs(first.astype(np.float64) - second) / self.scale
        return float(off[self.valid].mean())

    def _require_finite(self, chunks: Float[np.ndarray, "n h a"], what: str) -> None:
        wrong = np.argwhere(~np.isfinite(chunks).all(-1) & self.valid)
        if len(wrong):
            row = wrong[0, 0]
            raise ValueError(
                f"The {what} at frame {self.frame[row]} of episode {self.episode[row]} are not "
                "finite; check the dataset with `python -m tools.data validate`, or the policy's "
                "scales."
            )


@dataclass(frozen=True, eq=False)
class OpenLoop:
    """A policy's chunks and the recorded ones.

    `predicted`: the policy's chunks, by the change made to the observation; POLICY, the first, is
    for unchanged observations, and "without X" has camera X black. `state`: the largest of the
    recorded states by dim, scaled. `horizon_seconds`: the time between a chunk's first and last
    step.
    """

    recorded: RecordedChunks
    predicted: Mapping[str, Float[np.ndarray, "n h a"]]
    state: Mapping[str, float]
    prompts: tuple[str, ...]
    horizon_seconds: float

    def __repr__(self) -> str:
        return f"OpenLoop({len(self.recorded.frame)} observations, {', '.join(self.predicted)})"

    def _repr_html_(self) -> str:
        facts = {
            "observations": f"{len(self.recorded.frame):,}",
            "episodes": len(self.recorded.episodes),
            "chunk": f"{self.horizon_seconds:.3g} s",
        }
        rows = [
            (name, f"{found.mean:.3g}", _percentage(self.changes.get(name), self.spread))
            for name, found in self.errors.items()
        ]
        heads = ("predicted by", "mean error, scaled", "change of the chunks, as share of spread")
        found = html.listed(self.findings() or ["Nothing stands out."])
        return html.card("Open loop", facts, html.table(heads, rows), found)

    @cached_property
    def errors(self) -> dict[str, ChunkErrors]:
        """Errors of the policy, of the baselines, and of the policy with changed observations."""
        policy, *changed = self.predicted
        chunks = {policy: self.predicted[policy]}
        chunks |= {HOLD: self.recorded.held, MEAN: self.recorded.constant}
        chunks |= {name: self.predicted[name] for name in changed}
        return {name: self.recorded.errors(values) for name, values in chunks.items()}

    @cached_property
    def changes(self) -> dict[str, float]:
        """Mean change of the chunks, scaled, by the change made to the observation."""
        own = self.predicted[POLICY]
        rest = {name: chunks for name, chunks in self.predicted.items() if name != POLICY}
        return {name: self.recorded.change(own, chunks) for name, chunks in rest.items()}

    @cached_property
    def spread(self) -> float:
        """Mean absolute deviation of the predicted actions from their mean, scaled."""
        own, valid = self.predicted[POLICY], self.recorded.valid
        return float((np.abs(own[valid] - own[valid].mean(0)) / self.recorded.scale).mean())

    @cached_property
    def correlation(self) -> tuple[float | None, ...]:
        """Correlation of predicted with recorded actions by dim, None if either is constant."""
        own, told = self._pair
        return tuple(_correlation(own[:, d], told[:, d]) for d in range(own.shape[1]))

    @cached_property
    def spread_ratio(self) -> tuple[float | None, ...]:
        """Standard deviation of predicted divided by that of recorded actions, None if the latter
        are constant."""
        own, told = self._pair
        pairs = zip(own.std(0), told.std(0), self.recorded.scale, strict=True)
        return tuple(float(p / r) if r > 1e-6 * s else None for p, r, s in pairs)

    @property
    def _pair(self) -> tuple[Float[np.ndarray, "v a"], Float[np.ndarray, "v a"]]:
        """Predicted and recorded actions that count, in 64 bits: in 32 bits, rounding gives a
        spread to actions that never change."""
        valid = self.recorded.valid
        own, told = self.predicted[POLICY], self.recorded.actions
        return own[valid].astype(np.float64), told[valid].astype(np.float64)

    @property
    def worst(self) -> list[int]:
        """Episodes, largest error first."""
        of = self.errors[POLICY].by_episode
        return sorted(of, key=lambda e: (-of[e], e))

    def findings(self) -> list[str]:
        """Sentences on behaviour that a policy that has learnt this recording would not show; empty
        if nothing stands out."""
        return [*self._against_baselines(), *self._unused(), *self._dims(), *self._far()]

    def to_json(self) -> dict[str, Any]:
        """All figures as plain data, without the chunks."""
        names = self.recorded.names
        dims = [
            {
                "name": name,
                "mean_absolute": e,
                "root_mean_square": self.errors[POLICY].root[d],
                "bias": self.errors[POLICY].bias[d],
                "scale": float(self.recorded.scale[d]),
                "correlation": self.correlation[d],
                "spread_ratio": self.spread_ratio[d],
            }
            for d, (name, e) in enumerate(zip(names, self.errors[POLICY].by_dim, strict=True))
        ]
        return {
            "observations": len(self.recorded.frame),
            "episodes": list(self.recorded.episodes),
            "horizon_seconds": self.horizon_seconds,
            "findings": self.findings(),
            "errors": {name: _plain(errors) for name, errors in self.errors.items()},
            "dims": dims,
            "spread": self.spread,
            "changes": self.changes,
            "largest_state": dict(self.state),
        }

    def _against_baselines(self) -> list[str]:
        own, said = self.errors[POLICY].mean, []
        for name, how in ((HOLD, "repeating the last action"), (MEAN, "one constant action")):
            if own >= self.errors[name].mean:
                said.append(
                    f"The error ({own:.3g}) is no smaller than that of {how} "
                    f"({self.errors[name].mean:.3g}): the policy has not learnt this recording, or "
                    "its inputs differ from those in training."
                )
        if BLIND in self.errors and self.errors[BLIND].mean <= own:
            said.append(
                f"The policy is as good with black images ({self.errors[BLIND].mean:.3g}) as "
                f"with the recorded ones ({own:.3g}): what it sees does not help it."
            )
        return said

    def _unused(self) -> list[str]:
        return [
            f"The chunks hardly change with {_cause(name)}: by {change:.2g}, while they spread by "
            f"{self.spread:.2g}."
            for name, change in self.changes.items()
            if name != AGAIN and change <= _HARDLY * self.spread
        ]

    def _dims(self) -> list[str]:
        said = []
        for d, name in enumerate(self.recorded.names):
            together, ratio = self.correlation[d], self.spread_ratio[d]
            if together is not None and together <= _AGAINST:
                said.append(
                    f"Action '{name}' moves against the recorded one (correlation {together:.2f}): "
                    "compare signs and frames of reference."
                )
            if ratio is not None and not _SPREAD[0] <= ratio <= _SPREAD[1]:
                said.append(
                    f"Action '{name}' varies {ratio:.3g} times as much as the recorded one: "
                    "compare units (degrees, radians; metres, millimetres), and statistics."
                )
        return said

    def _far(self) -> list[str]:
        return [
            f"State '{name}' lies up to {far:.3g} scales from the middle of the policy's training "
            "data: compare units, the order of dims and the statistics."
            for name, far in self.state.items()
            if far > _FAR
        ]


def without(camera: str) -> str:
    """Name of the condition in which a camera is black."""
    return f"without {camera}"


def _cause(name: str) -> str:
    causes = {BLIND: "all images black", TOLD: "another task's prompt", STILL: "the mean state"}
    return causes.get(name, f"camera '{name.removeprefix('without ')}' black")


def _percentage(change: float | None, spread: float) -> str:
    return "" if change is None or not spread else f"{change / spread:.0%}"


def _interval(
    total: Float[np.ndarray, " e"], entries: Float[np.ndarray, " e"]
) -> tuple[float, float] | None:
    """95 % percentile interval of a ratio of sums, with episodes drawn with replacement."""
    if len(total) < 3:
        return None
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(total), (_RESAMPLES, len(total)))
    means = total[drawn].sum(1) / entries[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _correlation(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float | None:
    if min(x.std(), y.std()) <= 1e-9 * max(1.0, np.abs(x).max(), np.abs(y).max()):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _tuple(x: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in x)


def _plain(errors: ChunkErrors) -> dict[str, Any]:
    return {name: value for name, value in vars(errors).items() if name not in ("root", "bias")}
