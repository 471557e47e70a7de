"""A policy without a checkpoint: it plays back the recorded actions of an episode as chunks, so
that a robot and its client can be tried before there is a policy.

Whatever the client sends is accepted; each request advances the episode by as many steps as the
client executes of a chunk.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from data import Dataset, open_dataset
from data.frames import usual_columns
from data.mixture.recorded import read_joined
from models import Embodiment, Normalizer
from models.inputs.camera_names import plain_name
from models.inputs.observation import CONTROLS, Inputs, inputs_of
from models.session import RobotSession
from tools.serving.client import Reply
from tools.serving.inputs import client_inputs


class Replay:
    """Plays back an episode to each client from its beginning. A request that says how many steps
    were `executed` continues from there; otherwise the whole last chunk counts as executed.

    Args:
      actions: recorded actions, one for each frame.
      steps: of a chunk.
      inputs: inputs of the recording, which clients are told and with which their messages are
        recorded.

    Raises:
      ValueError: there are no actions, or a chunk has no steps.
    """

    def __init__(
        self, actions: Float32[np.ndarray, "t a"], steps: int, inputs: Inputs, where: str
    ) -> None:
        if steps < 1 or not len(actions):
            raise ValueError(
                f"{where}: has {len(actions)} actions, and chunks have {steps} steps; both must "
                "be at least 1."
            )
        self._actions, self._steps, self._where = actions, steps, where
        self.inputs = inputs
        self.metadata: Mapping[str, Any] = {
            "robot": where,
            "inputs": inputs.expected,
            "actions": {"dtype": "float32", "shape": [steps, actions.shape[1]]},
            "chunking": list(CONTROLS),
            "replay": True,
        }

    def join(self, number: int) -> RobotSession:
        """A client's session; its last chunk and where that began are its place in the episode."""
        return RobotSession(number)

    def leave(self) -> None:
        """Nobody waits for a client."""

    def read(self, message: Mapping[str, Any], session: RobotSession) -> int:
        """The place in the episode at which this client's next chunk begins.

        Raises:
          ValueError: the episode has ended, or `executed` is not one of the last chunk's steps.
        """
        acted = next((v for k, v in message.items() if plain_name(str(k)) == CONTROLS[0]), None)
        given = 0 if session.chunk is None else len(session.chunk)
        if acted is None:
            acted = given
        elif type(acted) is not int or not 0 <= acted <= given:
            raise ValueError(f"'executed' is {acted!r:.40}; the last chunk had {given} steps.")
        start = session.after(acted)
        if start >= len(self._actions):
            raise ValueError(
                f"{self._where} has ended after {len(self._actions)} actions; connect again to "
                "play it from the beginning."
            )
        session.step = start
        return start

    def submit(self, request: int) -> Future[Reply]:
        """The next steps; fewer at the episode's end, as none were recorded after it."""
        done: Future[Reply] = Future()
        done.set_result(Reply(self._actions[request : request + self._steps].copy(), 0.0))
        return done


def open_replay(path: str | Path, episode: int, steps: int, pairs: Sequence[str] = ()) -> Replay:
    """A recorded episode of a dataset of any format, to play back.

    Args:
      steps: steps of a chunk, as many as the client executes before its next request.
      pairs: names that clients use for their observations, see `client_inputs`.

    Raises:
      ValueError: there is no such episode, or the dataset has no actions.
      DatasetError: it cannot be read.
    """
    dataset = open_dataset(path)
    named = usual_columns(dataset.column_names)[1]
    if not named:
        raise ValueError(
            f"{path}: has no column 'action' or 'actions', only {list(dataset.column_names)}; "
            "there is nothing to play back."
        )
    if not 0 <= episode < len(dataset.lengths):
        raise ValueError(
            f"{path}: there is no episode {episode}; give --episode 0 to "
            f"{len(dataset.lengths) - 1}."
        )
    (actions,) = read_joined(dataset, episode, [named])
    return Replay(actions, steps, _inputs(dataset, pairs), f"Episode {episode} of {path}")


def _inputs(dataset: Dataset, pairs: Sequence[str]) -> Inputs:
    held = usual_columns(dataset.column_names)[0]
    dims = sum(int(np.prod(dataset.features[name]["shape"])) for name in held)
    state, action = (Normalizer.identity(count) for count in (dims, 1))
    robot = Embodiment("replay", tuple(dataset.cameras), state, action)
    return client_inputs(inputs_of(robot, bool(dims)), pairs)
