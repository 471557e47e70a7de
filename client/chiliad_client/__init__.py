"""Robot-side client of a policy server that speaks openpi's websocket protocol: a control loop at a
fixed rate, action chunks laid out by tick, safety limits, reconnection and recording.
"""

from .chunks import ActionPlan, Chunk, Delays
from .connection import Backoff, Connection, ServerAnswer, ServerSession
from .contract import Command, DriveReport, LoopSettings
from .lerobot_robot import LeRobotRobot
from .limits import Limited, SafetyLimits
from .loop import ControlLoop, drive
from .recording import EpisodeRecorder

__all__ = [
    "ActionPlan",
    "Backoff",
    "Chunk",
    "Command",
    "Connection",
    "ControlLoop",
    "Delays",
    "DriveReport",
    "EpisodeRecorder",
    "LeRobotRobot",
    "Limited",
    "LoopSettings",
    "SafetyLimits",
    "ServerAnswer",
    "ServerSession",
    "drive",
]
