"""A policy behind a server that speaks openpi's websocket protocol (ours, openpi's or anyone's),
for acting in a suite.

The inputs that a server expects are read from its metadata if it lists them, as ours does;
otherwise the server is sent what openpi's clients send (examples/libero/main.py). Several
connections send requests at once, so that a server can batch them.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from queue import LifoQueue
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, UInt8, UInt32
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from models.inputs.camera_names import find_camera, plain_name
from models.inputs.pictures import resize_with_pad
from models.robot_policy import RobotSpec
from models.session import RobotSession
from tools.serving.wire import pack, unpack

PICTURE = 224
"""Edge of the pictures that openpi's clients send, in pixels."""
CONNECTIONS = 16
"""Connections at once: the number of rows in our server's largest default batch."""
_ALIASES = {
    "observation/image": "observation.images.image",
    "observation/wrist_image": "observation.images.image2",
}
"""openpi's keys for LIBERO's cameras, and LeRobot's names for them, which the suite uses."""
_STATE = "observation/state"
_LARGEST = 64 * 2**20
"""Largest answer, in bytes."""
_SECONDS = 600.0
"""Longest wait for an answer; a server may compile before its first answer."""


class RemotePolicy(AbstractContextManager["RemotePolicy"]):
    """A policy at `url`, whose `metadata` has been read; use as a context manager.

    Args:
      url: ws://host:port or wss://host:port.
      token: token that the server requires, if any (openpi's `api_key`).
      cameras: {the suite's camera: the server's key} for keys that neither match a camera by their
        last parts nor are openpi's keys for LIBERO.

    Raises:
      ValueError: `url` is no such address, or what answers there is no such server.
      ConnectionError: nothing answers there.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        cameras: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise ValueError(f"--policy is '{url}'; give a server's ws://HOST:PORT or wss://…")
        self.url, self.cameras = url, cameras
        self._headers = {"Authorization": f"Api-Key {token}"} if token else None
        self._opened = ExitStack()
        try:
            first, self.metadata = self._connect()
        except BaseException:
            self._opened.close()
            raise
        self._free: LifoQueue[ClientConnection | None] = LifoQueue()
        for connection in [None] * (CONNECTIONS - 1) + [first]:
            self._free.put(connection)
        self._threads = ThreadPoolExecutor(CONNECTIONS, "remote policy")

    @property
    def picture(self) -> int:
        """Edge of the pictures that the policy sees, 224 if the server does not report it."""
        told = self.metadata.get("picture")
        return told if type(told) is int and told > 0 else PICTURE

    @property
    def horizon(self) -> int | None:
        """Steps of a chunk; None if the server does not report them."""
        told = self.metadata.get("actions")
        shape = told.get("shape") if isinstance(told, dict) else None
        steps = shape[0] if isinstance(shape, list | tuple) and len(shape) == 2 else None
        return steps if type(steps) is int and steps > 0 else None

    def ask(self, messages: Sequence[Mapping[str, Any]]) -> list[Float[np.ndarray, "h a"]]:
        """A chunk for each message, in the robot's units.

        Raises:
          ValueError: the server refused a message, or its answer is no chunk.
          ConnectionError: the server has gone.
        """
        return list(self._threads.map(self._ask, messages))

    def close(self) -> None:
        """Ends all connections."""
        self._threads.shutdown()
        self._opened.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self) -> tuple[ClientConnection, dict[str, Any]]:
        try:
            connecting = connect(
                self.url,
                compression=None,
                max_size=_LARGEST,
                ping_interval=None,  # openpi's server answers no pings while it computes
                additional_headers=self._headers,
            )
            connection = self._opened.enter_context(connecting)
        except (InvalidHandshake, InvalidURI) as error:
            raise ValueError(
                f"Cannot connect to {self.url}: {error}. Is it a policy server, and does it "
                "need a token (--token-file)?"
            ) from None
        except OSError as error:
            raise ConnectionError(f"{self.url} does not answer: {error}") from None
        return connection, self._received(connection)

    def _ask(self, message: Mapping[str, Any]) -> Float[np.ndarray, "h a"]:
        connection = self._free.get()
        try:
            connection = connection or self._connect()[0]
            with suppress(ConnectionClosed):  # the server may have said why; reading raises that
                connection.send(pack(message))
            answer = self._received(connection)
        finally:
            self._free.put(connection)
        chunk = answer.get("actions")
        if not isinstance(chunk, np.ndarray) or chunk.ndim != 2 or chunk.dtype.kind != "f":
            kind = f"{chunk.dtype} {chunk.shape}" if isinstance(chunk, np.ndarray) else chunk
            raise ValueError(
                f"{self.url} answered {sorted(answer)} with actions {kind!s:.60}; expected "
                "floating-point actions [steps, dims]."
            )
        return chunk

    def _received(self, connection: ClientConnection) -> dict[str, Any]:
        try:
            answer = connection.recv(timeout=_SECONDS)
        except TimeoutError:
            raise ConnectionError(f"{self.url} has not answered for {_SECONDS:.0f} s.") from None
        except ConnectionClosed as error:
            raise ConnectionError(f"{self.url} closed the connection: {error}.") from None
        if isinstance(answer, str):
            last = (answer[-10_000:].strip().splitlines() or [""])[-1]  # of openpi's traceback
            raise ValueError(f"{self.url} refused a request: {last:.500}")
        try:
            return unpack(answer)
        except ValueError as error:
            raise ValueError(f"{self.url} does not speak openpi's protocol: {error}") from None


@dataclass(frozen=True)
class RemoteRobot:
    """A remote policy in a suite. `cameras`: the server's keys, each with its place among the
    suite's cameras; `state`: the state's key, None if the policy reads none; `edge`: size in which
    pictures are sent, None for as drawn."""

    policy: RemotePolicy
    cameras: Mapping[str, int]
    state: str | None
    edge: int | None

    @classmethod
    def in_suite(cls, policy: RemotePolicy, spec: RobotSpec) -> "RemoteRobot":
        """A server's policy in a suite.

        Raises:
          ValueError: the server's inputs and actions are not the suite's, or neither the server nor
            the policy's `cameras` tell which camera is which.
        """
        inputs = policy.metadata.get("inputs")
        told: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
        if told:
            pictures = [key for key, kind in told.items() if _dtype(kind) == "uint8"]
            states = [key for key, kind in told.items() if _dtype(kind).startswith("float")]
            _check_dims(policy, spec, told, states)
            edge = None
        else:
            pictures, states = list(policy.cameras.values() or _ALIASES), [_STATE]
            edge = PICTURE
        keys = {plain_name(key): key for key in pictures}
        given = {keys.get(plain_name(key), key): theirs for theirs, key in policy.cameras.items()}
        places = {key: _place(key, spec.cameras, given) for key in pictures}
        found = {key: at for key, at in places.items() if at is not None}
        needed = {key for key in pictures if not (told and told[key].get("optional"))}
        if not found or needed - found.keys() or given.keys() - places.keys():
            says = f"asks for {pictures}" if told else "does not say which images it takes"
            raise ValueError(
                f"The server at {policy.url} {says}, and {spec.name} has cameras "
                f"{list(spec.cameras)}; name the image for each camera: --cameras "
                "CAMERA=KEY, such as "
                f"{spec.cameras[0]}={(pictures or ['observation/image'])[0]}."
            )
        return cls(policy, found, states[0] if states else None, edge)

    def session(self, number: int, continues: bool) -> RobotSession:
        """State of an episode; what the policy itself remembers is its server's."""
        return RobotSession(number, continues=continues)

    def act(
        self,
        observation: tuple[UInt8[ArrayLike, "n c h w 3"], Float[ArrayLike, "n s"]],
        prompts: Sequence[str],
        keys: UInt32[np.ndarray, "n 2"],
        *,
        sessions: Sequence[RobotSession] | None = None,
        executed: Sequence[int | None] | None = None,
        committed: int = 0,
    ) -> Float[np.ndarray, "n t a"]:
        """Chunks in the robot's units for N observations (`sim.acting.Policy`). The server draws
        their noise, so `keys` have no effect.

        Args:
          sessions, executed: as in `RobotPolicy.act`. Each chunk begins with `committed` steps of
            what is left of the session's last one, if anything is left.
        """
        images, states = (np.asarray(x) for x in observation)
        rows = zip(images, states, prompts, strict=True)
        chunks = self.policy.ask([self._message(*row) for row in rows])
        if len({chunk.shape for chunk in chunks}) > 1:
            shapes = sorted({chunk.shape for chunk in chunks})
            raise ValueError(
                f"{self.policy.url} answered with chunks of different shapes, {shapes}."
            )
        answered = np.stack(chunks).astype(np.float32)
        if sessions is None or executed is None:
            return answered
        for chunk, session, done in zip(answered, sessions, executed, strict=True):
            left = session.left(done, committed)
            if left is not None:
                chunk[:committed] = left[:committed]
            session.step = session.after(done)
            session.answered(chunk)
        return answered

    def _message(
        self, shown: UInt8[np.ndarray, "c h w 3"], state: Float[np.ndarray, " s"], prompt: str
    ) -> dict[str, Any]:
        pictures = {key: shown[at] for key, at in self.cameras.items()}
        if self.edge is not None:
            pictures = {key: resize_with_pad(x, self.edge) for key, x in pictures.items()}
        felt = {} if self.state is None else {self.state: np.asarray(state, np.float32)}
        return {**pictures, **felt, "prompt": prompt}


def _dtype(kind: Any) -> str:
    return str(kind.get("dtype")) if isinstance(kind, dict) else ""


def _place(key: str, known: tuple[str, ...], given: Mapping[str, str]) -> int | None:
    """The place among the suite's cameras of the camera that the server calls `key`."""
    place = find_camera(given.get(key, key), known)
    alias = _ALIASES.get(key)
    return known.index(alias) if place is None and alias in known else place


def _check_dims(
    policy: RemotePolicy, spec: RobotSpec, told: Mapping[str, Any], states: Sequence[str]
) -> None:
    """Raises ValueError unless the server reads the suite's state and answers its actions."""
    dims = len(spec.state_names), len(spec.action_names)
    read = [told[key].get("shape") for key in states]
    shape = (policy.metadata.get("actions") or {}).get("shape", [0, dims[1]])
    if read not in ([], [[dims[0]]]) or shape[-1] != dims[1]:
        raise ValueError(
            f"The server at {policy.url} reads states {dict(zip(states, read, strict=True))} "
            f"and answers with actions of {shape[-1]} dims, but {spec.name} has {dims[0]} state "
            f"and {dims[1]} action dims; choose a suite of the server's robot."
        )
