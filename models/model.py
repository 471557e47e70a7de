"""The contract between a family of models and the code that trains, evaluates, serves, plans and
improves it.

A family is a config (a dataclass that derives from `ModelConfig`) and the `Model` that it builds.
Code outside a family's own files never checks which family it has; it asks for optional abilities
with `require`, whose error says in one sentence what is missing. A user's file adds a family by
defining its config (docs/own_model.md).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeVar

from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, PRNGKeyArray

from models.files import built_in
from models.flow import flow
from models.flow.realtime_chunking import Given, Guidance
from models.inputs.augment import AugmentConfig, augment
from models.inputs.embodiment import Embodiment
from models.inputs.history import NOW, History
from models.inputs.packed_batch import ImageSlots, Layout, PackedBatch, counts_of
from models.inputs.parts import file_of
from models.inputs.pictures import Antialiased, Size, shape_of, sizes_told
from models.inputs.processor import Processor
from models.inputs.prompts import StateInput, TemplatePrompt, template
from models.inputs.tokenizer import TextTokenizer
from models.layers.functional import Params
from models.layers.layers import Compute, Lora
from models.layers.quantized import Rounding, names, quantize
from models.sharding import WHOLE, Rules

Config = TypeVar("Config", bound="ModelConfig")

_FAMILIES: dict[str, "tuple[type[ModelConfig], str]"] = {}
"""Families defined so far, each with its file."""


@dataclass(frozen=True)
class Stack:
    """Layers that rows pass through, as the planner counts them: `width` of a token, `places` of a
    row, and `keys`, the entries of keys and values together that a token leaves in each layer (0 if
    no place reads another's). Pipeline stages share its layers or, if it is not `staged`, what
    passes through them."""

    depth: int
    width: int
    places: int
    keys: int
    staged: bool = True


class ModelConfig(ABC):
    """Architecture of a model, all that its parameters' shapes depend on: a frozen dataclass, made
    as `class MyConfig(ModelConfig, family="mine")`. The name stands as `family` in its JSON.

    It has fields (or properties) for the sizes of what the model reads and writes: `state_dim`,
    `action_dim` and `horizon`, steps of a chunk. The others have a default that suits a model
    without them:

    - `image_size`: of its pictures in pixels, the side of a square or height and width, and
      `tokens_per_image`, prefix places that one fills, at least 1. A model that reads pictures of
      several sizes gives `pictures` instead.
    - `observed`: past observations that it reads.

    - `vocabulary`: of token ids; 0, the model reads no language.
    - `euler_steps`: steps of its sampler, with any solver.
    - `state_input`: spelt in the prompt ("text"), a place of the prefix ("token"), read beside it
      from `PackedBatch.state` ("suffix"), or not at all ("none").
    - `embodiments`: how many it tells apart; None, any number.
    - `chunks`: noised chunks per sample in training. `targets`: places of a sample for tokens that
      the language model predicts.
    - `solver`: of a flow model, which gives it to `flow.sample`; Euler steps without.
    - `compute`: dtype and kernels. Families that have it as a field can be quantised, planned in
      other precisions and run on stages.
    - `answered`: steps of a chunk that its policy answers with, the present one first. Chunks of a
      family that answers from a later step on begin as many steps before the present.
    - `acting`: names of fields that `load_policy` may change, because they only say how it acts.
    - `renamed`: earlier names of fields, by which saved configs and options still give them.

    Optional methods, which `require` asks for:

    - `stacks(layout) -> tuple[Stack, ...]` (tools.plan): the layers that a row passes.
    - `recomputing(remat) -> config` (tools.plan, unless remat is "none"): with that much of the
      forward pass recomputed in backward.
    - `quantizable: str` (tools.quantize): a regex, found in the paths of the stacked kernels
      [layers, …] that may be kept in few bits.
    - `pipelined: tuple[int, ...]` (training on stages): depths of the stacks that stages share.
    - `rtc_max_delay: int` (chunking "trained"): most steps of a chunk that training gave; the field
      of such a model takes flow times of single steps.
    - `temporal_ensemble_coeff: float` (acting): by which chunks that overlap are averaged, see
      `RobotSession.answered`.
    - `own_inputs`, "module:function" or a function (acting without a Processor): of (observation,
      config, actions or None, action_mask or None) to a PackedBatch of one sample a row.
    - `dataset_cameras`, likewise (training): of (a function from the name of a dataset's file to
      its path or None, the columns' dims, the dataset's path) to its cameras by their names for the
      model, in the model's order, or None for its own.
    - `for_pictures(shapes) -> config` (acting): of a model that takes pictures of any size, that
      for pictures of these heights and widths.
    - `pretrained() -> (source, table) | None` (training from nothing): arrays of another file with
      which the parameters in the table begin; None if all are drawn, ValueError if it needs a file.
    - `for_robots(names) -> config` (tools.train --embodiment): with these robots in this order.
    - `with_rows_of(other, foreign) -> config` (training): with the rows for robots that the config
      of the run or checkpoint to start from has; `foreign` is its path if another code wrote it.
    """

    family: ClassVar[str]

    state_dim: int
    action_dim: int
    horizon: int

    image_size: Size = 0
    vocabulary: int = 0
    euler_steps: int = 0
    state_input: StateInput = "none"
    embodiments: int | None = None
    chunks: int = 1
    targets: int = 0
    solver: flow.Solver = "euler"
    compute: Compute = Compute(dtype="float32")
    acting: ClassVar[tuple[str, ...]] = ()
    renamed: ClassVar[Mapping[str, str]] = {"steps": "euler_steps"}

    def __init_subclass__(cls, *, family: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if family is not None:
            cls.family = family
            _register(cls)

    @abstractmethod
    def build(self) -> "Model":
        """The model; making it computes nothing."""

    @property
    def tokens_per_image(self) -> int:
        """Prefix places that one image fills."""
        return 0

    @property
    def observed(self) -> History:
        """Past observations that it reads; a `RobotSession` keeps them in acting."""
        return NOW

    @property
    def answered(self) -> range:
        """Steps of a chunk that are answered, the first of which is the present one."""
        return range(self.horizon)

    @property
    def pictures(self) -> tuple[ImageSlots, ...]:
        """Sizes of the pictures that the model reads, in the order of their first cameras, each
        with the prefix places that one fills. The first is that of `PackedBatch.images`, the others
        are those of `more_images`."""
        if not self.image_size:
            return ()
        return (ImageSlots(*shape_of(self.image_size), self.tokens_per_image),)

    @property
    def edge(self) -> int:
        """Longest side of the pictures, for simulators that render squares; 1 without pictures."""
        return max((side for group in self.pictures for side in group.shape), default=1)

    def layout(
        self, *, prefix: int, samples: int, images: int, text: int | None = None, targets: int = 0
    ) -> Layout:
        """Row sizes for this model; text fills at most the whole prefix unless said otherwise.

        Training with cross-entropies passes `targets=config.targets`. `images` counts those of each
        size, then past ones of each (`count_code`).
        """
        past = [replace(x, tokens=0, past=True) for x in self.pictures if self.observed.pictures]
        groups = [*(self.pictures or [ImageSlots(0, 0, 1)]), *past]
        counts = counts_of(images, len(groups)).tolist()
        first, *more = (replace(x, number=n) for x, n in zip(groups, counts, strict=True))
        return Layout(
            prefix=prefix,
            images=first.number,
            samples=samples,
            text=prefix if text is None else text,
            image_size=first.height if first.height == first.width else first.shape,
            tokens_per_image=first.tokens,
            state_tokens=int(self.state_input == "token"),
            state_dim=self.state_dim,
            horizon=self.horizon,
            action_dim=self.action_dim,
            targets=targets,
            more=tuple(more),
            image_history=self.observed.pictures if self.pictures else 0,
            state_history=len(self.observed.state),
        )

    def processor(
        self, robots: Sequence[Embodiment], tokenizer: TextTokenizer | None = None
    ) -> Processor:
        """The preparation of this family for robots whose policy is trained from nothing: π0's
        prompt, or π0.5's if the state is spelt in it, and antialiased pictures, unless a family has
        its own. A model of pictures of several sizes has its own."""
        reader = None
        if self.vocabulary:
            reader = TemplatePrompt(tokenizer, template=template(self.state_input))
        return Processor(
            self.state_dim,
            self.action_dim,
            self.horizon,
            self.state_input,
            tuple(robots),
            reader,
            Antialiased(self.image_size) if self.image_size else (),
            observed=self.observed,
        )

    def check_processor(self, processor: Processor) -> None:
        """Raises ValueError, naming the field, unless a processor prepares what this model reads. A
        family adds its own conditions to these, which are equal sizes."""
        sizes = tuple(group.shape for group in self.pictures)
        if processor.image_sizes != sizes:
            raise ValueError(
                f"processor.pictures have sizes {sizes_told(processor.image_sizes)}, but the model "
                f"reads {sizes_told(sizes)}; a policy's inputs must be prepared as they were in "
                "training."
            )
        for name in ("state_dim", "action_dim", "horizon", "state_input", "observed"):
            given, wanted = getattr(processor, name), getattr(self, name)
            if given != wanted:
                raise ValueError(
                    f"processor.{name} is {given!r} but model.{name} is {wanted!r}; a policy's "
                    "inputs must be prepared as they were in training."
                )

    @property
    def cross_entropies(self) -> Mapping[str, float]:
        """Weights of the losses of targets, by name; only those that are not 0."""
        return {}

    @property
    def adapted(self) -> bool:
        """True if some of its kernels have low-rank adapters."""
        return any(adapters(self))

    def computing(self: Config, **changes: Any) -> Config:
        """The same architecture with these fields of `compute` changed.

        Raises:
          ValueError: the family has no such field.
        """
        return self.changed(compute=replace(self.compute, **changes))

    def changed(self: Config, **values: Any) -> Config:
        """The same config with these fields changed.

        Raises:
          ValueError: the family has no such field.
        """
        known: set[str] = {f.name for f in fields(self)} if is_dataclass(self) else set()
        if strange := sorted(set(values) - known):
            raise ValueError(
                f"Models of family '{self.family}' have no {', '.join(strange)} to change: "
                f"{type(self).__name__} has no such field."
            )
        changed: Any = self
        return replace(changed, **values)


class Model(Protocol):
    """A trained or trainable policy as pure functions of (parameters, batch, key); parameters are a
    nested dict of arrays. Its config builds it. It is hashable, and equal to any other model of the
    same config.

    `PackedBatch` has R rows of K samples; actions are [R, K, horizon, action_dim], f32 and
    normalised; `action_mask` says which of them count.

    Optional members: `sharding_rules` (`rules_of`), `groups` (`groups_of`), `TERMS`, `STACKED`, and
    those of a `FlowModel`. Batch normalisation is in `models.layers.batch_norm`.
    """

    @property
    def config(self) -> Any:
        """The ModelConfig it was built from."""

    def init(self, key: PRNGKeyArray) -> Params:
        """Random parameters, f32."""

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The loss summed over valid action entries (weighted by `batch.weight`), and their
        weighted count. A sample's share depends on (key, its id), not on the samples that it is
        packed with."""

    def sample_actions(
        self,
        params: Params,
        batch: PackedBatch,
        noise: Float[Array, "r k h a"],
        guidance: Guidance | Given | None = None,
    ) -> Float[Array, "r k h a"]:
        """Normalised action chunks from unit noise. `guidance` pulls them towards given actions or,
        in families with `rtc_max_delay`, makes them begin with the given actions."""


class FlowModel(Model, Protocol):
    """A model whose chunks follow a velocity field, in the time convention of `models.flow.flow`.
    RL, `Policy.loss` and guidance need one. `field(params, batch, observe(params, batch))` equals
    `field(params, batch)`."""

    @property
    def observing(self) -> str:
        """A regex, found in the paths of the parameters that `observe` reads."""

    @property
    def feature_width(self) -> int:
        """Width of the features from which the velocity is read."""

    def observe(self, params: Params, batch: PackedBatch) -> Any:
        """Everything computed from an observation before the actions: a tree of arrays [R, ...]."""

    def field(self, params: Params, batch: PackedBatch, observed: Any = None) -> flow.Field:
        """The batch's velocity field; without `observed`, the observation is read once, here."""


def bind_processor(model: Any, processor: Any) -> Any:
    """The model to sample with. A model may define `reading(processor) -> model` if sampling needs
    more of a `Processor` than batches hold, such as its tokenizers."""
    reading = getattr(model, "reading", None)
    return model if reading is None or processor is None else reading(processor)


def rules_of(model: Any) -> Rules:
    """Rules that shard a model's parameters: its `sharding_rules`, of which every path must match
    exactly one, or every device holds all parameters."""
    return getattr(model, "sharding_rules", WHOLE)


def groups_of(model: Any) -> Mapping[str, str]:
    """Parts of a model's parameters that are trained or frozen together: its `groups`, each name
    with a regex that the beginning of a parameter's path matches, or one group, "all". A part may
    lie within another. `optimizer.rate_factors` accepts "@name" for a part; RL's presets train
    "action", the part that draws chunks and that `FlowModel.observe` does not read."""
    return getattr(model, "groups", {"all": "."})


TERMS = ("term_names", "losses")
"""Optional members of a Model whose loss has several terms: the terms' names, and `losses(params,
batch, key)`, which returns the loss's sum and (its count, each term's sum by name). Training logs
the terms one by one."""

STACKED = "stacked"
"""Name of an optional member of a Model: a regex, found in the paths of the parameters of its
stacks (`models.layers.stack`), which can be taken apart for acting."""

FLOW = ("field", "observe", "observing", "feature_width")
"""Members of a FlowModel beyond those of a Model."""


def require(owner: Any, name: str, purpose: str) -> Any:
    """The attribute or method `name` of a model or a config.

    Raises:
      ValueError: its family has none; `purpose` says what it is needed for.
    """
    if not hasattr(owner, name):
        config = owner if isinstance(owner, ModelConfig) else owner.config
        raise ValueError(
            f"Models of family '{config.family}' have no `{name}`, needed for {purpose}; add it to "
            f"{type(owner).__name__} as models/model.py describes it."
        )
    return getattr(owner, name)


def build_model(config: ModelConfig) -> "Model":
    """The config's model, once both are seen to keep the contract of this file.

    Raises:
      ValueError: the config is no frozen dataclass, or lacks a size; or its model has another
        config, or lacks a method.
    """
    kind, name = type(config), config.family
    made = getattr(kind, "__dataclass_params__", None)
    if made is None or not made.frozen:
        raise ValueError(
            f"{kind.__name__}, the config of family '{name}', is no frozen dataclass; write "
            "@dataclass(frozen=True) above it."
        )
    for size in ("state_dim", "action_dim", "horizon"):
        require(config, size, "every run")
    if any(size.tokens < 1 for size in config.pictures):
        raise ValueError(
            f"{kind.__name__}, the config of family '{name}', has pictures that fill no places; "
            "say in `tokens_per_image` how many one fills, at least 1."
        )
    model = config.build()
    if getattr(model, "config", None) != config:
        raise ValueError(
            f"{type(model).__name__}, which {kind.__name__}.build() returned, has no `config` "
            "equal to the one that built it; return a model with that config."
        )
    for method in ("init", "loss", "sample_actions"):
        require(model, method, "every run")
    return model


def init_params(model: "Model", key: PRNGKeyArray) -> Params:
    """Random parameters in the form in which the model is trained and served, see
    `quantize_params`."""
    return quantize_params(model.config, model.init(key))


def quantize_params(
    config: ModelConfig, params: Params, rounding: Rounding | None = None
) -> Params:
    """The parameters, with the kernels that `compute.quantized` names quantised by
    `models.layers.quantized.quantize`.

    Raises:
      ValueError: `compute.quantized` names no kernel, or one outside the family's `quantizable`.
    """
    compute = config.compute
    if not compute.quantized:
        return params
    able = getattr(config, "quantizable", "")
    named = [path for path in flatten_dict(params, sep="/") if names(compute.quantized, path)]
    if beyond := [path for path in named if not re.search(able, path)]:
        raise ValueError(
            f"The pattern {compute.quantized!r} names {', '.join(beyond)}, which models of family "
            f"'{config.family}' cannot quantise; give one for kernels among {able!r}."
        )
    return quantize(params, compute.quantized, compute.quantized_kind, rounding)


@dataclass(frozen=True)
class QuantizedTrainable:
    """The initialisation and loss of a model whose parameters start from `init_params`."""

    model: "Model"

    def init(self, key: PRNGKeyArray) -> Params:
        """See `init_params`."""
        return init_params(self.model, key)

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """See `Model.loss`."""
        return self.model.loss(params, batch, key)


@dataclass(frozen=True)
class Augmented(QuantizedTrainable):
    """A model to train: `loss` sees augmented pictures. To evaluate and sample, use `model` itself.

    `cameras`: names of the cameras of every embodiment, in order.
    """

    config: AugmentConfig
    cameras: tuple[tuple[str, ...], ...]

    def loss(
        self, params: Params, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return super().loss(params, self._varied(batch, key), key)

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the model's loss terms, if it has several."""
        return getattr(self.model, "term_names", ())

    def losses(
        self, params: Any, batch: PackedBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]:
        """`loss` with its terms, for a model that has several."""
        return require(self.model, "losses", "the terms of its loss")(
            params, self._varied(batch, key), key
        )

    def _varied(self, batch: PackedBatch, key: PRNGKeyArray) -> PackedBatch:
        tokens = [group.tokens for group in self.model.config.pictures]
        return augment(batch, key, self.config, self.cameras, tokens)


def adapters(config: Any, at: str = "model") -> Iterator[tuple[str, Lora]]:
    """Yields the adapters in a config, each with its field."""
    for field in fields(config) if is_dataclass(config) else ():
        value, name = getattr(config, field.name), f"{at}.{field.name}"
        if isinstance(value, Lora):
            yield name, value
        else:
            yield from adapters(value, name)


def function_at(where: Any) -> Callable[..., Any]:
    """The function that "module:function" names, or the function given."""
    if callable(where):
        return where
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def family_config(name: str) -> type[ModelConfig]:
    """The config class of a family.

    Raises:
      ValueError: no family of that name is known.
    """
    if name not in _FAMILIES and name in built_in.CONFIGS:
        import_module(built_in.CONFIGS[name])
    if name not in _FAMILIES:
        known = sorted(built_in.CONFIGS.keys() | _FAMILIES.keys())
        raise ValueError(
            f"Family '{name}' is unknown; expected one of {known}, or give --family "
            "path/to/file.py, the file that defines it (it will be run)."
        )
    return _FAMILIES[name][0]


def is_ours(name: str) -> bool:
    """True if the family is built in, known to every process, rather than from a user's file."""
    return name in built_in.CONFIGS


def family_of(values: Mapping[str, Any]) -> str:
    """The family that a config's JSON names. Files from before families had names hold a config of
    π or, with a `dit`, of GR00T."""
    return str(values.get("family", "groot" if "dit" in values else "pi"))


def _register(kind: type[ModelConfig]) -> None:
    """Adds a family; a file that runs again replaces its own family."""
    name, file = kind.family, file_of(kind)
    _, before = _FAMILIES.get(name, (None, file))
    if name in built_in.CONFIGS and kind.__module__ != built_in.CONFIGS[name]:
        before = built_in.CONFIGS[name]
    if before != file:
        raise ValueError(
            f"{file} defines a family '{name}', but {before} already defines one of that name; "
            "give yours another name."
        )
    _FAMILIES[name] = (kind, file)
