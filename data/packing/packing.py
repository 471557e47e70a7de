"""Packing of samples into rows within several budgets at once, by counts of kinds of sample.

Samples that cost the same (images, text tokens) are one kind, so a window of thousands of draws is
a few dozen counts. Best fit finds ways to fill a row; a linear program says how often to use each
(cutting stock, after Gilmore and Gomory, 1961), and best fit packs the samples that its fractions
leave over. The best fit is found exactly: the sums that up to four samples can reach are bits of an
integer.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from models import Layout
from models.inputs.packed_batch import counts_of

_SOLVED = 4
_TRIED = 4
_MARGINS = (0.0, 0.01, 0.02, 0.04, 0.08)
_SMALLEST = 0.7
_ENOUGH = 0.002
_WAYS = ((1, False), (4, False), (1, True), (4, True))
_ROUNDING = 1e-6

Use = dict[int, int]
"""Samples of each kind in a row."""


class Packing(NamedTuple):
    """Rows 0..rows-1; entry n puts `copies[n]` samples of `kind[n]` into each of the
    `repeats[n]` rows from `first[n]` on."""

    rows: int
    kind: Int64[np.ndarray, " n"]
    copies: Int64[np.ndarray, " n"]
    first: Int64[np.ndarray, " n"]
    repeats: Int64[np.ndarray, " n"]


def pack_kinds(
    images: Int[np.ndarray, " k"],
    text: Int[np.ndarray, " k"],
    counts: Int[np.ndarray, " k"],
    layout: Layout,
) -> Packing:
    """Packs `counts` samples of each kind, with its `images` and `text` tokens, into rows of
    `layout`.

    Every kind must fit into an empty row.
    """
    costs = images.tolist(), text.tolist()
    tried = [_best_fit(_Kinds(*costs, counts.tolist(), layout), *way) for way in _WAYS]
    chosen, left = _combined(tried, counts)
    rest = [_best_fit(_Kinds(*costs, left.tolist(), layout), *way) for way in _WAYS]
    tried.append(chosen + min(rest, key=_rows))
    entries: list[tuple[int, int, int, int]] = []
    rows = 0
    for use, repeats in min(tried, key=_rows):
        entries += [(kind, copies, rows, repeats) for kind, copies in use.items()]
        rows += repeats
    kind, copies, first, repeated = np.array(entries, np.int64).reshape(-1, 4).T
    return Packing(rows, kind, copies, first, repeated)


def assign_rows(packing: Packing, kind: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """The row of each sample, given its kind; samples of a kind are used in the order given."""
    by_kind = np.argsort(packing.kind, kind="stable")
    copies, amount = packing.copies[by_kind], (packing.copies * packing.repeats)[by_kind]
    ends = np.cumsum(amount)
    within = np.arange(ends[-1]) - np.repeat(ends - amount, amount)
    places = np.repeat(packing.first[by_kind], amount) + within // np.repeat(copies, amount)
    rows = np.empty(len(kind), np.int64)
    rows[np.argsort(kind, kind="stable")] = places
    return rows


def fit_layout(
    images: Int[np.ndarray, " n"], text: Int[np.ndarray, " n"], layout: Layout
) -> Layout:
    """The budgets that such samples fill best, with a prefix between 0.7 and 1 times
    `layout.prefix`.

    A row that is all images leaves no place for text, and a row for the longest prompts is half
    empty for the others; the right size depends on the data. Image slots count like the prefix
    places they fill, because the vision tower works on them whether used or not. Samples without
    places fill the slots of `layout`.

    Args:
      images, text: images and text tokens of thousands of samples, each as often as it is drawn;
        see `count_code` for images of several groups.

    Raises:
      ValueError: the largest sample does not fit into `layout.prefix`.
    """
    largest = int(layout.prefix_length(images, text).max())
    if largest > layout.prefix:
        raise ValueError(
            f"layout.prefix is {layout.prefix}, but the largest sample takes {largest} places "
            f"(up to {int(layout.prefix_length(images, 0 * text).max())} without text); raise it."
        )
    if not largest:
        return layout
    (image_kinds, text_kinds), counts = np.unique(
        np.stack([images, text]), axis=1, return_counts=True
    )
    groups = layout.groups
    shown = counts_of(images, len(groups))
    totals, most, fewest = shown.sum(axis=0), shown.max(axis=0), shown.min(axis=0)
    tokens = layout.slot_tokens
    seen = np.array([groups[layout.group_of(group.shape)].tokens for group in groups])
    visual = int(totals @ seen)
    places = int(totals @ tokens) + int(text.sum()) + layout.state_tokens * len(images)

    def wasted(tried: Layout, rows: float) -> float:
        return 1 - (places + visual) / rows / (tried.prefix + int(tried.slots @ seen))

    def needed(tried: Layout) -> float:
        budgets = (
            (places, tried.prefix),
            *zip(totals, tried.slots, strict=True),
            (text.sum(), tried.text),
            (len(images), tried.samples),
        )
        return max(float(amount / budget) for amount, budget in budgets if budget)

    candidates, lead = [], int(np.where(tokens, totals, -1).argmax())
    if totals[lead]:
        amounts, total = (
            range(int(most[lead]), layout.prefix // int(tokens[lead]) + 1),
            totals[lead],
        )
    else:
        amounts, total = range(1, layout.samples + 1), np.int64(len(images))
    for amount in amounts:
        share = amount / total
        slots = np.maximum(most, np.ceil(totals * share - _ROUNDING).astype(np.int64))
        samples = min([layout.samples, *(slots[fewest > 0] // fewest[fewest > 0]).tolist()])
        for margin in _MARGINS:
            words = max(int(np.ceil(text.sum() * share * (1 + margin))), int(text.max()))
            fixed = int(slots @ tokens) + round(layout.state_tokens * len(images) * share)
            prefix = max(fixed + words, largest)
            tried = replace(layout, prefix=prefix, samples=samples, text=words)
            candidates.append(_with_slots(tried, slots))
    fitting = [c for c in candidates if c.prefix <= layout.prefix] or [
        _with_slots(replace(layout, text=int(text.max()), samples=1, prefix=largest), most)
    ]
    large = [c for c in fitting if c.prefix >= _SMALLEST * layout.prefix] or fitting
    best, least = large[0], 1.0
    for tried in sorted(large, key=lambda c: wasted(c, needed(c))):
        if wasted(tried, needed(tried)) > least - _ENOUGH:
            break
        waste = wasted(tried, pack_kinds(image_kinds, text_kinds, counts, tried).rows)
        if waste < least:
            best, least = tried, waste
    return best


def _with_slots(layout: Layout, slots: Int64[np.ndarray, " groups"]) -> Layout:
    first, *others = slots.tolist()
    more = (replace(x, number=n) for x, n in zip(layout.more, others, strict=True))
    return replace(layout, images=first, more=tuple(more))


def _rows(uses: list[tuple[Use, int]]) -> int:
    return sum(repeats for _, repeats in uses)


def _best_fit(kinds: "_Kinds", ease: int, shortest_first: bool) -> list[tuple[Use, int]]:
    """Ways to fill a row and how often each is used, so that all samples are placed. A way is used
    1/`ease` as often as the counts allow. This gives more ways, and no kind runs out long before
    the others."""
    uses = []
    while kinds.samples:
        use = kinds.fullest_row(shortest_first)
        most = min(kinds.left[kind] // copies for kind, copies in use.items())
        uses.append((use, max(1, most // ease)))
        kinds.take(*uses[-1])
    return uses


def _combined(
    tried: Sequence[list[tuple[Use, int]]], counts: Int[np.ndarray, " k"]
) -> tuple[list[tuple[Use, int]], Int[np.ndarray, " k"]]:
    """The fewest rows that the ways of several packings allow, without fractions of rows, and the
    samples that are left over."""
    from scipy.optimize import linprog  # a sixth of the start-up of commands that pack nothing
    from scipy.sparse import csc_array

    ways = list({tuple(sorted(use.items())): use for uses in tried for use, _ in uses}.values())
    way = np.repeat(np.arange(len(ways)), [len(use) for use in ways])
    kind, copies = np.array([item for use in ways for item in use.items()]).T
    matrix = csc_array((copies, (kind, way)), (len(counts), len(ways)))
    found = linprog(np.ones(len(ways)), A_eq=matrix, b_eq=counts, method="highs-ds")
    repeats = np.floor(found.x + _ROUNDING).astype(int)
    if (matrix @ repeats > counts).any():
        repeats = np.floor(found.x).astype(int)
    chosen = [(use, int(n)) for use, n in zip(ways, repeats, strict=True) if n]
    return chosen, counts - matrix @ repeats


class _Kinds:
    """Samples left to pack, and the sums that a few of them can reach."""

    def __init__(
        self, images: list[int], text: list[int], counts: list[int], layout: Layout
    ) -> None:
        self.images, self.text, self.left, self.layout = images, text, counts, layout
        self.size = [int(layout.prefix_length(i, t)) for i, t in zip(images, text, strict=True)]
        self.samples = sum(counts)
        self.places = sum(n * size for n, size in zip(counts, self.size, strict=True))
        self.classes = set(images)
        self.plenty = list(range(len(counts)))
        self.reachable: list[dict[int, int]] = []

    def take(self, use: Use, rows: int) -> None:
        for kind, copies in use.items():
            self.left[kind] -= copies * rows
            self.samples -= copies * rows
            self.places -= copies * rows * self.size[kind]

    def fullest_row(self, shortest_first: bool) -> Use:
        """A row as full as possible. It begins with the longest text, which is hardest to place,
        then takes the most numerous kinds in turn, so that the remaining samples stay mixed. The
        last four samples are chosen to fill it exactly, the most numerous or the shortest first."""
        plenty = self.plenty = [kind for kind in self.plenty if self.left[kind]]
        plenty.sort(key=self.left.__getitem__, reverse=True)
        expected: float = self.layout.samples
        if self.places:
            expected = min(expected, self.layout.prefix * self.samples / self.places)
        begun = _Row(self)
        begun.add(max(plenty, key=self.text.__getitem__))
        order = sorted(plenty, key=self.text.__getitem__) if shortest_first else plenty
        for kind in islice(cycle(plenty), max(0, round(expected) - _SOLVED)):
            if begun.room_for(kind):
                begun.add(kind)
        for fresh in (False, True):
            if fresh or not self.reachable:
                self.reachable = self._reach(plenty)
            for _, samples, images, text in self._targets(begun, expected):
                use = self._samples_that_sum(order, begun.use, samples, images, text)
                if use is not None:
                    return use
        for kind in sorted(plenty, key=self.size.__getitem__, reverse=True):
            while begun.room_for(kind):
                begun.add(kind)
        return begun.use

    def _reach(self, kinds: Sequence[int]) -> list[dict[int, int]]:
        """Text sums that are possible for each number of samples and of images, as bits."""
        classes: dict[int, set[int]] = {}
        for kind in kinds:
            classes.setdefault(self.images[kind], set()).add(self.text[kind])
        mask = (1 << (self.layout.text + 1)) - 1
        reachable = [{0: 1}]
        for _ in range(min(_SOLVED, self.layout.samples)):
            sums: dict[int, int] = {}
            for so_far, bits in reachable[-1].items():
                for images, texts in classes.items():
                    if self.layout.holds(so_far + images):
                        reached = sums.get(so_far + images, 0)
                        for text in texts:
                            reached |= bits << text
                        sums[so_far + images] = reached & mask
            reachable.append(sums)
        return reachable

    def _targets(
        self, begun: "_Row", expected: float
    ) -> list[tuple[tuple[int, float], int, int, int]]:
        """The fullest completions of a row, best first: (rank, samples, images, text)."""
        layout, targets = self.layout, []
        for samples in range(1, min(len(self.reachable) - 1, layout.samples - begun.samples) + 1):
            for images, bits in self.reachable[samples].items():
                if not layout.holds(begun.images + images):
                    continue
                fixed = int(layout.prefix_length(images, (samples - 1) * layout.state_tokens))
                room = min(layout.text - begun.text, layout.prefix - begun.prefix - fixed)
                text = (bits & ((1 << (room + 1)) - 1)).bit_length() - 1 if room >= 0 else -1
                if text >= 0:
                    evenness = -abs(begun.samples + samples - expected)
                    targets.append(((fixed + text, evenness), samples, images, text))
        return sorted(targets, reverse=True)[:_TRIED]

    def _samples_that_sum(
        self, order: Sequence[int], begun: Use, samples: int, images: int, text: int
    ) -> Use | None:
        """`begun` plus `samples` samples with these sums, with kinds that come first in `order`
        preferred; None if they are used up."""
        kind_images, kind_text, use = self.images, self.text, dict(begun)
        for remaining in range(samples - 1, -1, -1):
            sums, chosen = self.reachable[remaining], None
            bits = {n: sums.get(images - n, 0) for n in self.classes}
            for kind in order:
                rest = text - kind_text[kind]
                if rest >= 0 and bits[kind_images[kind]] >> rest & 1:
                    if kind not in use:
                        chosen = kind
                        break
                    if chosen is None and use[kind] < self.left[kind]:
                        chosen = kind
            if chosen is None:
                return None
            use[chosen] = use.get(chosen, 0) + 1
            images, text = images - kind_images[chosen], text - kind_text[chosen]
        return use


class _Row:
    """A row being filled."""

    def __init__(self, kinds: _Kinds) -> None:
        self.kinds = kinds
        self.use: Use = {}
        self.samples = self.images = self.text = self.prefix = 0

    def room_for(self, kind: int) -> bool:
        kinds, layout = self.kinds, self.kinds.layout
        return (
            self.use.get(kind, 0) < kinds.left[kind]
            and self.samples < layout.samples
            and bool(layout.holds(self.images + kinds.images[kind]))
            and self.text + kinds.text[kind] <= layout.text
            and self.prefix + kinds.size[kind] <= layout.prefix
        )

    def add(self, kind: int) -> None:
        self.use[kind] = self.use.get(kind, 0) + 1
        self.samples += 1
        self.images += self.kinds.images[kind]
        self.text += self.kinds.text[kind]
        self.prefix += self.kinds.size[kind]
