"""Keys under which a robot's own clients send an observation, such as openpi's examples for LIBERO,
DROID and ALOHA, or those of a LeRobot dataset.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RawKeys:
    """Keys of an observation; "/" separates those of nested maps.

    `images`: pairs of a key and the policy's camera. `state`: keys whose numbers are concatenated.
    `prompt`: key of the task in words; if it is not sent, `default` is used, and if that is None,
    an empty one is read as it is. `ignored`: keys that
    may be sent and are not read.
    """

    images: tuple[tuple[str, str], ...]
    state: tuple[str, ...]
    prompt: str = "prompt"
    default: str | None = ""
    ignored: tuple[str, ...] = ()
