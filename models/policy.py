"""A trained model with its preparation: observations and prompts in, action chunks in the robot's
units out.

Evaluation, serving and RL share it. Batches are padded to one of a few sizes and prompts to one of
a few lengths, so that few programs are compiled. A row's chunk depends on its own observation and
key alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Integer, UInt8

from models.files import html
from models.flow import flow
from models.flow.realtime_chunking import LIMIT, Chunking, Given, Guidance, Left, left_over
from models.inputs.embodiment import Embodiment
from models.inputs.observation import (
    Inputs,
    Observations,
    RobotObservation,
    inputs_of,
    kind_of,
    samples_of,
)
from models.inputs.packed_batch import Layout, PackedBatch, Sample, most_images, pack
from models.inputs.processor import Processor
from models.model import bind_processor, function_at, require
from models.requests import (
    Request,
    check_noise,
    continuation_weights,
    key_words,
    split_rows,
    with_committed,
)
from models.session import RobotSession


@dataclass(frozen=True)
class Policy:
    """A policy that is ready to act. `model`: a `models.model.Model`; `loss` needs a FlowModel.
    `euler_steps`: those of the sampler, always the model's own. `embodiment`: index into the
    processor's embodiments. `sizes`: ascending batch sizes (numbers of rows) that are computed;
    other batches are padded to the next size, or split by the last. `shortest`: least number of
    places for a text; each doubling of it, up to the longest text, has its own compiled program.
    `chunking`: how a chunk continues the one before; if None, as the model was trained to, or
    guided if it was not. `guidance`: bound on the pull, see `realtime_chunking.guided`.

    Some checkpoints, such as GR00T's released base model, come without a processor; such a policy
    takes the model's own inputs.

    In batches of one size, a row gets the same chunk whatever the other rows are; chunks from
    batches of different sizes differ by rounding. With a single size, such as `sizes=(32,)`, the
    number of rows makes no difference.
    """

    model: Any
    params: Any
    processor: Processor | None
    embodiment: int = 0
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    guidance: float = LIMIT
    chunking: Chunking | None = None
    shortest: int = 16

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or sorted(set(self.sizes)) != list(self.sizes):
            raise ValueError(
                f"The policy's sizes are {self.sizes}; give at least one, positive and ascending."
            )
        if self.chunking == "trained" and not require(
            self.model.config, "rtc_max_delay", 'chunking "trained"'
        ):
            raise ValueError(
                "chunking is 'trained', but the model was not trained to continue chunks "
                "(model.rtc_max_delay is 0); use 'guided', which needs no training, or train "
                "with --model.rtc-max-delay."
            )
        if self.chunking == "guided":
            flow.check_guided(self.model.config.solver, self.euler_steps, self.guidance)

    def __repr__(self) -> str:
        robot = None if self.processor is None else self.processor.embodiments[self.embodiment].name
        return f"Policy(family={self.model.config.family!r}, robot={robot!r}, {self._size})"

    def _repr_html_(self) -> str:
        config = self.model.config
        facts = {
            "size": self._size,
            "chunk": f"{config.horizon} steps of up to {config.action_dim} dims",
        }
        if self.euler_steps:
            facts["sampler"] = f"{self.euler_steps} {config.solver.capitalize()} steps"
        if self.processor is not None:
            robot = self.processor.embodiments[self.embodiment]
            facts |= {
                "robot": robot.name,
                "cameras": ", ".join(robot.cameras),
                "state": f"{len(robot.state.offset)} dims, read as {config.state_input!r}",
                "actions": f"{len(robot.actions.offset)} dims",
            }
        return html.card(f"Policy of family {config.family!r}", facts)

    @property
    def euler_steps(self) -> int:
        return self.model.config.euler_steps

    @property
    def continues(self) -> Chunking:
        """Continuation of chunks: `chunking`, or the default for the model."""
        if self.chunking is not None:
            return self.chunking
        return "trained" if getattr(self.model.config, "rtc_max_delay", 0) else "guided"

    def act(
        self,
        observation: tuple[UInt8[ArrayLike, "n c h w 3"], Float[ArrayLike, "n s"]],
        prompts: list[str],
        keys: Integer[ArrayLike, "n 2"] | Sequence[tuple[int, int]] | None = None,
    ) -> Float[np.ndarray, "n t a"]:
        """Chunks for N observations, each (pictures in the embodiment's camera order, state).

        Args:
          keys: any two integers for each row, such as (episode, step), from which the noise is
            drawn where its chunk begins: the same keys give the same chunk, other keys another
            sample. (0, i) for row i if None.

        Raises:
          ValueError: cameras or state dims do not match the embodiment's, or there is no row.
        """
        robot = self._robot
        if not isinstance(observation, tuple | list) or len(observation) != 2:
            raise ValueError(
                f"act takes a pair, (images [n, cameras, h, w, 3], states [n, s]), got "
                f"{kind_of(observation)}; `infer` takes an observation by its keys."
            )
        images, states = (np.asarray(x) for x in observation)
        if images.ndim != 5 or images.shape[1] != len(robot.cameras):
            raise ValueError(
                f"Embodiment '{robot.name}' has cameras {list(robot.cameras)}, so images are [n, "
                f"{len(robot.cameras)}, h, w, 3], got {list(images.shape)}."
            )
        texts = [] if isinstance(prompts, str) or prompts is None else list(prompts)
        if states.ndim != 2 or not len(images) == len(states) == len(texts):
            raise ValueError(
                f"Images {list(images.shape)} came with states {list(states.shape)} and the "
                f"prompts {kind_of(prompts)}; each of the n needs a state and a prompt, in a list."
            )
        observations = [
            RobotObservation(dict(zip(robot.cameras, shown, strict=True)), prompt, state)
            for shown, state, prompt in zip(images, states, texts, strict=True)
        ]
        return self.sample_actions(self.prepare(observations, keys))

    def infer(
        self,
        observation: Mapping[str, Any],
        noise: Float[ArrayLike, "*_b h _a"] | None = None,
        keys: Integer[ArrayLike, "b 2"] | Sequence[tuple[int, int]] | None = None,
        *,
        previous: Sequence[Float[np.ndarray, "_h a"] | None] | None = None,
        committed: int | Sequence[int] = 0,
        session: RobotSession | None = None,
        executed: int | None = None,
    ) -> dict[str, Any]:
        """{"actions": chunks in the robot's units}: [h, a] for an observation without a batch axis,
        or else [b, h, a]. A policy that predicts subtasks adds "subtask", the text of the subtask
        that each row's chunk carries out.

        The observation comes under the keys that a server of this policy advertises, those of its
        robot's clients, of its dataset, or of openpi's `Observation` ("image", which may leave out
        cameras); see `Inputs.read`. A policy without a processor takes the model's own inputs (for
        GR00T's, see `groot_batch`) and answers with [b, h, a] in the model's units.

        Args:
          noise: where integration starts, in the model's dims; drawn from `keys` if None.
          keys: as in `act`; (0, i) for row i if None.
          previous: for each row, what is left of its last chunk (in the answer's units, next action
            first), or None; the answer continues it (real-time chunking).
          committed: how many of these actions will be executed in any case, one number for all rows
            or one for each row. The answer begins with exactly these actions; its other steps
            continue them as `continues` says.
          session: the robot's, which then remembers the answer; it stands for `keys` and
            `previous`.
          executed: with a session, how many steps of its last chunk were executed before this
            observation; None at an episode's start.

        Raises:
          ValueError: the observation is not one that this policy reads, `previous` or `executed`
            does not fit, or more is committed than the model was trained to continue.
        """
        start = None if noise is None else np.asarray(noise, np.float32)
        if (own_batch := self._own_batch) is not None:
            if session is not None:
                self._prepared()
            batch = own_batch(observation, self.model.config)
            count, _, horizon, dims = batch.actions.shape
            check_noise(start, count)
            lefts = self._left(previous, committed, (count, horizon, dims))
            nothing = np.zeros((horizon, dims), np.float32)
            left: Any = np.stack([nothing if x is None else x.actions for x in lefts])
            batch = replace(batch, actions=left[:, None])
            given = (batch, key_words(keys, count), start, continuation_weights(lefts))
            chunks = [
                self._sampled(*jax.tree.map(lambda x, at=at: np.asarray(x)[at], given))[:rows]
                for at, rows in split_rows(count, self.sizes)
            ]
            return {"actions": with_committed(np.concatenate(chunks), lefts)}
        observations, axes = self._read(observation)
        requests = self.prepare(
            observations,
            keys,
            previous=previous,
            committed=committed,
            session=session,
            executed=executed,
        )
        alone = not axes
        if alone and start is not None and start.ndim == 2:
            start = start[None]
        requests = self.with_subtasks(requests)
        answered = self.sample_actions(requests, start)
        if session is not None:
            answered = session.answered(answered[0])[None]
        found: dict[str, Any] = {"actions": answered[0] if alone else answered}
        if self.predicts_subtasks:
            subtasks = [self.subtask(request) for request in requests]
            found["subtask"] = subtasks[0] if alone else subtasks
        return found

    def prepare(
        self,
        observation: Mapping[str, Any] | Sequence[RobotObservation],
        keys: Integer[ArrayLike, "b 2"] | Sequence[tuple[int, int]] | None = None,
        *,
        previous: Sequence[Float[np.ndarray, "_h a"] | None] | None = None,
        committed: int | Sequence[int] = 0,
        session: RobotSession | None = None,
        executed: int | None = None,
    ) -> list[Request]:
        """Prepares one request for each row, so that rows of several callers can be answered in one
        batch (`sample_actions`). Takes what `infer` takes, or observations that are read already.
        `keys` given beside a session replace the session's own. Without a session, an observation
        with no past begins an episode.

        Raises:
          ValueError: as `infer`.
        """
        listed: Any = observation if isinstance(observation, Sequence) else [observation]
        read = all(isinstance(one, RobotObservation) for one in listed)
        observations: Sequence[RobotObservation] = listed if read else self._read(observation).rows
        if session is not None:
            if len(observations) != 1 or previous is not None or not isinstance(committed, int):
                raise ValueError(
                    f"A session is one robot's and knows its last chunk, but {len(observations)} "
                    "observations, several 'committed' or 'previous' came with it; give one "
                    "observation alone."
                )
            previous = [session.left(executed, committed)]
            observations = [session.observe(observations[0], session.after(executed))]
            keys = [session.key] if keys is None else keys
        elif self.model.config.observed.ago:
            observations = [x if x.past else self.session().observe(x, 0) for x in observations]
        samples, processor, robot = self._samples(observations), self._prepared(), self._robot
        if robot.measured and any(one.state is None for one in observations):
            processor.actions(np.zeros((1, len(robot.actions.offset))), self.embodiment)
        nothing = np.zeros(len(robot.state.offset))
        states = [nothing if one.state is None else one.state for one in observations]
        shape = (len(samples), processor.horizon, len(robot.actions.offset))
        lefts = self._left(previous, committed, shape)
        samples = [
            sample if left is None else self._continuing(sample, state, left)
            for sample, state, left in zip(samples, states, lefts, strict=True)
        ]
        words = key_words(keys, len(samples))
        return [Request(*row) for row in zip(samples, states, words, lefts, strict=True)]

    def sample_actions(
        self, requests: Sequence[Request], noise: Float[np.ndarray, "b h _a"] | None = None
    ) -> Float[np.ndarray, "b t a"]:
        """Chunks in the robot's units, one for each request; see `infer` for the noise. A policy
        that predicts subtasks does so first for requests that have none."""
        check_noise(noise, len(requests))
        requests = self.with_subtasks(requests)
        keys, states = (np.stack([getattr(r, name) for r in requests]) for name in ("key", "state"))
        rows: list[Any] = [None] * len(requests)
        for at, count, batch in self.batches(requests):
            start = None if noise is None else noise[at]
            weights = continuation_weights([requests[i].left for i in at])
            sampled = self._sampled(batch, keys[at], start, weights)
            for i, chunk in zip(at[:count], sampled[:count], strict=True):
                rows[i] = chunk
        chunks = np.stack(rows)
        return with_committed(self.robot_actions(chunks, states), [r.left for r in requests])

    def session(self, number: int = 0, *, continues: bool = False) -> RobotSession:
        """The state to keep for one robot between calls, for `infer` and `prepare`.

        Args:
          number: distinguishes the robot's noise from other robots'.
          continues: whether its chunks continue each other (real-time chunking).

        Raises:
          ValueError: chunks should be continued, but the model takes the mean of those that
            overlap.
        """
        config = self.model.config
        ago = config.observed.columns(self._robot.cameras) if config.observed.ago else {}
        return RobotSession(
            number,
            observed={name: tuple(-step for step in steps) for name, steps in ago.items()},
            padding=config.observed.padding,
            ensemble=getattr(config, "temporal_ensemble_coeff", None),
            continues=continues,
        )

    @property
    def reads_state(self) -> bool:
        """True if the model or its action units need the state."""
        return self._prepared().state_input != "none" or self._robot.measured

    @property
    def inputs(self) -> Inputs:
        """Names under which observations come."""
        return inputs_of(self._robot, self.reads_state, self.model.config.vocabulary)

    @property
    def predicts_subtasks(self) -> bool:
        """True if the policy predicts, in words, what to do next before it acts."""
        return self.processor is not None and self.processor.subtask_limit > 0

    def with_subtasks(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, with a predicted subtask for each that has none; unchanged if the policy
        predicts none."""
        done = list(requests)
        if not self.predicts_subtasks:
            return done
        processor = self._prepared()
        silent = [i for i, request in enumerate(done) if not len(request.sample.subtask)]
        for at, count, batch in self.batches([done[i] for i in silent]):
            tokens = np.asarray(self._predict_subtasks(self.params, batch))[:, 0]
            for row, i in enumerate(at[:count].tolist()):
                request = done[silent[i]]
                said = processor.subtask_said(tokens[row])
                done[silent[i]] = replace(request, sample=replace(request.sample, subtask=said))
        return done

    def subtask(self, request: Request) -> str:
        """The subtask of a request, in words; empty if it has none."""
        return self._prepared().subtask_text(request.sample.subtask[1:])

    def robot_actions(
        self, chunks: Float[np.ndarray, "b h _a"], states: Float[np.ndarray, "b _s"]
    ) -> Float[np.ndarray, "b _steps a"]:
        """The model's chunks in the robot's units and dims; `states` are in the robot's units
        too."""
        return self._prepared().actions(chunks, self.embodiment, states)

    def batches(
        self, requests: Sequence[Request]
    ) -> Iterator[tuple[Int[np.ndarray, " r"], int, PackedBatch]]:
        """The requests as batches of the policy's sizes, one request a row. Each batch holds
        requests that need the same program: as many pictures, the same bucket of text, a chunk to
        continue or none.

        Yields the index of each row's request, how many of the rows count (the last is repeated to
        fill the batch), and the batch.
        """
        alike = defaultdict(list)
        for i, request in enumerate(requests):
            sample = request.sample
            shapes = tuple(image.shape for image in sample.images)
            kind = shapes, self._text(len(sample.text)), request.depends
            alike[kind].append(i)
        for group in alike.values():
            for at, count in split_rows(len(group), self.sizes):
                rows = np.array(group)[at]
                yield rows, count, self.rows([requests[i].sample for i in rows])

    def warm(
        self,
        sizes: Sequence[int] | None = None,
        text: int | None = None,
        guided: bool = False,
        cameras: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        compute: Callable[[list[Request]], Any] | None = None,
    ) -> None:
        """Compiles the programs that observations need ahead of time, by running each once.

        Args:
          sizes: some of the policy's, all if None.
          text: longest prompt to expect, in tokens (with the state, where it is text); the
            processor's limit if None.
          guided: also compile what continued chunks need.
          cameras: how many cameras each observation shows, all of the embodiment's if None.
          progress: called with (programs done, programs) after each.
          compute: function that answers the requests, `sample_actions` if None.

        Raises:
          ValueError: a size is not one of the policy's.
        """
        processor = self._prepared()
        strange = sorted(set(sizes or ()) - set(self.sizes))
        if strange:
            raise ValueError(
                f"The policy has no sizes {strange} to compile for; it has {self.sizes}."
            )
        robot = self._robot
        shown = (len(robot.cameras) if cameras is None else cameras) if processor.fits else 0
        images = [processor.blank(i) if i < shown else None for i in range(len(robot.cameras))]
        state = np.zeros(len(robot.state.offset), np.float32)
        longest = text or processor.text_limit
        lengths = {self._text(n) for n in range(min(longest, 1), longest + 1)}
        free = np.zeros((processor.horizon, len(robot.actions.offset)), np.float32)
        programs = [
            (length, rows, previous)
            for length in sorted(lengths)
            for rows in sizes or self.sizes
            for previous in ([None, free] if guided and self.continues != "none" else [None])
        ]
        for done, (length, rows, previous) in enumerate(programs, 1):
            words = np.zeros(min(length, processor.text_limit), np.int32)
            sample = processor.sample(images, state, words, embodiment=self.embodiment)
            (left,) = self._left([previous], 1, (1, *free.shape))
            (compute or self.sample_actions)(
                [Request(sample, state, np.zeros(2, np.uint32), left)] * rows
            )
            if progress is not None:
                progress(done, len(programs))

    def loss(
        self,
        observation: Mapping[str, Any],
        actions: Float[ArrayLike, "*b h a"],
        *,
        action_mask: Bool[ArrayLike, "b h a"] | None = None,
        noise: Float[ArrayLike, "b h _a"] | None = None,
        time: Float[ArrayLike, " b"] | Float[ArrayLike, "b h"] | None = None,
        seed: int = 0,
    ) -> Float[np.ndarray, "*b_h"]:
        """Squared velocity error as the peers give it: openpi's [b, h], averaged over all of the
        model's action dims, or, without a processor, GR00T's scalar, averaged over the entries of
        `action_mask`.

        Args:
          actions: chunks in the robot's units; [h, a] counts as a batch of one.
          noise, time: of the flow (1 is noise, 0 is data), the noise in the model's dims; drawn
            from (`seed`, i) if None. A model with `rtc_max_delay` takes one time for each step, 0
            where its action is given.

        Raises:
          ValueError: as `infer`, or the model has no velocity field.
        """
        chunks = np.asarray(actions, np.float32)
        chunks = chunks[None] if chunks.ndim == 2 else chunks
        own_batch = self._own_batch
        if own_batch is not None:
            batch = own_batch(observation, self.model.config, chunks, action_mask)
        elif action_mask is not None:
            raise ValueError(
                "action_mask is only for a model's own inputs, without a processor; with one, "
                "the loss averages over every action dim, as openpi's does."
            )
        else:
            observations = self._read(observation, {"actions": len(chunks)}).rows
            batch = self.rows(self._samples(observations, chunks))
        drawn = flow.draw(jax.random.key(seed), batch.sample_id, 1, batch.actions.shape[2:])
        at = drawn[0] if time is None else np.asarray(time, np.float32)[:, None, None]
        if at.ndim == 4:
            require(self.model.config, "rtc_max_delay", "one flow time for each step")
        chunk = drawn[1] if noise is None else np.asarray(noise, np.float32)[:, None, None]
        error = np.asarray(self._error(self.params, batch, chunk, at))
        if own_batch is not None:
            counted = np.asarray(batch.action_mask)[:, 0]
            total = (error * counted).sum(dtype=np.float64)
            return np.asarray(total / counted.sum(), np.float32)
        return error.mean(-1)

    @property
    def _own_batch(self) -> Callable[..., PackedBatch] | None:
        """Function that lays out the model's own inputs; None if a processor prepares them."""
        if self.processor is not None:
            return None
        return function_at(require(self.model.config, "own_inputs", "acting without a processor"))

    def _left(
        self,
        previous: Sequence[Float[np.ndarray, "_h _a"] | None] | None,
        committed: int | Sequence[int],
        shape: tuple[int, int, int],
    ) -> list[Left | None]:
        lefts = left_over(previous, committed, shape, self.continues)
        if self.continues == "trained":
            trained = self.model.config.rtc_max_delay
            longest = max((len(left.committed) for left in lefts if left is not None), default=0)
            if longest > trained:
                raise ValueError(
                    f"committed is {longest}, but the model was trained to continue at most "
                    f"{trained} steps (model.rtc_max_delay); commit fewer, or use a policy whose "
                    "chunking is 'guided'."
                )
        return lefts

    def _prepared(self) -> Processor:
        if self.processor is None:
            raise ValueError(
                "This policy came without a processor (scales, tokenizer); give infer and loss "
                "the model's own inputs, if its family has any."
            )
        return self.processor

    @property
    def _robot(self) -> Embodiment:
        return self._prepared().embodiments[self.embodiment]

    def _read(self, observation: Any, rows: Mapping[str, int] | None = None) -> Observations:
        inputs = self.inputs
        if not isinstance(observation, Mapping):
            raise ValueError(
                f"The observation is {kind_of(observation)}; expected a map of "
                f"{sorted(inputs.expected)}."
            )
        if isinstance(observation.get("image"), Mapping):
            inputs = replace(inputs, optional=frozenset(inputs.cameras))
        return inputs.read(observation, rows)

    def _samples(
        self,
        observations: Sequence[RobotObservation],
        actions: Float[np.ndarray, "b h _a"] | None = None,
    ) -> list[Sample]:
        processor = self._prepared()
        if actions is not None:
            processor = replace(processor, horizon=actions.shape[1])
        return samples_of(observations, processor, embodiment=self.embodiment, actions=actions)

    def _continuing(self, sample: Sample, state: Float[np.ndarray, " _s"], left: Left) -> Sample:
        _, (chunk,), (mask,) = self._prepared().numbers(
            state[None], left.actions[None], left.weight[None] > 0, embodiment=self.embodiment
        )
        return replace(sample, actions=chunk, action_mask=mask)

    def rows(self, samples: list[Sample]) -> PackedBatch:
        """A batch with one sample a row, its text rounded up to a bucket."""
        config, empty = self.model.config, self._empty_layout
        if (resized := getattr(config, "for_pictures", None)) is not None:
            shapes = (image.shape[:2] for sample in samples for image in sample.images)
            config = resized(tuple(dict.fromkeys(shapes)))
            empty = config.layout(prefix=0, samples=1, images=0)
        images = most_images(samples, empty)
        text = self._text(max(len(sample.text) for sample in samples))
        prefix = empty.prefix_length(images, text) - empty.state_tokens + 1
        room = self.processor.subtask_limit if self.processor is not None else 0
        targets = max(room, *(len(sample.subtask) for sample in samples))
        layout = config.layout(prefix=prefix, samples=1, images=images, text=text, targets=targets)
        layout = replace(layout, horizon=len(samples[0].actions))
        return pack([[sample] for sample in samples], layout)

    @cached_property
    def _empty_layout(self) -> Layout:
        return self.model.config.layout(prefix=0, samples=1, images=0)

    def _text(self, length: int) -> int:
        """The bucket of a text: a power of two, or the longest text there is."""
        bucket = self.shortest
        while bucket < length:
            bucket *= 2
        return max(length, min(bucket, self._prepared().text_limit))

    def _sampled(self, *given: Any) -> Float[np.ndarray, "b h a"]:
        return np.asarray(self._sample(self.params, *given))[:, 0]

    def varied(
        self,
        params: Any = None,
        sizes: tuple[int, ...] | None = None,
        shortest: int | None = None,
    ) -> "Policy":
        """The same policy with other parameters of equal shapes, other sizes, or another shortest
        text; it keeps the compiled programs."""
        other = replace(
            self,
            params=self.params if params is None else params,
            sizes=self.sizes if sizes is None else sizes,
            shortest=self.shortest if shortest is None else shortest,
        )
        compiled = ("_sample", "_error", "_predict_subtasks")
        vars(other).update({name: getattr(self, name) for name in compiled})
        return other

    def sampling_by(self, wrap: Callable[[Any], Any]) -> "Policy":
        """The same policy with its sampler replaced by what `wrap` makes of it. The sampler is a
        jitted function of (parameters, batch, keys, noise, weights of a chunk to continue)."""
        other = replace(self)
        vars(other)["_sample"] = wrap(self._sample)
        return other

    @property
    def _size(self) -> str:
        leaves = jax.tree.leaves(self.params)
        dtypes = sorted({str(leaf.dtype) for leaf in leaves})
        kind = f" in {', '.join(dtypes)}" * bool(dtypes)
        return f"{sum(leaf.size for leaf in leaves):,} parameters{kind}"

    @cached_property
    def _sample(self) -> Any:
        model = bind_processor(self.model, self.processor)

        @jax.jit
        def sample(
            params: Any, batch: PackedBatch, keys: Any, noise: Any, weights: Any
        ) -> jax.Array:
            if noise is None:
                noise = flow.noise(keys, batch.actions.shape[2:])
            guidance: Guidance | Given | None = None
            if weights is not None and self.continues == "trained":
                guidance = Given(batch.actions, weights[:, None] > 0)
            elif weights is not None:
                weights = weights[:, None, :, None] * batch.action_mask
                guidance = Guidance(batch.actions, weights, self.guidance)
            chunks = model.sample_actions(params, batch, noise[:, None], guidance=guidance)
            steps = model.config.answered
            return chunks[:, :, steps.start : steps.stop]

        return sample

    @cached_property
    def _predict_subtasks(self) -> Any:
        @jax.jit
        def predict(params: Any, batch: PackedBatch) -> jax.Array:
            processor = self._prepared()
            return require(self.model, "predict_text", "predicting subtasks")(
                params,
                batch,
                length=processor.subtask_limit - 2,
                begin=processor.tokenizer.begin,
                end=processor.tokenizer.end,
                below=processor.tokenizer.size,
            )

        return predict

    @cached_property
    def _error(self) -> Any:
        @jax.jit
        def error(params: Any, batch: PackedBatch, noise: Any, time: Any) -> jax.Array:
            field = require(self.model, "field", "its loss at given noise")
            noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
            velocity = field(params, batch)(noised, time).velocity
            return ((velocity - target) ** 2)[:, 0, 0]

        return error
