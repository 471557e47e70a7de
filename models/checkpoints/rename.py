"""Rename tables: one declarative rule per parameter says where it lies in another code's
checkpoint and how its axes are laid out there, and serves reading and writing alike.

Axis patterns go from theirs to ours, written as in einops, "l [0] g w d -> l w g d": a name is an
axis, `(n d)` axes merged into one, `1` an axis of length one, and `[i]` component i of an axis that
other rules' parameters share. A size that no shape determines is given, `c=3`; axes that differ
only by a prime, `p p'`, are equally long. A layer index in their name, "layers.{l}.weight" or
"layers.{2*l+1}.weight", stacks their tensors along our axis `l`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

Shape = tuple[int, ...]
Sizes = dict[str, int]
Group = tuple[str, ...] | int  # the axes merged into one dimension, or the index of a component

_LAYER = re.compile(r"\{(?:(\d+)\*)?(\w+)(?:\+(\d+))?\}")
_TOKEN = re.compile(r"\(([^()]*)\)|\[(\d+)\]|(\S+)")


@dataclass(frozen=True)
class Rule:
    """Parameter `ours` ("a/b/c") is their array `theirs` under the pattern `axes`.

    `aliases`: other names under which they may store the same array, as templates with the same
    layer index; the first that exists is read, and the others are copies.
    """

    ours: str
    theirs: str
    axes: str
    aliases: tuple[str, ...] = ()

    @property
    def axis(self) -> str | None:
        """The axis that their layer index stacks, None if their array is whole."""
        found = _LAYER.search(self.theirs)
        return found[2] if found else None

    @property
    def pattern(self) -> "Pattern":
        return parse(self.axes, self.axis)

    def name(self, layer: int, template: str | None = None) -> str:
        """Their name for layer `layer` of it."""

        def index(found: re.Match[str]) -> str:
            return str(int(found[1] or 1) * layer + int(found[3] or 0))

        return _LAYER.sub(index, template or self.theirs)


@dataclass(frozen=True)
class Table:
    """The rules of one format, and regular expressions of names in it that no model needs."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()

    @cached_property
    def components(self) -> Counter[str]:
        """Number of our parameters that lie in each array of theirs, by its template."""
        return Counter(rule.theirs for rule in self.rules)

    @cached_property
    def by_path(self) -> dict[str, Rule]:
        return {rule.ours: rule for rule in self.rules}

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


class MappedParameter(NamedTuple):
    """A parameter of ours with the arrays of theirs that hold it: one, or one per layer."""

    rule: Rule
    shape: Shape
    names: tuple[str, ...]
    sizes: Sizes


@dataclass(frozen=True)
class Pattern:
    """A parsed axis pattern. `layer`: the axis of ours that is an index in their names."""

    theirs: tuple[Group, ...]
    ours: tuple[Group, ...]
    given: Mapping[str, int]
    layer: str | None

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Axes of one array of theirs, in its order."""
        return tuple(axis for group in self.theirs if isinstance(group, tuple) for axis in group)

    def solve(
        self, theirs: Shape | None, ours: Shape | None, known: Mapping[str, int] | None = None
    ) -> Sizes | None:
        """The axis sizes that the shapes and `known` sizes determine; None if they contradict each
        other."""
        equations: list[tuple[tuple[str, ...], int]] = []
        for groups, shape in ((self.theirs, theirs), (self.ours, ours)):
            if shape is None:
                continue
            if len(groups) != len(shape):
                return None
            equations += [
                (g, n) for g, n in zip(groups, shape, strict=True) if isinstance(g, tuple)
            ]
        sizes = dict(self.given) | dict(known or {})
        for _ in range(len(equations) + 1):
            for group, size in equations:
                if not _settle(group, size, sizes):
                    return None
        return sizes

    def their_shape(self, sizes: Sizes, components: int) -> tuple[int | None, ...]:
        """Shape of one array of theirs; None for sizes that are not determined."""
        return tuple(
            components if isinstance(group, int) else _product(group, sizes)
            for group in self.theirs
        )

    def our_shape(self, sizes: Sizes) -> tuple[int | None, ...]:
        return tuple(_product(group, sizes) for group in self.ours if isinstance(group, tuple))


@cache
def parse(axes: str, layer: str | None = None) -> Pattern:
    """Parses "theirs -> ours".

    Raises:
      ValueError: the pattern is malformed, or an axis is on one side only.
    """
    left, arrow, right = axes.partition("->")
    given: Sizes = {}
    theirs, ours = _groups(left, given), _groups(right, given)
    before = [a for g in theirs if isinstance(g, tuple) for a in g] + ([layer] if layer else [])
    after = [a for g in ours if isinstance(g, tuple) for a in g]
    whole = layer is None or (layer,) in ours
    if (
        not arrow
        or len(set(before)) != len(before)
        or sorted(before) != sorted(after)
        or not whole
        or any(isinstance(group, int) for group in ours)
        or sum(isinstance(group, int) for group in theirs) > 1
    ):
        raise ValueError(
            f"Axis pattern '{axes}' (layer index {layer!r}) must have every axis once on each "
            "side, the layer index only on the right and unmerged, and at most one component "
            "[i], on the left."
        )
    return Pattern(theirs, ours, given, layer)


def match(
    table: Table, theirs: Mapping[str, Shape], ours: Mapping[str, Shape], where: str
) -> dict[str, MappedParameter]:
    """Finds every parameter of ours in `theirs`, both given as shapes by name.

    Args:
      where: what is being read, for the message.

    Raises:
      ValueError: one message that lists every parameter of ours that is missing there, every array
        of theirs that no parameter uses, and every one whose shape does not fit.
    """
    leaves: dict[str, MappedParameter] = {}
    missing, misshapen, taken = [], [], set[str]()
    for path, shape in ours.items():
        rule = table.by_path.get(path)
        if rule is None:
            missing.append(f"{path} {list(shape)} (this format has no name for it)")
            continue
        stored = [_stored(rule, layer, theirs) for layer in range(_layers(rule, shape))]
        taken.update(name for names in stored for name in names)
        absent = [layer for layer, names in enumerate(stored) if not names]
        if absent:
            every = len(absent) == len(stored) > 1
            names = [rule.theirs] if every else [rule.name(layer) for layer in absent]
            missing.append(f"{', '.join(names)} (our {path} {list(shape)})")
            continue
        leaf, wrong = _fit(rule, shape, tuple(names[0] for names in stored), theirs, table)
        leaves[path] = leaf
        misshapen += wrong
    unmatched = [name for name in theirs if name not in taken and not table.ignores(name)]
    _raise_all(where, missing, _grouped(unmatched, theirs), misshapen)
    return leaves


def our_shapes(
    table: Table,
    theirs: Mapping[str, Shape],
    known: Mapping[str, int] | None = None,
    needed: Iterable[str] = (),
    where: str = "",
) -> dict[str, Shape]:
    """Shapes of the parameters that `theirs` holds, as far as the rules determine them; sizes are
    inferred from them before there is a model to `match`.

    Args:
      known: sizes of axes that are merged in `theirs`.
      needed: parameters that must be among them, in `where`.

    Raises:
      ValueError: some are not; all of them are listed.
    """
    shapes = {}
    for rule in table.rules:
        layers = 0
        while _stored(rule, layers, theirs) and (rule.axis is not None or layers == 0):
            layers += 1
        if layers:
            given = dict(known or {}) | ({} if rule.axis is None else {rule.axis: layers})
            sizes = rule.pattern.solve(theirs[_stored(rule, 0, theirs)[0]], None, given)
            shape = (None,) if sizes is None else rule.pattern.our_shape(sizes)
            if None not in shape:
                shapes[rule.ours] = tuple(size for size in shape if size is not None)
    missing = [f"{path} ({table.by_path[path].theirs})" for path in needed if path not in shapes]
    if missing:
        raise ValueError(
            f"{where}; these arrays, which determine the model's sizes, are missing: "
            f"{', '.join(missing)}."
        )
    return shapes


def _groups(side: str, given: Sizes) -> tuple[Group, ...]:
    groups: list[Group] = []
    for merged, component, single in _TOKEN.findall(side):
        if component:
            groups.append(int(component))
            continue
        axes = [] if single == "1" else (merged or single).split()
        for i, axis in enumerate(axes):
            axes[i], equals, size = axis.partition("=")
            if equals:
                given[axes[i]] = int(size)
        groups.append(tuple(axes))
    return tuple(groups)


def _settle(group: tuple[str, ...], size: int, sizes: Sizes) -> bool:
    """Adds the size of a group's unknown axis, or of its unknown axes that are equally long."""
    unknown = [axis for axis in group if axis not in sizes]
    rest = math.prod(sizes[axis] for axis in group if axis in sizes)
    if not unknown or not rest:
        return rest == size
    if len({axis.rstrip("'") for axis in unknown}) == 1:
        root = round((size / rest) ** (1 / len(unknown)))
        if root ** len(unknown) * rest != size:
            return False
        sizes.update(dict.fromkeys(unknown, root))
    return True


def _product(group: tuple[str, ...], sizes: Sizes) -> int | None:
    known = [sizes[axis] for axis in group if axis in sizes]
    return math.prod(known) if len(known) == len(group) else None


def _layers(rule: Rule, shape: Shape) -> int:
    """Number of their arrays from which our array is stacked."""
    if rule.axis is None:
        return 1
    dimension = rule.pattern.ours.index((rule.axis,))
    return shape[dimension] if dimension < len(shape) else 1


def _stored(rule: Rule, layer: int, theirs: Mapping[str, Shape]) -> list[str]:
    """The names under which `theirs` holds one layer, the one to read first."""
    names = (rule.name(layer, template) for template in (rule.theirs, *rule.aliases))
    return [name for name in names if name in theirs]


def _fit(
    rule: Rule, ours: Shape, names: tuple[str, ...], theirs: Mapping[str, Shape], table: Table
) -> tuple[MappedParameter, list[str]]:
    """The leaf, and a complaint for each wrong shape that some of its arrays have."""
    pattern, components = rule.pattern, table.components[rule.theirs]
    wrong: dict[Shape, list[str]] = {}
    sizes: Sizes = {}
    for name in names:
        solved = pattern.solve(theirs[name], ours)
        if solved is None or pattern.their_shape(solved, components) != theirs[name]:
            wrong.setdefault(theirs[name], []).append(name)
        else:
            sizes = solved
    alone = pattern.solve(None, ours)
    need = f"axes '{rule.axes}'"
    if alone is not None:
        expected = pattern.their_shape(alone, components)
        need = f"[{', '.join('?' if n is None else str(n) for n in expected)}]"
    complaints = [
        f"{those[0]}{f' and {len(those) - 1} layers more' if len(those) > 1 else ''} is "
        f"{list(shape)} where our {rule.ours} {list(ours)} needs {need}"
        for shape, those in wrong.items()
    ]
    return MappedParameter(rule, ours, names, sizes), complaints


def _grouped(names: list[str], theirs: Mapping[str, Shape]) -> list[str]:
    """Names with their shapes; those that differ only by an index appear once."""
    alike: dict[tuple[str, Shape], list[str]] = {}
    for name in names:
        alike.setdefault((re.sub(r"\b\d+\b", "#", name), theirs[name]), []).append(name)
    return [
        f"{those[0]} {list(shape)}"
        + (f" (and {len(those) - 1} more like it)" if len(those) > 1 else "")
        for (_, shape), those in alike.items()
    ]


def _raise_all(where: str, missing: list[str], unmatched: list[str], misshapen: list[str]) -> None:
    kinds = {
        "missing": missing,
        "unknown to this model": unmatched,
        "of another shape": misshapen,
    }
    parts = [f"{kind}: {'; '.join(items)}" for kind, items in kinds.items() if items]
    if parts:
        raise ValueError(
            f"{where} does not hold the parameters of this model; {'. '.join(parts)}. "
            f"Use the config that the checkpoint was made with."
        )
