"""Work on other hosts, as Ray actors. Ray places them where there is room, and starts, watches and
restarts them (docs.ray.io, fault tolerance of actors).

Ray is imported only when it is needed. Its workers get the packages of this repository and the
settings of JAX that this process has.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

STARTING = 600.0
"""Seconds in which a worker must have started, including the time to find room."""
_ENDING = 60.0
"""Seconds that a process that is being ended may take."""


class Lost(Exception):
    """A worker's process or host is gone, and the request with it. It is also raised in the worker,
    by a replacement process in which `start` was not called yet."""


@contextmanager
def cluster(address: str | None, cpus: float) -> Iterator[None]:
    """A connection to the Ray at `address` ("auto": the one that this machine belongs to), or, if
    None, to a Ray of this machine alone with room for `cpus` CPUs. It lasts as long as the block.
    If there is a connection already, it is used.

    Raises:
      ValueError: Ray is not installed, or there is none at the address.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address is None:
        room = max(cpus, os.cpu_count() or 1)
        with warnings.catch_warnings():  # JAX's warning of a fork that only runs Ray's programs
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init("local", include_dashboard=False, num_cpus=int(room + 1), **quiet)
    else:
        import models
        import parallel
        import rl
        import sim

        try:
            ray.init(address, runtime_env={"py_modules": [models, parallel, rl, sim]}, **quiet)
        except ConnectionError as error:
            raise ValueError(
                f"Ray at --ray-address {address} cannot be reached, or refuses this process "
                f"({error}); start it with `ray start --head`, give this process its token if it "
                f"requires one, or leave out the option to start Ray on this machine."
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


class RayWorker:
    """An object of class `kind` in a process of its own, on whichever host has room for it.

    If its process or host ends, Ray makes a new process. In each process, `start` must be called
    first; it may return anything, and it is repeated until a process has answered it.

    Args:
      name: for errors, such as "simulator 1".
      threads: number of calls that it works on at a time.
    """

    def __init__(self, name: str, kind: type, *, cpus: float, gpus: float, threads: int = 1):
        self.name = name
        self._ray, self._closed = load_ray(), False
        self._actor = (
            self._ray.remote(kind)
            .options(
                max_restarts=-1,
                max_concurrency=threads,
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": _settings(gpus)},
            )
            .remote()
        )
        self._needs = f"{cpus:g} CPUs and {gpus:g} GPUs"

    def start(self, *given: Any) -> "Future[Any]":
        """Calls `start` in a process that has just begun."""
        return self._actor.start.options(max_task_retries=-1).remote(*given).future()

    def call(self, method: str, *given: Any) -> "Future[Any]":
        """Calls a method once; the future, of what the process returns, is for `result`."""
        return getattr(self._actor, method).remote(*given).future()

    def result(self, future: "Future[Any]", seconds: float = 0.0) -> Any:
        """Result of a request; a worker without an answer in time counts as hung and is replaced.

        Raises:
          Lost: the process is gone or was hung; another takes its place.
          ValueError: there will be no other.
          BaseException: what it raised, as ValueError or FileNotFoundError if it was one and
            RuntimeError otherwise, with the worker's name.
        """
        try:
            return future.result(seconds)
        except TimeoutError:
            self.replace(future, seconds)
        except Exception as error:
            self._refuse(error)

    def replace(self, future: "Future[Any]", seconds: float) -> NoReturn:
        """Ends a process that has not answered a call for `seconds`, and waits until it has ended.

        Raises:
          Lost: always, unless as `result`.
        """
        self.kill()
        with suppress(Lost, TimeoutError):
            try:
                future.result(_ENDING)
            except self._ray.exceptions.RayError as error:
                self._refuse(error)
        raise Lost(f"hung: no answer for {seconds:g} s")

    def started(self, future: "Future[Any]", seconds: float = STARTING) -> Any:
        """Result of `start`, which must come within `seconds`.

        Raises:
          ValueError: there is no room for it, or it ends again and again.
          BaseException: as `result`.
        """
        try:
            return future.result(seconds)
        except self._ray.exceptions.RayTaskError as error:  # perhaps a TimeoutError of its own
            self._refuse(error)
        except TimeoutError:
            room = {k: v for k, v in self._ray.available_resources().items() if k in _COUNTED}
            raise ValueError(
                f"{self.name} did not start within {STARTING:g} s: it needs {self._needs}, and Ray "
                f"has {room} left; add hosts with room, or ask for fewer or smaller workers."
            ) from None
        except Exception as error:
            try:
                self._refuse(error)
            except Lost as lost:
                raise ValueError(f"{self.name} {lost} and did not come back.") from error

    def kill(self) -> None:
        """Ends the process; Ray makes another."""
        self._ray.kill(self._actor, no_restart=self._closed)

    def close(self) -> None:
        """Ends the worker for good."""
        self._closed = True
        if self._ray.is_initialized():
            self.kill()

    def _refuse(self, error: Exception) -> NoReturn:
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError):
            cause = error.cause
            if isinstance(cause, Lost):
                raise Lost(str(cause)) from error
            kind = next((k for k in (ValueError, FileNotFoundError) if isinstance(cause, k)), None)
            said = str(cause) if kind else f"{type(cause).__name__}: {cause}"
            raise (kind or RuntimeError)(f"{self.name} failed: {said}") from error
        if self._closed:
            raise ValueError(f"{self.name} was closed while it was working.") from error
        if isinstance(error, (errors.ActorUnavailableError, errors.ObjectLostError)):
            raise Lost(f"died ({error})") from error
        raise ValueError(f"{self.name} is gone for good: {error}") from error


def unstarted() -> Lost:
    """Error for a process that is asked for something before `start` was called in it."""
    return Lost("died while it was idle")


_COUNTED = ("CPU", "GPU", "memory")


def load_ray() -> Any:
    """Imports Ray; raises ValueError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ValueError(
            "Ray is not installed, so nothing can act on other hosts; run "
            "`pip install -e '.[ray]'` in Chiliad's repository."
        ) from None
    return ray


def _settings(gpus: float) -> dict[str, str]:
    """Environment of a worker; without a GPU it computes on the CPU."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_")) or k == "NPROC"}
    return kept if gpus else {**kept, "JAX_PLATFORMS": "cpu"}
