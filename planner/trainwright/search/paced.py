"""Plans whose slowest stage is as fast as memory allows: which devices are left out, and how large groups are, follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.cost.compute import LayerSeconds, layer_seconds
from trainwright.cost.estimate import memory_by_device
from trainwright.plan import Plan
from trainwright.search.packed import Array, Group, degrees_of, groups_of, held_by, plan_of
from trainwright.search.protocol import Problem

_HALVINGS = 24
_ROUNDS = 6
"""How often layers are dealt out anew, by what stages turned out to hold."""


def paced_plans(problem: Problem) -> Iterator[Plan]:
    """One pipeline of tensor groups, a row at a time, everything computed again: some that fit, if any is found that does.

    For a number of seconds each accelerator has the tensor degree at which a device holds most layers that its stage can
    compute in that time and has the memory for; groups that hold none are left out. The fewest seconds in which all layers
    are held count.
    """
    known: list[Plan] = []
    sizes = _sizes(problem)
    stages = min(len(problem.model.layers), len(problem.devices))
    while stages > 0:
        plan = _paced(problem, sizes, stages)
        if plan is not None and plan not in known:
            known.append(plan)
            yield plan
        stages //= 2


def _paced(problem: Problem, sizes: Sequence[_Size], stages: int) -> Plan | None:
    """From about so many stages on."""
    more: dict[Group, float] = {}
    for _ in range(_ROUNDS):
        paced = _Paced(problem, sizes, stages, more)
        dealt = paced.dealt()
        if dealt is None:
            return None
        plan = plan_of(problem, *dealt)
        held = dict(memory_by_device(plan, problem.setting))
        fits = True
        for group, known in zip(dealt[0], paced.known(*dealt), strict=True):
            fullest = max(held[device] for device in group)
            fits = fits and fullest <= problem.setting.memory_of_node[group[0].node]
            more[group] = fullest - known
        if fits:
            return plan
    return None


@dataclass(frozen=True)
class _Size:
    """Tensor groups of one accelerator and degree: [layer + 1] sums over the layers before it.

    Attributes:
        state, inputs: bytes of a device, the second for each micro-batch under way; seconds: of a row's passes.
        room: bytes of a device.
    """

    name: str
    degree: int
    state: Array
    inputs: Array
    seconds: Array
    room: float

    def held(self, kept: int) -> Array:
        """[layer + 1] bytes with so many micro-batches under way."""
        found: Array = self.state + kept * self.inputs
        return found

    def end(self, first: int, seconds: float, kept: int, more: float) -> int:
        """The layer behind the last of a stage that begins with the first one and keeps within seconds and memory."""
        held = self.held(kept)
        room = int(np.searchsorted(held, held[first] + self.room - more, side="right"))
        time = int(np.searchsorted(self.seconds, self.seconds[first] + seconds, side="right"))
        return max(min(room, time) - 1, first)


_Dealt = tuple[list[Group], list[int]]
"""Groups, and by group the layer behind its last."""


@dataclass(frozen=True)
class _Paced:
    """For about so many stages, with groups that need some bytes more than layers tell."""

    problem: Problem
    sizes: Sequence[_Size]
    stages: int
    more: Mapping[Group, float]

    def dealt(self) -> _Dealt | None:
        """That of the fewest seconds a stage; None where memory does not do for any."""
        low, high = 0.0, max((float(one.seconds[-1]) for one in self.sizes), default=0.0)
        best = self._within(high)
        for _ in range(_HALVINGS if best is not None else 0):
            middle = (low + high) / 2
            found = self._within(middle)
            low, high = (middle, high) if found is None else (low, middle)
            best = found or best
        return best

    def known(self, groups: Sequence[Group], ends: Sequence[int]) -> list[float]:
        """By group the bytes that its layers are taken for."""
        sizes = {(one.name, one.degree): one for one in self.sizes}
        found = []
        for number, (group, first, end) in enumerate(zip(groups, (0, *ends), ends, strict=False)):
            size = sizes[self.problem.cluster.node(group[0].node).accelerator, len(group)]
            held = size.held(self._kept(number))
            found.append(float(held[end] - held[first]))
        return found

    def _kept(self, number: int) -> int:
        """Micro-batches under way in a stage of that number."""
        return min(self.problem.global_batch_size, max(self.stages - number, 1))

    def _within(self, seconds: float) -> _Dealt | None:
        """Layers dealt out in order, to each group as many as it may have; None where some are left over."""
        chosen: dict[str, _Size] = {}
        for one in self.sizes:
            known = chosen.get(one.name)
            if self._share(one, seconds) > (self._share(known, seconds) if known else 0.0):
                chosen[one.name] = one
        groups, ends = list[Group](), [0]
        for group in groups_of(self.problem, {name: one.degree for name, one in chosen.items()}) if chosen else ():
            size = chosen[self.problem.cluster.node(group[0].node).accelerator]
            end = size.end(ends[-1], seconds, self._kept(len(groups)), self.more.get(group, 0.0))
            if end > ends[-1]:
                groups.append(group)
                ends.append(end)
        return (groups, ends[1:]) if ends[-1] == len(self.problem.model.layers) else None

    def _share(self, size: _Size, seconds: float) -> float:
        """Layers of the commonest kind for each device."""
        return (size.end(self._common, seconds, self.stages // 2, 0.0) - self._common) / size.degree

    @cached_property
    def _common(self) -> int:
        """The first layer of the commonest kind."""
        layers = self.problem.model.layers
        return layers.index(Counter(layers).most_common(1)[0][0])


def _sizes(problem: Problem) -> list[_Size]:
    """Those there are, smallest degrees first."""
    found = []
    for name, degrees in degrees_of(problem).items():
        for degree in degrees:
            groups = groups_of(problem, {name: degree})
            if groups:
                state, inputs = held_by(problem, degree)
                room = max(problem.setting.memory_of_node[group[0].node] for group in groups)
                sums = [_sums(one) for one in (state, inputs, _seconds(problem, groups[0]))]
                found.append(_Size(name, degree, sums[0], sums[1], sums[2], float(room)))
    return found


def _seconds(problem: Problem, group: Group) -> Array:
    """[layer] of a row, forward, again and backward."""
    model, setting = problem.model, problem.setting
    collective = setting.collectives.all_reduce((tuple(device.node for device in group),))
    accelerator = problem.cluster.node(group[0].node).accelerator
    of_kind = {}
    for kind in model.kinds:
        one = layer_seconds(
            kind,
            accelerators=(accelerator,),
            tensor=len(group),
            rows=1,
            recompute=True,
            collective=collective,
            setting=setting,
        )
        of_kind[kind.name] = _whole(one)
    return np.array([of_kind[name] for name in model.layers])


def _sums(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])


def _whole(seconds: LayerSeconds) -> float:
    return (
        seconds.forward_seconds
        + seconds.forward_sync_seconds
        + seconds.backward_seconds
        + seconds.backward_sync_seconds
    )
