"""Tasks and reports of a gang, and how its pods receive and send them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from trainwright.bounds import OMITTED_DEFAULT, Bytes, Count, IterationSeconds, Loss, Ratio, Rows, Seconds, Slot
from trainwright.cluster import Device, Emulation, Link, is_cpu
from trainwright.document_kind import document
from trainwright.layer import Dtype, LayerKind
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright.timeline import Timeline


@dataclass(frozen=True, slots=True)
class GangNode:
    """Node of a gang: one pod with one process per slot."""

    name: str
    slots: tuple[int, ...]
    accelerator: str

    def __post_init__(self) -> None:
        if not self.slots or tuple(sorted(set(self.slots))) != self.slots:
            raise ValueError(f"node {self.name}: slots must be ascending and not empty, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods that start together, one per node; the first hosts the rendezvous.

    Attributes:
        emulations: device tables of the emulated accelerators; empty on real devices.
        backend: `nccl` on GPUs, else `gloo`.
        collective_timeout_seconds: a collective that takes longer means that a peer hangs.
        deadline_seconds: for the whole task; after it the worker dumps its stacks and ends itself.
    """

    nodes: tuple[GangNode, ...]
    backend: Literal["gloo", "nccl"] = "gloo"
    emulations: tuple[tuple[str, Emulation], ...] = ()
    collective_timeout_seconds: float = 120.0
    deadline_seconds: float = 900.0

    @property
    def is_emulated(self) -> bool:
        """True if devices are emulated; their nodes then share one machine's processors."""
        return bool(self.emulations)

    @property
    def is_on_cpu(self) -> bool:
        """True if devices are threads of this machine's CPU."""
        return all(is_cpu(node.accelerator) for node in self.nodes)

    def accelerator_of(self, node: str) -> str:
        return next(gang_node.accelerator for gang_node in self.nodes if gang_node.name == node)

    def emulation_of(self, accelerator: str) -> Emulation | None:
        """Return an accelerator's device table, or None if it is real."""
        return dict(self.emulations).get(accelerator)


@document("LinksOrder")
@dataclass(frozen=True, slots=True)
class LinkTask:
    """Task to measure links between the gang's nodes, and within nodes that have several slots.

    In rounds of disjoint pairs, each pair ping-pongs messages of every size in both directions. Between nodes each slot is
    paired with the same slot of the other node, since it may have a NIC of its own; within a node with every other one.
    Then all slots of two nodes send at once, since they may reach more together.

    Attributes:
        pairs: node pairs to measure, each once in either order; None: all pairs.
        collective_bytes: full message sizes of collectives to measure, ascending; empty: none.
        collective_seconds: approximate limit for all collectives together; sizes that would exceed it are left out.
        all_to_all: also measure all-to-alls, which convert tensors between operators that are sharded each in its own way.
        overlap: also measure how much computation slows down during communication.
        overlap_dtype: number format of that computation on a GPU, whose formats run on different units.
        message_bytes: the largest grows on real devices until a message lasts long enough to time.
    """

    gang: Gang
    pairs: tuple[tuple[str, str], ...] | None = None
    message_bytes: tuple[int, ...] = (1_024, 131_072, 524_288)
    repeats: int = 5
    collective_bytes: tuple[int, ...] = ()
    collective_seconds: float = 20.0
    overlap: bool = False
    overlap_dtype: Dtype = Dtype.FLOAT32
    all_to_all: Annotated[bool, OMITTED_DEFAULT] = False
    kind: Literal["links"] = "links"

    @property
    def collectives(self) -> tuple[CollectiveKind, ...]:
        """Kinds of collectives that are measured at every size."""
        return ("all_reduce", "all_gather", "reduce_scatter", *(("all_to_all",) if self.all_to_all else ()))


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Measured time of one collective, while nothing else ran except collectives within other nodes.

    Attributes:
        members: in rank order.
        message_bytes: full message: the input of each member of an all-reduce, a reduce-scatter or an all-to-all, the output
            of an all-gather.
        seconds: median of the slowest member's times.
    """

    collective: CollectiveKind
    members: Annotated[tuple[Device, ...], Field(min_length=1)]
    message_bytes: Bytes
    seconds: Seconds
    samples: Count


@dataclass(frozen=True, slots=True)
class Overlap:
    """Slowdown of computation during communication: its seconds over those without communication."""

    node: str
    compute_slowdown_ratio: Ratio


@document("LinksReport")
@dataclass(frozen=True, slots=True)
class LinkReport:
    """Directed links fitted to message times, between and within nodes: of the slowest pair of slots, one at a time.

    Where all slots of two nodes reach more together, the link states both.

    Attributes:
        collectives, overlaps: empty unless requested.
    """

    links: tuple[Link, ...]
    collectives: tuple[CollectiveTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    kind: Literal["links"] = "links"


TASK_PATH = "/etc/trainwright/order.json"
SECRET_FILE = "gang-secret"  # noqa: S105 - the name of a file
"""File beside the task: what the gang's pods sign messages to each other with."""
NODE_NAME_VARIABLE = "TRAINWRIGHT_NODE_NAME"

PROGRESS_MARKER = "TRAINWRIGHT-PROGRESS"
SERIES_PART_MARKER = "TRAINWRIGHT-PART"
REPORT_MARKER = "TRAINWRIGHT-REPORT"
FAILURE_MARKER = "TRAINWRIGHT-FAILURE"
MAX_REPORT_BYTES = 900_000
"""Maximum size of a report, which must fit into one ConfigMap (1 MiB) with room to spare; larger ones are refused."""


@document("ProfileOrder")
@dataclass(frozen=True, slots=True)
class ProfilingTask:
    """Task to measure each layer kind of the model on one device at one tensor degree.

    Kinds that are not tensor parallel are measured at degree 1 only.

    Attributes:
        iterations: minimum per layer and row count; rounds of the same length follow until the median of forward plus
            backward is known within `target_uncertainty` (half of its 95 % interval over the median) or the layer has
            taken `seconds_per_layer`.
        kinds: names of the only kinds to measure; empty: all.
    """

    gang: Gang
    model: Model
    tensor_degree: int
    rows: tuple[int, ...]
    optimizer: Literal["adam", "sgd"] = "adam"
    warmup_iterations: int = 3
    iterations: int = 10
    target_uncertainty: float = 0.02
    seconds_per_layer: float = 1.0
    kinds: Annotated[tuple[str, ...], OMITTED_DEFAULT] = ()
    kind: Literal["profile"] = "profile"

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds to measure, as a tensor group computes them; those that it does not divide only at degree 1."""
        whole = (kind for kind in self.model.kinds if not self.kinds or kind.name in self.kinds)
        divided = (self.model.divided_kind(kind) or kind for kind in whole)
        return tuple(kind for kind in divided if self.tensor_degree == 1 or kind.is_tensor_parallel)


@document("ProfileReport")
@dataclass(frozen=True, slots=True)
class ProfilingReport:
    """Measured layers of one accelerator at one tensor degree.

    Attributes:
        out_of_memory: smallest row count of each kind that did not fit; larger ones were not tried.
        process_bytes: what the process held on its GPU besides tensors; None on other devices.
        format_speedup: how many times as fast matrix products were as in float32, on a GPU, in a half format; else None.
        unchecked: what of a user's model neither its description nor this gang checked, and why.
    """

    layers: tuple[LayerProfile, ...]
    out_of_memory: tuple[LayerTooLarge, ...] = ()
    process_bytes: Bytes | None = None
    format_speedup: Annotated[Ratio | None, OMITTED_DEFAULT] = None
    unchecked: Annotated[tuple[str, ...], OMITTED_DEFAULT] = ()
    kind: Literal["profile"] = "profile"


MAX_DISTURBING_CORES = 0.2
"""Maximum of CPU cores that other programs may take from the devices of a trial."""
MAX_LATE_RATIO = 0.01
"""Maximum share of emulated computations that may take longer than the emulated device would, by more than this share of its
time together: operators of a fraction of a millisecond are often late, and a few late segments are no matter for a median."""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """Layer that one device of every node with an accelerator computes before a trial, whole, to see how fast the node is."""

    accelerator: str
    kind: str
    rows: int


@dataclass(frozen=True, slots=True)
class CheckedLayer:
    """Figure of a `LayerCheck` on a node: median seconds of forward plus those of backward."""

    node: str
    dtype: Dtype
    kind: str
    rows: Rows
    seconds: Seconds


@document("TrialOrder")
@dataclass(frozen=True, slots=True)
class TrialTask:
    """Task to train by a plan on synthetic data and time its iterations.

    Attributes:
        track_memory: run one further, untimed iteration that tracks live bytes where the device has no memory counter.
        fault: fault to inject, None in real use: `crash` ends rank 0's process after the first iteration, `hang` stops
            it there, `mute` finishes without a report.
        timeline: run one further iteration, in which every rank records its actions.
        checks: at most one of each accelerator.
        sequence_parallel: kept for workers that know it from here; the plan states it.
    """

    gang: Gang
    model: Model
    plan: Plan
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    seed: int = 0
    warmup_iterations: int = 3
    iterations: int = 10
    track_memory: bool = True
    fault: Literal["crash", "hang", "mute"] | None = None
    timeline: bool = False
    checks: Annotated[tuple[LayerCheck, ...], OMITTED_DEFAULT] = ()
    sequence_parallel: Literal[False] = False
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes of a rank: parameters, gradients, optimizer state and activations.

    On a GPU also what its process holds besides: fragments, context, libraries, communication buffers.
    """

    node: str
    slot: Slot
    peak_bytes: Bytes


class LossDependence(StrEnum):
    """Property of a model by which its first loss, on the same rows and weights, differs between plans."""

    RANDOM_NUMBERS = "random_numbers"
    BATCH_NORMALISATION = "batch_normalisation"


@document("TrialReport")
@dataclass(frozen=True, slots=True)
class TrialReport:
    """Measurement of a trial.

    Attributes:
        iteration_seconds: slowest rank's, for each iteration after warm-up.
        losses: mean of each iteration, warm-up included, None where it was not finite or its batch weighs nothing; training
            that works lowers it.
        mean_absolute_row_loss: of the first iteration, by weight where rows have some; None in reports of former versions and
            of users' jobs, and where its batch weighs nothing.
        loss_depends_on: what a layer does by which the first loss depends on the plan; None if nothing is known.
        memory: by rank; empty if not tracked.
        paced_segments, late_segments: computations timed by emulation, and how many of them took longer than the
            emulated device would.
        late_ratio: seconds that these took longer over the emulated seconds of all, on the rank with the most; None in reports
            of former versions and of users' jobs.
        timeline: None unless requested.
        checked: figures of the task's checks on every node that they are for.
        skipped_updates: iterations, warm-up included, that updated nothing, since their float16 gradients overflowed.
        empty_batches: iterations that updated nothing, since all rows of their batch have weight 0.
        disturbing_cores: CPU cores that other programs took from the plan's devices while it was timed; None where these are
            no part of a CPU.
    """

    iteration_seconds: Annotated[tuple[IterationSeconds, ...], Field(min_length=1)]
    losses: tuple[float | None, ...]
    memory: tuple[RankMemory, ...] = ()
    paced_segments: Count = 0
    late_segments: Count = 0
    timeline: Timeline | None = None
    checked: Annotated[tuple[CheckedLayer, ...], OMITTED_DEFAULT] = ()
    skipped_updates: Annotated[Count, OMITTED_DEFAULT] = 0
    mean_absolute_row_loss: Annotated[Loss | None, OMITTED_DEFAULT] = None
    loss_depends_on: Annotated[LossDependence | None, OMITTED_DEFAULT] = None
    empty_batches: Annotated[Count, OMITTED_DEFAULT] = 0
    disturbing_cores: Annotated[Ratio | None, OMITTED_DEFAULT] = None
    late_ratio: Annotated[Ratio | None, OMITTED_DEFAULT] = None
    kind: Literal["trial"] = "trial"

    @property
    def remark(self) -> str:
        """Sentences on losses that were not finite, skipped updates and other programs; empty if there were none."""
        remarks = []
        if (invalid := self.losses.count(None) - self.empty_batches) > 0:
            first = "" if self.empty_batches else f", iteration {self.losses.index(None)} the first"
            remarks.append(f"{invalid} of {len(self.losses)} iterations had a loss that is not finite{first}.")
        if self.empty_batches:
            counted = f"{self.empty_batches} of {len(self.losses)} iterations updated no weights and have no loss"
            remarks.append(f"{counted}, since all rows of their batch have weight 0.")
        if self.skipped_updates:
            counted = f"{self.skipped_updates} of {len(self.losses)} iterations updated no weights"
            remarks.append(
                f"{counted}, since float16 gradients overflowed; they took a little less time than the others."
            )
        if self.is_disturbed:
            remarks.append(f"Other programs took {self.disturbing_cores:.1f} cores from its devices meanwhile.")
        return " ".join(remarks)

    @property
    def is_disturbed(self) -> bool:
        """True if other programs took too much of the plan's devices for its seconds to prove anything."""
        return self.disturbing_cores is not None and self.disturbing_cores > MAX_DISTURBING_CORES

    @property
    def is_emulation_too_slow(self) -> bool:
        """True if too many segments were late, by too much together: the seconds are not those of the emulated devices."""
        are_many = self.late_segments > MAX_LATE_RATIO * self.paced_segments
        return are_many and (self.late_ratio is None or self.late_ratio > MAX_LATE_RATIO)


SERIES_ROUNDS = 3
"""Rounds of a series: each plan is measured in every round, so that what changes on the machine meanwhile changes them alike."""


@document("SeriesOrder")
@dataclass(frozen=True, slots=True)
class TrialSeriesTask:
    """Task of several trials in one gang, since starting a gang takes longer than most trials, in SERIES_ROUNDS rounds.

    Attributes:
        plans: each uses some of the gang's devices, in any order; the others wait.
        checks: computed before the first plan, in whose report their figures are.
    """

    gang: Gang
    model: Model
    plans: tuple[Plan, ...]
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    seed: int = 0
    warmup_iterations: int = 3
    iterations: int = 10
    track_memory: bool = True
    timeline: bool = False
    checks: Annotated[tuple[LayerCheck, ...], OMITTED_DEFAULT] = ()
    sequence_parallel: Literal[False] = False
    kind: Literal["series"] = "series"

    def trial_task(self, number: int) -> TrialTask:
        return TrialTask(
            self.gang,
            self.model,
            self.plans[number],
            self.optimizer,
            self.learning_rate,
            self.seed,
            self.warmup_iterations,
            self.iterations,
            self.track_memory,
            timeline=self.timeline,
            checks=self.checks if number == 0 else (),
        )


@document("SeriesReport")
@dataclass(frozen=True, slots=True)
class TrialSeriesReport:
    """Measurements of a series' trials, in the order of its plans."""

    trials: tuple[TrialReport, ...]
    kind: Literal["series"] = "series"


@document("SeriesPart")
@dataclass(frozen=True, slots=True)
class SeriesPart:
    """Trial of a series, reported once measured so that later failures do not lose it.

    Attributes:
        number: index of its plan in the task.
    """

    number: Count
    trial: TrialReport
