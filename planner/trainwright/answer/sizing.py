"""Number of accelerators that a model needs: the smallest number of each on which a plan fits, and ends in time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Final

from trainwright.accelerators import Machine, data_sheet, machines
from trainwright.accelerators.described_machines import DescribedNode, network_port, priced_nodes
from trainwright.accelerators.machines import PricedNode, cluster_of_nodes
from trainwright.answer.answer import Answer
from trainwright.answer.composition import find_candidates
from trainwright.answer.formats import stating_format
from trainwright.answer.lean_plans import ALL_SAVINGS, MAX_DEVICES, Savings, first_that, fits, lean_plan
from trainwright.answer.question import Question, problem_of
from trainwright.cluster import Cluster
from trainwright.cost.memory_terms import ValueBytes
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.runtime import Runtime
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Problem, SearchControl
from trainwright.search.candidates import candidate_of
from trainwright.training import Training
from trainwright.training_run import days

USUAL_DEVICES: Final = 8
"""Devices of a machine of an accelerator of which none is listed."""
_CARDS_NETWORK: Final = "100Gbit"
_BOARD_NETWORK: Final = "8x400Gbit/infiniband"
"""Network of such a machine with cards, and with devices that are joined otherwise than by PCIe."""
SIZING_SECONDS: Final = 45.0
"""Usual budget of all searches together."""
_PLANNER: Final = "auto"
_ONE_OF_MANY: Final = 4.0
_ONE_OF_FEW: Final = 1.25
_MIN_GAIN: Final = 0.99
"""Share of the iteration below which twice the devices still make it faster."""


class Decider(StrEnum):
    """Part of the memory that fewer devices lack, or the time in which they do not end the run."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Size:
    """Answer for one accelerator.

    Attributes:
        machine: type of the machines that are counted; empty where none is listed.
        machine_devices: devices of one of them.
        answer: best plan on that many; None if no number fits, or ends in time.
        decider: what the next smaller number lacks; None where one device is enough.
        fewer: the next smaller number.
        state_bytes: weights, gradients and optimizer state of the whole model.
        fewer_bytes: memory of the next smaller number, without what is left free.
        without_recompute, without_sharding: smallest number without that; None if there is none.
        refusal: sentence where there is no answer.
    """

    accelerator: str
    machine: str
    machine_devices: int
    answer: Answer | None = None
    decider: Decider | None = None
    fewer: int = 0
    state_bytes: int = 0
    fewer_bytes: int = 0
    without_recompute: int | None = None
    without_sharding: int | None = None
    refusal: str = ""

    def __repr__(self) -> str:
        return (
            f"<Size {self.refusal}>"
            if self.best is None
            else f"<Size {self.devices} × {self.accelerator}: {self.best!r}>"
        )

    @property
    def devices(self) -> int | None:
        """Smallest number; None if there is none."""
        return None if self.answer is None else len(self.answer.problem.cluster.devices)

    @property
    def best(self) -> Candidate | None:
        return None if self.answer is None else self.answer.best


@dataclass
class _Fleet:
    """Machines of one accelerator: parts of a single one, then several whole ones."""

    accelerator: str
    training: Training
    runtime: Runtime
    limits: Limits

    @cached_property
    def listed(self) -> tuple[Machine, ...]:
        """The listed machines, those with a price and most devices first, of equals the cheapest."""

        def order(machine: Machine) -> tuple[bool, int, float]:
            return machine.price_per_hour is None, -machine.devices, _price(machine)

        return tuple(sorted((each for each in machines() if each.accelerator == self.accelerator), key=order))

    @property
    def machine(self) -> Machine | None:
        """The machine of which several are counted."""
        return next(iter(self.listed), None)

    def host(self, devices: int) -> Machine | None:
        """Return the machine of these devices: below the largest one the cheapest that has them, since it is rented whole."""
        large = [each for each in self.listed if each.price_per_hour is not None and each.devices >= devices]
        return min(large, key=_price, default=self.machine)

    @property
    def usual_network(self) -> str:
        return _CARDS_NETWORK if data_sheet(self.accelerator).link == "PCIe" else _BOARD_NETWORK

    @property
    def machine_devices(self) -> int:
        return USUAL_DEVICES if self.machine is None else self.machine.devices

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices, ascending."""
        whole = self.machine_devices
        return (*range(1, whole), *range(whole, MAX_DEVICES + 1, whole))

    def cluster(self, devices: int) -> Cluster:
        whole = self.machine_devices
        sizes = [devices] if devices < whole else [whole] * (devices // whole)
        host = self.host(sizes[0])
        name = "machine" if host is None else host.name
        described = [DescribedNode(f"{name}-{number}", self.accelerator, size) for number, size in enumerate(sizes, 1)]
        port = network_port(self.usual_network) if host is None else host.network.port
        nodes = priced_nodes(described, port)
        return cluster_of_nodes([each if host is None else _as_listed(each, host) for each in nodes])

    @cached_property
    def whole(self) -> Problem:
        """The problem on one whole machine, whose profiles hold for several."""
        return problem_of(self.training, self.cluster(self.machine_devices), runtime=self.runtime, limits=self.limits)

    def problem(self, devices: int) -> Problem:
        return replace(self.whole, cluster=self.cluster(devices))

    @property
    def first(self) -> int:
        """Index of the smallest number whose memory holds weights, gradients and optimizer."""
        context = self.whole.cost_context
        device_bytes = context.cluster.accelerators[0].memory_bytes
        enough = (
            index for index, devices in enumerate(self.counts) if context.model_state_bytes <= devices * device_bytes
        )
        return next(enough, len(self.counts))

    def smallest(self, savings: Savings = ALL_SAVINGS) -> int | None:
        """Return the index of the smallest number on which a plan with these savings fits; None if there is none."""
        verdicts: dict[Hashable, bool] = {}
        return first_that(
            lambda index: fits(self.problem(self.counts[index]), savings, verdicts), self.first, len(self.counts)
        )


def _price(machine: Machine) -> float:
    return math.inf if machine.price_per_hour is None else machine.price_per_hour.value


def _as_listed(each: PricedNode, host: Machine) -> PricedNode:
    """Return the node with the links of the listed machine, and the price of all its devices."""
    inside = host.inside.port if host.inside and each.node.devices > 1 else each.node.inside
    price = each.price_per_hour if host.price_per_hour is None else host.price_per_hour.value
    return replace(each, node=replace(each.node, inside=inside, network=host.network.port), price_per_hour=price)


def sizes_of(
    training: Training, accelerators: Sequence[str], runtime: Runtime, limits: Limits, control: SearchControl
) -> list[Size]:
    """Return the smallest number of each accelerator on which the training fits, with its best plan.

    With a run of the limits that may only take a time it is the smallest number that ends it by then. Up to the devices of a
    machine every number counts, above it whole machines. Raises ValueError for an accelerator without a data sheet.
    """
    return [
        _size(training, name, runtime, limits, control.part(len(accelerators) - number).apart())
        for number, name in enumerate(accelerators)
    ]


def _size(training: Training, accelerator: str, runtime: Runtime, limits: Limits, control: SearchControl) -> Size:
    fleet = _Fleet(data_sheet(accelerator).name, training, runtime, limits)
    empty = Size(fleet.accelerator, "" if fleet.machine is None else fleet.machine.name, fleet.machine_devices)
    index = fleet.smallest()
    if index is None:
        return replace(
            empty,
            refusal=f"no number of {fleet.accelerator} up to {MAX_DEVICES:,} holds the model, even with every saving",
        )
    return _Sizing(fleet, empty, control).of(index)


@dataclass
class _Sizing:
    """Search for plans from the smallest number that fits."""

    fleet: _Fleet
    empty: Size
    control: SearchControl

    def of(self, index: int) -> Size:
        answer = self._answer(index)
        return self._decided(index, answer, None) if self._ends_in_time(answer) else self._in_time(index, answer)

    @property
    def _parts(self) -> float:
        """Parts of the time that is left of which a search has one: in time means several searches."""
        run = self.fleet.limits.run
        return _ONE_OF_MANY if run is not None and run.within_seconds < math.inf else _ONE_OF_FEW

    def _answer(self, index: int) -> Answer:
        """Return the best plan on a number of devices that hold the model; a search may miss all that fit."""
        problem = self.fleet.problem(self.fleet.counts[index])
        free = replace(problem, limits=replace(problem.limits, run=None))
        try:
            answer = find_candidates(Question((free,), _PLANNER, 1), self.control.part(self._parts).apart())
        except NoFeasiblePlan:
            plan = lean_plan(free)
            assert plan is not None
            answer = Answer(free, (stating_format(candidate_of(free, plan), free),))
        return replace(answer, problem=replace(answer.problem, limits=problem.limits))

    def _ends_in_time(self, answer: Answer) -> bool:
        run = self.fleet.limits.run
        return run is None or answer.best.run_seconds(run) <= run.within_seconds

    def _in_time(self, smallest: int, answer: Answer) -> Size:
        """Return the smallest number that ends the run in time: as many as the work alone needs, then more as the plans take."""
        counts, last = self.fleet.counts, answer
        previous = max(smallest, self._index_by_work() - 1)
        index = previous + 1
        while index < len(counts):
            more = self._answer(index)
            if self._ends_in_time(more):
                return self._between(previous, index, more)
            is_faster = more.best.estimate.iteration_seconds < _MIN_GAIN * last.best.estimate.iteration_seconds
            if not is_faster and counts[index] >= 2 * counts[previous]:
                break
            previous, index, last = index, self._index_of(2 * counts[index]), more
        run = self.fleet.limits.run
        assert run is not None
        late = f"no number of {self.fleet.accelerator} up to {MAX_DEVICES:,} ends the run within {days(run.within_seconds)}"
        return replace(self.empty, refusal=late)

    def _between(self, low: int, high: int, answer: Answer) -> Size:
        """Return the smallest number above `low` that ends in time; `high` does, with that answer."""
        while high - low > 1:
            middle = (low + high) // 2
            fewer = self._answer(middle)
            if self._ends_in_time(fewer):
                high, answer = middle, fewer
            else:
                low = middle
        return self._decided(high, answer, Decider.TIME)

    def _index_of(self, devices: int) -> int:
        return next(
            (index for index, count in enumerate(self.fleet.counts) if count >= devices), len(self.fleet.counts)
        )

    def _index_by_work(self) -> int:
        """Return the index of the number that ends the run in time if every device computed all the time."""
        run, whole = self.fleet.limits.run, self.fleet.whole
        assert run is not None
        batch = whole.global_batch_size
        least = work_bound_seconds(whole.cost_context, whole.nodes, batch) * len(whole.devices)
        return self._index_of(int(run.seconds(least, batch) / run.within_seconds))

    def _decided(self, index: int, answer: Answer, decider: Decider | None) -> Size:
        """Return the answer with what fewer devices lack, and what other savings would need."""
        counts = self.fleet.counts
        context = self.fleet.problem(counts[index]).cost_context
        fewer = counts[index - 1] if index else 0
        fewer_bytes = fewer * context.cluster.accelerators[0].memory_bytes
        if decider is None and fewer:
            decider = _largest(context.value_bytes) if context.model_state_bytes > fewer_bytes else Decider.ACTIVATIONS
        host = self.fleet.host(min(counts[index], self.fleet.machine_devices))
        return replace(
            self.empty if host is None else replace(self.empty, machine=host.name, machine_devices=host.devices),
            answer=answer,
            decider=decider,
            fewer=fewer,
            fewer_bytes=fewer_bytes,
            state_bytes=context.model_state_bytes,
            without_recompute=self._smallest(Savings(recompute=False)),
            without_sharding=self._smallest(Savings(sharding=False)),
        )

    def _smallest(self, savings: Savings) -> int | None:
        index = self.fleet.smallest(savings)
        return None if index is None else self.fleet.counts[index]


def _largest(per_value: ValueBytes) -> Decider:
    """Return the largest part of the training state."""
    parts = {
        Decider.OPTIMIZER: per_value.optimizer + per_value.copies,
        Decider.GRADIENTS: per_value.gradient,
        Decider.WEIGHTS: per_value.weight,
    }
    return max(parts, key=lambda part: parts[part])
