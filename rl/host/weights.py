"""The policy's versions, which actors read while the learner continues: immutable snapshots.

A snapshot is copied before the learner's next update may donate the arrays that it was taken from,
and it has new arrays only for trained parameters. Readers take it over one at a time (staggered, as
in DART, arXiv 2509.23866), so that the others continue acting meanwhile.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from models.layers.functional import fill, only

Params = Any

_RECENT = 1024


class Snapshot(NamedTuple):
    """Parameters that never change."""

    version: int
    """Number of updates they have had."""
    params: Params


class Weights:
    """The newest version, for any number of readers.

    Args:
      params: initial parameters of the run. Leaves that are not trained are read from these
        forever, so they must never be donated.
      trained: tree of bool: the leaves that `publish` takes over; all if None.
      dtype: what trained floating-point leaves are cast to, such as bfloat16; None keeps theirs.
      version: of `params`.
      gathered: sharding of a full copy on every device, for parameters on several hosts; all of
        these must then publish the same versions.
      stage: applied to the untrained leaves, and once to each version that is taken over, before
        any reader has it; for example, to hand it to other hosts.
    """

    def __init__(
        self,
        params: Params,
        *,
        trained: Any = None,
        dtype: DTypeLike | None = None,
        version: int = 0,
        gathered: Sharding | None = None,
        stage: Callable[[Params], Any] = lambda params: params,
    ) -> None:
        self._trained = jax.tree.map(lambda _: True, params) if trained is None else trained
        base = only(params, jax.tree.map(lambda moves: not moves, self._trained))
        if gathered is not None:  # one after the other: devices may not have room for all
            whole = jax.jit(lambda x: x, out_shardings=gathered)
            base = jax.tree.map(lambda x: np.asarray(whole(x).addressable_data(0)), base)
        self._base = stage(base)
        self._stage, self._staged = stage, Snapshot(-1, None)
        self._copy = jax.jit(
            lambda tree: jax.tree.map(lambda x: _copied(x, dtype), tree), out_shardings=gathered
        )
        self._gathered = gathered is not None
        self._refreshing = threading.Lock()  # held by the reader that takes a version over
        self._changed = threading.Lock()  # guards all that follows
        self._newest = Snapshot(version, self._moving(params))
        self._published = time.monotonic()
        self._latencies: deque[float] = deque(maxlen=_RECENT)

    @property
    def version(self) -> int:
        """The newest version."""
        with self._changed:
            return self._newest.version

    @property
    def latencies(self) -> tuple[float, ...]:
        """Seconds from the end of `publish` until a reader had the version ready, for the last 1024
        times that a reader took one over."""
        with self._changed:
            return tuple(self._latencies)

    def publish(self, params: Params, version: int) -> None:
        """Copies the trained leaves; afterwards `params` may be donated.

        Raises:
          ValueError: the version is not newer than the last.
        """
        if version <= self.version:
            raise ValueError(f"Version {version} is not newer than version {self.version}.")
        snapshot = Snapshot(version, self._moving(params))
        with self._changed:
            self._newest, self._published = snapshot, time.monotonic()

    def _moving(self, params: Params) -> Params:
        copied = self._copy(only(params, self._trained))
        return jax.tree.map(lambda x: x.addressable_data(0), copied) if self._gathered else copied


class WeightsReader:
    """Reads `Weights` on one thread, which acts. `place` puts a tree onto its device, like
    `jax.device_put` with a sharding, and `join` combines trained leaves and the others into what
    the thread acts with."""

    def __init__(
        self,
        weights: Weights,
        place: Callable[[Any], Any] = lambda params: params,
        join: Callable[[Any, Any], Any] = fill,
    ) -> None:
        self._weights, self._place, self._join = weights, place, join
        self._base = place(weights._base)
        self._held = Snapshot(-1, None)
        self.read(0)

    def read(self, oldest: int) -> Snapshot:
        """The newest version, ready to compute with. While another reader takes one over, it is the
        version that this reader holds, if `oldest` or newer; otherwise this reader waits for its
        turn.

        Raises:
          RuntimeError: no such version has been published.
        """
        weights = self._weights
        if weights.version > self._held.version:
            must = self._held.version < oldest or self._held.params is None
            if weights._refreshing.acquire(blocking=must):
                try:
                    self._take()
                finally:
                    weights._refreshing.release()
        if self._held.version < oldest:
            raise RuntimeError(
                f"Version {oldest} of the policy is needed, but {self._held.version} is the newest."
            )
        return self._held

    def _take(self) -> None:
        weights = self._weights
        with weights._changed:
            newest, published = weights._newest, weights._published
        if weights._staged.version != newest.version:
            weights._staged = Snapshot(newest.version, weights._stage(newest.params))
        moving = jax.block_until_ready(self._place(weights._staged.params))
        joined = self._join(moving, self._base)
        taken = time.monotonic() - published
        first = self._held.params is None
        self._held = Snapshot(newest.version, joined)
        if not first:
            with weights._changed:
                weights._latencies.append(taken)


def _copied(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    cast = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.copy(x.astype(dtype) if cast else x)
