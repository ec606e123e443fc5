"""Layers of a recorded forward: one for each repeated block, and one for what stands before, between and after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import torch

from trainwright_worker.layers.custom import TARGETS
from trainwright_worker.layers.custom_checks import INTEGERS
from trainwright_worker.module_cut.forward_calls import Call, Recording, Value, refuse
from trainwright_worker.module_cut.opened_modules import is_composite

_SMALL_SHARE: Final = 0.1
"""Share of a block's weights below which what stands before it is one layer with it."""

_RANDOM: Final = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "dropout", "normal",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """Way of a tensor to the next layer, where its first dimension must count the rows.

    Attributes:
        dimension: that counts the rows; None if none does.
        parts: rows of the tensor for each row of the batch.
        is_broadcast: whether its first dimension is 1 whatever the rows, so that each row can have a copy.
    """

    dimension: int | None = 0
    parts: int = 1
    is_broadcast: bool = False


@dataclass(eq=False, slots=True)
class CutLayer:
    """Calls of one layer.

    Attributes:
        block: call that gives it its name; None for what stands around blocks.
        takes, returns: tensors of the boundaries before and after it, in order.
    """

    calls: list[Call]
    block: Call | None = None
    takes: list[Value] = field(default_factory=list)
    returns: list[Value] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cut:
    """Layers of a whole module, and how each tensor passes between them."""

    layers: list[CutLayer]
    sent: dict[Value, Sent]


def cut(recording: Recording, other: Recording) -> Cut:
    """Cut a forward into layers, given the same one for another number of rows. Raises CutError that names the line."""
    used = _sunk(_used_calls(recording))
    others = dict(_twins(recording, other))
    layers = _split(used)
    sent: dict[Value, Sent] = {}
    constant = _constants(used)
    place = 1
    while place < len(layers):
        alive = _alive(recording, layers, place, constant)
        ways = {value: _way(value, others[value], recording.rows, other.rows) for value in alive}
        if (
            None in ways.values()
            or not any(value.dtype.is_floating_point for value in alive)
            or _uses_targets(layers, place, recording)
        ):
            layers[place - 1 : place + 1] = [_joined(*layers[place - 1 : place + 1])]
        else:
            sent |= {value: way for value, way in ways.items() if way is not None}
            place += 1
    _connect(recording, layers, constant)
    _repeat_constants(layers, constant)
    return Cut(layers, sent)


def _used_calls(recording: Recording) -> list[Call]:
    """Return the calls that the losses come from, or that change something."""
    needed: set[Value] = {recording.result}
    used: list[Call] = []
    for call in reversed(recording.calls):
        if call.changes is not None or _has_buffers(call) or any(value in needed for value in call.results):
            used.append(call)
            needed.update(call.values())
    return used[::-1]


def _sunk(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with those that follow from weights and numbers alone right before the first that needs them."""
    independent: set[Value] = set()
    waiting: dict[Value, Call] = {}
    ordered: list[Call] = []

    def add(call: Call) -> None:
        for value in call.values():
            if value in waiting:
                first = waiting[value]
                for result in first.results:
                    del waiting[result]
                add(first)
        ordered.append(call)

    for call in calls:
        if not _is_random(call) and all(value.is_attribute or value in independent for value in call.values()):
            independent.update(call.results)
            waiting.update(dict.fromkeys(call.results, call))
        else:
            add(call)
    return ordered


def _is_random(call: Call) -> bool:
    """Return whether a call may draw random numbers or change anything, so that its place and number matter."""
    drawn = call.target.rpartition(".")[2].strip("_") in _RANDOM
    return drawn or call.changes is not None or call.kind == "loss" or call.module is not None


def _has_buffers(call: Call) -> bool:
    return call.module is not None and any(True for _ in call.module.buffers())


def _twins(recording: Recording, other: Recording) -> Iterator[tuple[Value, Value]]:
    """Yield each tensor with its equal of the other recording."""
    yield from zip(recording.fields.values(), other.fields.values(), strict=True)
    for call, twin in zip(recording.calls, other.calls, strict=False):
        if (call.kind, call.target, len(call.results)) != (twin.kind, twin.target, len(twin.results)):
            refuse(
                call.line,
                f"the forward calls {call.target} for {recording.rows} rows but {twin.target} for {other.rows}, so its layers "
                "would depend on the rows; make it the same for all",
            )
        yield from zip(call.results, twin.results, strict=True)


def _split(calls: Sequence[Call]) -> list[CutLayer]:
    """Return a layer for each block, and for what stands between blocks and holds many weights."""
    blocks = _blocks(calls)
    usual = median(_size(call) for call in blocks) if blocks else 0
    layers: list[CutLayer] = []
    before: list[Call] = []
    for call in calls:
        if call not in blocks:
            before.append(call)
            continue
        if not layers or sum(_size(other) for other in before) > _SMALL_SHARE * usual:
            if before:
                layers.append(CutLayer(before))
            before = []
        layers.append(CutLayer([*before, call], call))
        before = []
    if before:
        layers.append(CutLayer(before))
    return layers


def _blocks(calls: Sequence[Call]) -> set[Call]:
    """Return the calls of modules whose class repeats; of all modules with weights if none does."""
    weighted = [call for call in calls if call.module is not None and call.parameters()]
    composite = [call for call in weighted if call.module is not None and is_composite(call.module)]
    times = Counter(type(call.module) for call in composite)
    return {call for call in composite if times[type(call.module)] > 1} or set(weighted)


def _size(call: Call) -> int:
    own = sum(weight.numel() for weight in call.parameters())
    return own + sum(torch.Size(value.shape).numel() for value in call.values() if value.is_weight)


def _constants(calls: Sequence[Call]) -> set[Value]:
    """Return the tensors that every layer can make anew: they come from weights, buffers and numbers alone."""
    constant: set[Value] = set()
    changed = {call.changes for call in calls if call.changes is not None}
    for call in calls:
        if not _is_random(call) and all(
            value in constant or (value.is_attribute and not value.is_weight) for value in call.values()
        ):
            constant.update(value for value in call.results if value not in changed)
    return constant


def _alive(recording: Recording, layers: Sequence[CutLayer], place: int, constant: set[Value]) -> list[Value]:
    """Return the tensors that layers from `place` on need of those before it, in the order in which they were made."""
    needed = {value for layer in layers[place:] for call in layer.calls for value in call.values()} | {recording.result}
    made = [
        *recording.fields.values(),
        *(value for layer in layers[:place] for call in layer.calls for value in call.results),
    ]
    return [value for value in made if value in needed and value not in constant and value.source != TARGETS]


def _uses_targets(layers: Sequence[CutLayer], place: int, recording: Recording) -> bool:
    """Return whether a layer before `place` needs the targets, which only the last one takes."""
    targets = recording.fields[TARGETS]
    return any(value is targets for layer in layers[:place] for call in layer.calls for value in call.values())


def _way(value: Value, other: Value, rows: int, other_rows: int) -> Sent | None:
    """Return how a tensor passes between layers; None if it cannot."""
    if not value.dtype.is_floating_point and value.dtype not in INTEGERS:
        return None
    if len(value.shape) != len(other.shape):
        return None
    differing = [place for place, (size, twin) in enumerate(zip(value.shape, other.shape, strict=True)) if size != twin]
    if not differing:
        return Sent(is_broadcast=True) if value.shape[:1] == (1,) else Sent(None)
    (place,) = differing if len(differing) == 1 else (-1,)
    if place < 0 or value.shape[place] % rows or value.shape[place] * other_rows != other.shape[place] * rows:
        return None
    parts = value.shape[place] // rows
    return Sent(place, parts) if place == 0 or parts == 1 else None


def _joined(first: CutLayer, second: CutLayer) -> CutLayer:
    return CutLayer([*first.calls, *second.calls], first.block or second.block)


def _connect(recording: Recording, layers: Sequence[CutLayer], constant: set[Value]) -> None:
    """Set the boundaries; a tensor that takes the place of another in a layer takes its place in the boundary, too."""
    layers[0].takes = [value for name, value in recording.fields.items() if name != TARGETS]
    for place in range(1, len(layers)):
        alive = _alive(recording, layers, place, constant)
        new = [value for value in alive if value not in layers[place - 1].takes]
        ordered: list[Value] = []
        if place > 1:
            for value in layers[place - 1].takes:
                if value in alive:
                    ordered.append(value)
                elif new:
                    ordered.append(new.pop(0))
        layers[place - 1].returns = [*ordered, *new] if place > 1 else alive
        layers[place].takes = layers[place - 1].returns
    for before, layer, after in zip(layers, layers[1:], layers[2:], strict=False):
        _hand_on_like(before, layer, after)
    layers[-1].returns = [recording.result]


def _hand_on_like(before: CutLayer, layer: CutLayer, after: CutLayer) -> None:
    """Let the last of some equal blocks hand on what the others do, so that all are of one kind."""
    if before.block is None or layer.block is None or type(before.block.module) is not type(layer.block.module):
        return
    shared = {*before.block.values()} & {*layer.block.values()} & {*before.takes} & {*layer.takes}
    dropped = [value for value in layer.takes if value in shared and value not in layer.returns]
    if dropped and len(before.returns) == len(layer.takes) == len(layer.returns) + len(dropped):
        returned = iter(layer.returns)
        layer.returns = [value if value in dropped else next(returned) for value in layer.takes]
        after.takes = layer.returns


def _repeat_constants(layers: Sequence[CutLayer], constant: set[Value]) -> None:
    """Let each layer make the constants that it needs and that another one makes."""
    for layer in layers:
        own = set(layer.calls)
        missing: list[Call] = []

        def need(value: Value, own: set[Call] = own, missing: list[Call] = missing) -> None:
            call = value.call
            if value in constant and call is not None and call not in own:
                own.add(call)
                for inner in call.values():
                    need(inner)
                missing.append(call)

        for call in list(layer.calls):
            for value in call.values():
                need(value)
        layer.calls[:0] = missing
    for layer in layers:
        needed, kept = set(layer.returns), []
        for call in reversed(layer.calls):  # leave out what a layer made for others alone
            if not constant.issuperset(call.results) or not needed.isdisjoint(call.results):
                kept.append(call)
                needed.update(call.values())
        layer.calls[:] = kept[::-1]
