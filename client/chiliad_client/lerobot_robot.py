"""Lets the control loop drive LeRobot's robots: converts what `Robot.get_observation` returns and
`send_action` takes in LeRobot 0.3 to 0.6 (src/lerobot/robots/robot.py) to and from the policy's
state, images and actions. LeRobot itself is not imported: any object with these methods works.
"""

from __future__ import annotations

from typing import Any, Mapping, Protocol

import numpy as np

_STATE = "observation/state"


class LeRobotLike(Protocol):
    """The part of LeRobot's `Robot` that is used."""

    @property
    def observation_features(self) -> Mapping[str, Any]:
        """`float` for each number, (height, width, 3) for each camera."""

    @property
    def action_features(self) -> Mapping[str, Any]:
        """`float` for each number of an action."""

    @property
    def is_connected(self) -> bool:
        """True between `connect` and `disconnect`."""

    def connect(self) -> None:
        """Opens motors and cameras."""

    def get_observation(self) -> Mapping[str, Any]:
        """Numbers and images by name."""

    def send_action(self, action: dict[str, float]) -> Mapping[str, Any] | None:
        """Sends numbers by name; returns those actually sent, where they differ."""

    def disconnect(self) -> None:
        """Closes motors and cameras."""


class LeRobotRobot:
    """A LeRobot robot for `drive`; as a context manager, it connects and disconnects the robot.

    The state is the robot's floats in the order of `observation_features`, and actions are in the
    order of `action_features`, both as LeRobot records them. Actions must be absolute targets of
    numbers that the robot also observes, as `SO100`'s are; for others, override `hold`.

    Args:
      cameras: {robot's camera: server's camera} of those to send; all under their own names if
        None.

    Raises:
      ValueError: the robot observes no numbers, lacks one of the cameras, or does not observe a key
        of its action.
    """

    def __init__(self, robot: LeRobotLike, cameras: Mapping[str, str] | None = None) -> None:
        self.robot = robot
        self.name = str(getattr(robot, "name", ""))
        features = robot.observation_features
        self.state_names: tuple[str, ...] = tuple(
            name for name, kind in features.items() if kind is float
        )
        own = [name for name, kind in features.items() if isinstance(kind, tuple)]
        unknown = [name for name in cameras or {} if name not in own]
        if unknown or not self.state_names:
            raise ValueError(
                f"The robot observes the numbers {list(self.state_names)} and the cameras {own}, "
                f"not {unknown or 'any number'}; see its observation_features."
            )
        self.cameras = {name: name for name in own} if cameras is None else dict(cameras)
        self.action_names: tuple[str, ...] = tuple(robot.action_features)
        blind = [name for name in self.action_names if name not in self.state_names]
        if blind and type(self).hold is LeRobotRobot.hold:
            raise ValueError(
                f"The robot's actions have {blind}, which it does not observe, so the command "
                "that holds it is unknown; override `hold` in a subclass of LeRobotRobot."
            )

    def observe(self) -> dict[str, Any]:
        """State float32 [s], and images uint8 [h, w, 3] by camera."""
        seen = self.robot.get_observation()
        state = np.array([float(seen[name]) for name in self.state_names], np.float32)
        pictures = {
            f"observation/{shown}": np.asarray(seen[name]) for name, shown in self.cameras.items()
        }
        return {**pictures, _STATE: state}

    def act(self, action: np.ndarray) -> np.ndarray:
        """Sends an action [a]; returns the action that the robot reports as sent, [a]."""
        given = {name: float(value) for name, value in zip(self.action_names, action)}
        sent = {**given, **(self.robot.send_action(given) or {})}
        return np.array([float(sent[name]) for name in self.action_names])

    def hold(self, seen: Mapping[str, Any], last: np.ndarray | None) -> np.ndarray:
        """The last command, or the current position if there is none."""
        if last is not None:
            return last
        places = [self.state_names.index(name) for name in self.action_names]
        return np.asarray(seen[_STATE], np.float64)[places]

    def __enter__(self) -> LeRobotRobot:
        if not self.robot.is_connected:
            self.robot.connect()
        return self

    def __exit__(self, *error: object) -> None:
        if self.robot.is_connected:
            self.robot.disconnect()
