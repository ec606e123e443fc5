"""What the operator asks of a worker, and what the worker answers: the only documents the two share.

An order reaches every pod of a gang as a file; each pod finds its place by its node's name. A worker writes
one line for every answer to its standard output: a marker, a space, and one JSON document:

    TRAINWRIGHT-PROGRESS   a `Progress`, now and then, from the process with rank 0
    TRAINWRIGHT-PART       a `SeriesPart` for each trial of a series, from the process with rank 0
    TRAINWRIGHT-REPORT     the report of the order's kind, once, from the process with rank 0
    TRAINWRIGHT-FAILURE    a `Failure`, from any process; also left as the pod's termination message
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from trainwright.cluster import Device, Emulation, Link
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright.timeline import Timeline

PROGRESS_MARKER = "TRAINWRIGHT-PROGRESS"
PART_MARKER = "TRAINWRIGHT-PART"
REPORT_MARKER = "TRAINWRIGHT-REPORT"
FAILURE_MARKER = "TRAINWRIGHT-FAILURE"
MAX_REPORT_BYTES = 900_000
"""A report larger than this is refused: it must fit into one ConfigMap (1 MiB) with room to spare."""
MOST_LATE_RATIO = 0.01
"""Of the computations that were paced, so many may have taken longer than the emulated device would."""

ORDER_PATH = "/etc/trainwright/order.json"
NODE_NAME_VARIABLE = "TRAINWRIGHT_NODE_NAME"


@dataclass(frozen=True, slots=True)
class GangNode:
    """A node of a gang: one pod with one process per slot."""

    name: str
    slots: tuple[int, ...]
    accelerator: str

    def __post_init__(self) -> None:
        if not self.slots or tuple(sorted(set(self.slots))) != self.slots:
            raise ValueError(f"node {self.name}: slots must be ascending and not empty, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Gang:
    """The pods that start together: one for each node, the first one hosts the rendezvous.

    Attributes:
        emulations: device tables by accelerator, for the emulated ones alone; empty on real devices.
        backend: `nccl` where the devices are GPUs, `gloo` else.
        collective_timeout_seconds: a collective that takes longer means that a peer hangs.
        deadline_seconds: the whole order; the worker gives up by itself then, with stacks.
    """

    nodes: tuple[GangNode, ...]
    backend: Literal["gloo", "nccl"] = "gloo"
    emulations: tuple[tuple[str, Emulation], ...] = ()
    collective_timeout_seconds: float = 120.0
    deadline_seconds: float = 900.0

    @property
    def is_emulated(self) -> bool:
        """Whether devices are emulated: then nodes share a machine, and its processors."""
        return bool(self.emulations)

    def accelerator_of(self, node: str) -> str:
        """The accelerator of a node of the gang."""
        return next(one.accelerator for one in self.nodes if one.name == node)

    def emulation_of(self, accelerator: str) -> Emulation | None:
        """The device table of an accelerator, or None where its speed is its own."""
        return dict(self.emulations).get(accelerator)


@dataclass(frozen=True, slots=True)
class LinksOrder:
    """Measure the links between the gang's nodes, and within each node that has two slots.

    Rounds of disjoint pairs; each pair ping-pongs messages of these sizes in both directions.

    Attributes:
        pairs: the nodes between which links are measured, each pair once in either order; None: every two nodes.
        collective_bytes: whole messages of collectives that are measured as well, ascending; empty for none.
        collective_seconds: about as long as all collectives may take; sizes that would take longer are left out.
        overlap: measure by how much computation slows down while a device communicates.
    """

    gang: Gang
    pairs: tuple[tuple[str, str], ...] | None = None
    message_bytes: tuple[int, ...] = (1_024, 131_072, 524_288)
    repeats: int = 5
    collective_bytes: tuple[int, ...] = ()
    collective_seconds: float = 20.0
    overlap: bool = False
    kind: Literal["links"] = "links"


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """Measure each distinct layer kind of the model on one device at one tensor degree.

    Kinds that are not tensor parallel are measured at degree 1 only.

    Attributes:
        iterations: at least, of each layer and number of rows; more rounds of as many follow while the median of forward
            plus backward is known less well than `target_uncertainty` (half of its 95 % interval over the median) and
            the layer has not taken `seconds_per_layer`.
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
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True)
class TrialOrder:
    """Train by the plan on synthetic data for some iterations, and time them.

    Attributes:
        track_memory: run one further, untimed iteration that tracks live bytes where the device has no counter of its own.
        fault: a fault to rehearse: `crash` ends rank 0's process after the first iteration, `hang` stops it there,
            `mute` finishes without a report. None in real use.
        timeline: run one further iteration, of which every rank tells what it did when.
        sequence_parallel: whether each rank of a tensor group keeps but a part of the sequence where layers allow it
            (Korthikanti et al. 2022); the losses are the same.
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
    sequence_parallel: bool = False
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True)
class SeriesOrder:
    """Several trials in one gang, one after another, since starting one takes longer than most trials.

    Attributes:
        plans: each uses some of the gang's devices, in any order; the other devices wait meanwhile.
        timeline, sequence_parallel: of every plan.
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
    sequence_parallel: bool = False
    kind: Literal["series"] = "series"

    def trial(self, number: int) -> TrialOrder:
        """The trial of one of the plans."""
        return TrialOrder(
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
            sequence_parallel=self.sequence_parallel,
        )


WorkerOrder = LinksOrder | ProfileOrder | TrialOrder | SeriesOrder


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` steps (rounds, layer measurements, iterations) are finished."""

    done: int
    total: int
    what: str


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """A collective as it was measured, alone on its links but for those inside other nodes.

    Attributes:
        members: in the order of their ranks.
        message_bytes: the whole message: what every member reduces, has gathered in the end, or reduces to share out.
        seconds: the slowest member's, median.
    """

    collective: CollectiveKind
    members: tuple[Device, ...]
    message_bytes: int
    seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of computation while its device communicates, over those that it takes alone."""

    node: str
    compute_slowdown_ratio: float


@dataclass(frozen=True, slots=True)
class LinksReport:
    """Directed links fitted from the messages' times, between nodes and within nodes.

    Attributes:
        collectives, overlaps: where they were asked for.
    """

    links: tuple[Link, ...]
    collectives: tuple[CollectiveTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    kind: Literal["links"] = "links"


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """The measured layers of one accelerator at one tensor degree.

    Attributes:
        out_of_memory: of each kind, the first number of rows that did not fit; larger ones were not tried.
    """

    layers: tuple[LayerProfile, ...]
    out_of_memory: tuple[LayerTooLarge, ...] = ()
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most bytes that a rank held at once: parameters, gradients, optimizer state and activations."""

    node: str
    slot: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A trial's measurement.

    Attributes:
        iteration_seconds: each measured iteration after warm-up, the slowest rank's.
        losses: the mean loss of each iteration, warm-up included; training that works lowers it.
        memory: by rank; empty where it was not tracked.
        paced_segments, late_segments: of emulated devices: computations that were paced, and those among them whose
            real computation took longer than the emulated device would.
        timeline: where it was asked for.
    """

    iteration_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    memory: tuple[RankMemory, ...] = ()
    paced_segments: int = 0
    late_segments: int = 0
    timeline: Timeline | None = None
    kind: Literal["trial"] = "trial"

    @property
    def is_void(self) -> bool:
        """Whether emulated devices were faster than the machine that emulates them: then its seconds mean nothing."""
        return self.late_segments > MOST_LATE_RATIO * self.paced_segments


@dataclass(frozen=True, slots=True)
class SeriesReport:
    """The measurements of a series' trials, in the order of its plans."""

    trials: tuple[TrialReport, ...]
    kind: Literal["series"] = "series"


@dataclass(frozen=True, slots=True)
class SeriesPart:
    """A trial of a series, told as soon as it is measured: what fails after it does not take it along.

    Attributes:
        number: of its plan in the order, from 0.
    """

    number: int
    trial: TrialReport


WorkerReport = LinksReport | ProfileReport | TrialReport | SeriesReport


class FailureReason(StrEnum):
    """Why a worker gave up; the operator writes the same word into the trial's reason."""

    PLACEMENT_NOT_MET = "PlacementNotMet"
    OUT_OF_MEMORY = "OutOfMemory"
    PEER_LOST = "PeerLost"
    HANG = "Hang"
    ORDER_INVALID = "OrderInvalid"
    CRASHED = "Crashed"
    TERMINATED = "Terminated"
    EMULATION_TOO_SLOW = "EmulationTooSlow"


@dataclass(frozen=True, slots=True)
class Cause:
    """The failure that others followed from, as far as those that followed could learn of it."""

    reason: FailureReason
    message: str
    node: str | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's last words: one reason, one sentence, and where.

    Attributes:
        slot: of the process's device; None where a pod speaks as a whole.
        doing: what the process was busy with.
        cause: what went wrong elsewhere first, where this is a consequence and that is known.
    """

    reason: FailureReason
    message: str
    rank: int | None = None
    node: str | None = None
    slot: int | None = None
    doing: str = ""
    cause: Cause | None = None
