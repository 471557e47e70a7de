"""A policy bound to a recording of its own robot, and requests for the recorded observations, as
recorded or with one change: a black camera, another prompt, other noise.

Open-loop evaluation compares the answers (`tools.recipes.open_loop`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float, UInt8

from data import Dataset, open_dataset
from data.dataset import dimension_names
from data.mixture.mixture import (
    DatasetConfig,
    Mixture,
    Reading,
    RobotConfig,
    read_mixture,
    resolve,
)
from data.mixture.recorded import RecordedEpisode, read_pictures, read_recorded
from models import Embodiment, Policy
from models.inputs.observation import RobotObservation
from models.requests import Request
from models.robot_policy import processor_of
from models.session import RobotSession
from sim.open_loop import AGAIN, BLIND, POLICY, STILL, TOLD, without
from tools.recipes.prepare import known

_AGAIN = 1 << 31
"""Added to a frame's number for other noise; no episode is that long."""

Pictures = list[UInt8[np.ndarray, "n _h _w 3"] | None]
"""Pictures of an episode by the policy's cameras; None for cameras that the recording lacks."""
Change = Callable[[RecordedEpisode, Pictures], Iterator[Request]]


@dataclass(frozen=True, eq=False)
class BoundRecording:
    """A policy with a dataset of its own robot, and how the dataset is read."""

    policy: Policy
    dataset: Dataset
    settings: DatasetConfig
    reading: Reading

    @property
    def robot(self) -> Embodiment:
        """The policy's embodiment."""
        return processor_of(self.policy, "a recording").embodiments[self.policy.embodiment]

    @property
    def action_names(self) -> tuple[str, ...]:
        """One name for each dim; numbers if a transform changed how many dims there are."""
        return self._names(self.settings.actions, len(self.robot.actions.offset))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Like `action_names`, for the state."""
        return self._names(self.settings.state, len(self.robot.state.offset))

    def _names(self, columns: Sequence[str], dims: int) -> tuple[str, ...]:
        told: list[str] = []
        for name in columns:
            feature = self.dataset.features[name]
            told += dimension_names(feature.get("names"), int(np.prod(feature["shape"])))
        return tuple(told if len(told) == dims else map(str, range(dims)))


def opened(data: str) -> tuple[DatasetConfig, Dataset]:
    """The one dataset at a path, or of a mixture's file, and how it is read.

    Raises:
      ValueError, FileNotFoundError: there is none, there are several, or it has no cameras.
    """
    mixture = read_mixture(data)
    if len(mixture.datasets) != 1:
        raise ValueError(
            f"{data}: lists {len(mixture.datasets)} datasets; give one of them at a time."
        )
    (settings,) = mixture.datasets
    dataset = open_dataset(settings.path)
    if not dataset.cameras:
        raise ValueError(f"{settings.path}: has no cameras; a policy needs images.")
    return settings, dataset


def bound(policy: Policy, settings: DatasetConfig, dataset: Dataset) -> BoundRecording:
    """Binds a policy to a recording of its robot.

    Raises:
      ValueError: the policy lacks a processor, it knows several robots and none is the dataset's,
        or their cameras, state or actions do not fit; the message lists both.
    """
    processor = processor_of(policy, "a recording")
    names = [robot.name for robot in processor.embodiments]
    wanted = settings.embodiment or dataset.name
    if wanted not in names and (settings.embodiment or len(names) > 1):
        raise ValueError(
            f"{settings.path}: is of robot '{wanted}', but the policy was trained on {names}; "
            "give one of these as the dataset's 'embodiment' in a mixture's file."
        )
    index = names.index(wanted) if wanted in names else 0
    robot = processor.embodiments[index]
    mixture = Mixture(
        (replace(settings, embodiment=robot.name),),
        (RobotConfig(robot.name, robot.cameras, robot.relative),),
    )
    _check_cameras(settings, dataset, robot)
    _, (reading,) = resolve(mixture, [known(dataset)], processor.horizon)
    steps = len(policy.model.config.answered)
    reading = reading._replace(ahead=reading.ahead[:steps])
    found = BoundRecording(replace(policy, embodiment=index), dataset, settings, reading)
    _check_dims(found)
    return found


def changed_requests(
    recording: BoundRecording, still: Float[np.ndarray, " s"], prompts: Sequence[str]
) -> dict[str, Change]:
    """Requests for an episode's observations, by what is changed in them; the first are as
    recorded."""
    robot, processor = recording.robot, processor_of(recording.policy, "a recording")
    ask = partial(recorded_requests, recording)
    known_prompts = (wordings[0] for wordings in recording.reading.prompts)
    different = list(dict.fromkeys([*prompts, *known_prompts]))
    seen = [
        name
        for name, own_name in zip(robot.cameras, recording.reading.cameras, strict=True)
        if own_name is not None
    ]
    found: dict[str, Change] = {POLICY: ask, AGAIN: partial(ask, noise=_AGAIN)}
    if len(seen) > 1:
        found |= {without(camera): partial(ask, black=(camera,)) for camera in seen}
    found[BLIND] = partial(ask, black=tuple(seen))
    if len(different) > 1:
        found[TOLD] = partial(ask, prompts=different)
    if processor.state_input != "none":
        found[STILL] = partial(ask, state=still)
    return found


def recorded_requests(
    recording: BoundRecording,
    one: RecordedEpisode,
    pictures: Pictures,
    *,
    black: tuple[str, ...] = (),
    prompts: Sequence[str] = (),
    state: Float[np.ndarray, " s"] | None = None,
    noise: int = 0,
) -> Iterator[Request]:
    """Requests for an episode's observations, each with the past that the policy reads beside it.

    Args:
      black: cameras whose pictures are black.
      prompts: if given, each row gets one of these instead of its own prompt.
      state: state that the model is given instead of the recorded one; actions are still relative
        to the recorded one.
      noise: number that is added to the frame in the noise's key.
    """
    session, wanted = recording.policy.session(one.episode), set(one.at.tolist())
    if session.lookback:
        one, pictures = _with_past(recording, one, session)
    for i, frame in enumerate(one.at.tolist()):
        shown = one_of(recording.robot.cameras, pictures, i)
        shown |= {name: np.zeros_like(shown[name]) for name in black if name in shown}
        prompt = _other(one.prompts[i], prompts, i) if prompts else one.prompts[i]
        seen = RobotObservation(shown, prompt, one.state[i] if state is None else state)
        seen = session.observe(seen, frame)
        if frame in wanted:
            yield request(recording, seen, (one.episode, frame + noise), one.state[i])


def request(
    recording: BoundRecording,
    seen: RobotObservation,
    key: tuple[int, int],
    state: Float[np.ndarray, " s"],
) -> Request:
    """Request for one observation, whose actions are relative to `state` whatever the model is
    given."""
    (prepared,) = recording.policy.prepare([seen], np.array([key], np.int64))
    return replace(prepared, state=state)


def _with_past(
    recording: BoundRecording, one: RecordedEpisode, session: RobotSession
) -> tuple[RecordedEpisode, Pictures]:
    """The episode and its pictures at its frames and at those that are read beside them."""
    dataset, reading = recording.dataset, recording.reading
    if reading.step != 1:
        raise ValueError(
            f"{recording.settings.path}: a step of the policy is {reading.step:g} frames, but a "
            "policy that reads past observations is evaluated on recordings of its own rate alone."
        )
    steps = sorted({0, *(step for steps in session.observed.values() for step in steps)})
    at = np.unique(np.maximum(one.at[:, None] + np.array(steps), 0))
    found = read_recorded(dataset, recording.settings, reading, one.episode, at)
    return found, read_pictures(dataset, reading, one.episode, at)


def one_of(cameras: Sequence[str], pictures: Pictures, i: int) -> dict[str, np.ndarray]:
    """One observation's pictures by camera."""
    pairs = zip(cameras, pictures, strict=True)
    return {name: frames[i] for name, frames in pairs if frames is not None}


def _other(prompt: str, prompts: Sequence[str], i: int) -> str:
    """One of the prompts other than this one; which one depends on the row."""
    return prompts[(prompts.index(prompt) + 1 + i % (len(prompts) - 1)) % len(prompts)]


def _check_cameras(settings: DatasetConfig, dataset: Dataset, robot: Embodiment) -> None:
    if settings.cameras is not None:
        return  # what is not mentioned is absent, and `resolve` refuses unknown names
    theirs = {name for full in dataset.cameras for name in (full, full.rpartition(".")[2])}
    lacking = set(robot.cameras) - theirs
    if not lacking <= set(robot.absent) or lacking == set(robot.cameras):
        raise ValueError(
            f"{settings.path}: has cameras {list(dataset.cameras)}, but the policy expects "
            f"{list(robot.cameras)}; map the dataset's cameras to the policy's, as in "
            f"`--cameras {dataset.cameras[0].rpartition('.')[2]}={robot.cameras[0]}`."
        )


def _check_dims(recording: BoundRecording) -> None:
    """Reads one observation, as a transform may change how many dims there are."""
    dataset, robot = recording.dataset, recording.robot
    some = np.flatnonzero(dataset.lengths)
    if not len(some):
        return
    one = read_recorded(
        dataset, recording.settings, recording.reading, int(some[0]), np.zeros(1, np.int64)
    )
    found = one.state.shape[1], one.actions.shape[2]
    wanted = len(robot.state.offset), len(robot.actions.offset)
    if found != wanted:
        settings = recording.settings
        raise ValueError(
            f"{settings.path}: state {list(settings.state)} has {found[0]} dims and actions "
            f"{list(settings.actions)} have {found[1]}, but the policy was trained on "
            f"'{robot.name}' with {wanted[0]} and {wanted[1]}; choose columns, or give a "
            "transform, in a mixture's file."
        )
