"""What a person asks: `spec` of a TrainingPlan. The API server checks all of it, so bad input is refused at once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from trainwright.families import Gpt
from trainwright_operator.api.section import Seconds, Section, immutable, opaque, rules

MAX_TRIALS = 32
"""Upper bound of `trials.topK`."""


class Planner(StrEnum):
    """The search that makes the candidates."""

    AMP = "Amp"
    AMP_ANNEALING = "AmpAnnealing"
    RANDOM = "Random"
    MEGATRON = "Megatron"

    @property
    def search(self) -> str:
        """The planner's own name for it, as on its command line."""
        return {"Amp": "amp", "AmpAnnealing": "amp-annealing", "Random": "random", "Megatron": "megatron"}[self.value]


class Baseline(StrEnum):
    """What the winner is compared with."""

    MEGATRON = "Megatron"
    NONE = "None"


class GptSpec(Section):
    """GPT-2: learned positions, pre-normalisation, tied embeddings."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.hiddenSize % self.heads == 0",
                "hiddenSize must be a multiple of heads, since every head takes an equal part; change one of the two",
            ),
            field_path=".hiddenSize",
        )
    )

    layers: Annotated[int, Field(ge=1, le=1024)]
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Annotated[int, Field(ge=1, le=131_072)]
    """Width of the model; a multiple of heads."""
    heads: Annotated[int, Field(ge=1, le=1024)]
    """Attention heads; also the largest tensor degree that is tried."""
    sequence_length: Annotated[int, Field(ge=1, le=1_048_576)]
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Annotated[int, Field(ge=1, le=4_194_304)]
    """Entries of the token embedding."""

    def family(self) -> Gpt:
        """The same model as the planner's noun."""
        return Gpt(
            layers=self.layers,
            hidden_size=self.hidden_size,
            heads=self.heads,
            sequence_length=self.sequence_length,
            vocabulary_size=self.vocabulary_size,
        )


class ModelSpec(Section):
    """The model: exactly one family."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.gpt)", "model needs exactly one family; set model.gpt")),
    )

    gpt: GptSpec | None = None
    """A GPT-2 of any size."""

    def family(self) -> Gpt:
        """The one family that is set. Raises ValueError where none is (the API server refuses that)."""
        if self.gpt is None:
            raise ValueError("model needs exactly one family; set model.gpt")
        return self.gpt.family()


class TrainingSpec(Section):
    """How the model is trained."""

    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    """Rows (sequences) in one iteration, over all devices. Degrees and micro-batches are sought among its divisors."""
    dtype: Literal["float32"] = "float32"
    """Number format of weights and activations."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer: its state takes memory, its step takes time."""


class DevicesSpec(Section):
    """Which devices may be used."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.resourceName.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",
                "resourceName must be an extended resource as nodes list it, domain/name, for example nvidia.com/gpu",
            ),
            field_path=".resourceName",
        )
    )

    resource_name: Annotated[str, Field(min_length=3, max_length=128)] = "nvidia.com/gpu"
    """The extended resource that nodes offer their devices under."""
    products: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=128)], ...],
        Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Accelerators that may be used, named as in status.cluster.accelerators, for example Tesla-T4. Empty: all."""
    max: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The most devices that a plan may use. Absent: all that are found."""
    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=16, default_factory=dict)
    ]
    """Labels that a node must carry. Empty: every node with devices."""


class LimitsSpec(Section):
    """Bounds of the search; each makes it, and the profiling before it, shorter."""

    max_tensor_degree: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The largest tensor degree that is profiled and tried. Absent: as many as a node has devices and the model heads."""


class SearchSpec(Section):
    """How candidates are found."""

    planner: Planner = Planner.AMP
    """The search: Amp (Algorithm 1 of the AMP paper), AmpAnnealing (its Algorithm 2, which moves devices too), Random
    (fifty draws) or Megatron (the heuristic alone)."""
    limits: LimitsSpec = LimitsSpec()
    """Bounds of the search."""


class LinksSpec(Section):
    """Measuring latency and bandwidth between nodes and within them."""

    deadline_seconds: Seconds = 300
    """The measurement fails with the reason DeadlineExceeded when it takes longer, waiting for devices included."""


class ProfilingSpec(Section):
    """Measuring the layers on each accelerator."""

    deadline_seconds: Seconds = 600
    """Profiling fails with the reason DeadlineExceeded when it takes longer, waiting for devices included."""
    warmup_iterations: Annotated[int, Field(ge=0, le=1000)] = 3
    """Repeats of a layer that are run first and not counted."""
    iterations: Annotated[int, Field(ge=1, le=1000)] = 10
    """Repeats of a layer that are timed; their median counts."""


class TrialsSpec(Section):
    """Measuring the best candidates for real."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.topK == 0 || double(self.runDeadlineSeconds) <= self.maxDeviceHours * 3600.0",
                (
                    "maxDeviceHours is used up by a single run on one device that lasts runDeadlineSeconds; "
                    "raise maxDeviceHours or lower runDeadlineSeconds"
                ),
            ),
            field_path=".maxDeviceHours",
        )
    )

    top_k: Annotated[int, Field(ge=0, le=MAX_TRIALS)] = 3
    """How many of the best candidates are tried. 0: plan only, without any trial, the baseline's included."""
    baseline: Baseline = Baseline.MEGATRON
    """What the winner is compared with: Megatron (the best measured of the heuristic's best two) or None."""
    warmup_iterations: Annotated[int, Field(ge=0, le=1000)] = 3
    """Training iterations that are run first and not counted."""
    iterations: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Training iterations that are timed; their median counts."""
    max_failed: Annotated[int, Field(ge=0, le=MAX_TRIALS)] = 2
    """How many trials may fail; with one more, no further trial is started."""
    max_device_hours: Annotated[float, Field(gt=0, le=1_000_000)] = 8
    """Device-hours that all trials together may take; those that would go beyond are skipped. A trial's count from the
    start of its last pod to its end, for every device that it holds; waiting before that does not count, nor do trials
    that failed for want of capacity and are measured anew after an edit."""
    run_deadline_seconds: Seconds = 900
    """The longest that a trial may run, counted from the start of its last pod."""
    pending_deadline_seconds: Seconds = 300
    """The longest that a trial may wait for its devices, its image and its pods' start."""
    stop_when_regret_below: Annotated[float | None, Field(gt=0, le=0.5)] = None
    """Try no further candidate once the best plan measured is expected to be slower than the fastest of all by less than
    this share, for example 0.01. Candidates are then tried in the order in which that expectation falls fastest, and
    every trial corrects it. Left out: all are tried in the order of their predictions. Baselines are tried either way."""


class PodMetadata(Section):
    """Labels and annotations that are added to every worker pod."""

    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32, default_factory=dict)]
    """Labels, for example those that a network policy selects by. Trainwright's own win over equal keys."""
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32, default_factory=dict)
    ]
    """Annotations, for example those of a network plug-in."""


_OWNED = {
    "nodeName": {"type": "string", "maxLength": 253},
    "nodeSelector": opaque(type="object"),
    "affinity": opaque(type="object"),
    "schedulingGates": {"type": "array", "maxItems": 16, "items": opaque(type="object")},
    "restartPolicy": {"type": "string", "maxLength": 32},
}
_POD_SPEC = opaque(
    properties={
        field: schema | {"description": "Refused: Trainwright sets this field itself."}
        for field, schema in _OWNED.items()
    },
    **rules(
        (
            "!has(self.nodeName) && !has(self.nodeSelector) && !has(self.affinity) && !has(self.schedulingGates)",
            (
                "podTemplate.spec cannot place the workers (nodeName, nodeSelector, affinity, schedulingGates), since "
                "the plan does; choose nodes by devices.nodeSelector"
            ),
        ),
        (
            "!has(self.restartPolicy)",
            (
                "podTemplate.spec.restartPolicy cannot be set, since a worker that restarts would falsify the "
                "measurement; remove it"
            ),
        ),
    ),
)


class PodTemplate(Section):
    """What is merged into every worker pod."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations that are added."""
    spec: Annotated[dict[str, Any], Field(json_schema_extra=_POD_SPEC, default_factory=dict)]
    """Parts of a pod's spec, for example tolerations, volumes, imagePullSecrets, priorityClassName, serviceAccountName,
    runtimeClassName, hostNetwork. Objects are merged field by field, lists of named things by name, other lists are
    replaced; to the tolerations one for the taint named like devices.resourceName is added. An entry of containers called `pytorch` is merged into the worker's container (env, volumeMounts,
    resources)."""


class WorkerSpec(Section):
    """The pods that measure and train."""

    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The worker's image. Absent: the one that the operator was installed with."""
    pod_template: PodTemplate = PodTemplate()
    """What is merged into every worker pod."""


class TrainingPlanSpec(Section):
    """The question: this model, trained like this, on these devices: which plan is fastest?"""

    model: Annotated[ModelSpec, Field(json_schema_extra=immutable("model"))]
    """The model to train: exactly one family."""
    training: Annotated[TrainingSpec, Field(json_schema_extra=immutable("training"))]
    """How the model is trained."""
    devices: Annotated[DevicesSpec, Field(json_schema_extra=immutable("devices"))] = DevicesSpec()
    """Which devices may be used. Default: every nvidia.com/gpu."""
    search: Annotated[SearchSpec, Field(json_schema_extra=immutable("search"))] = SearchSpec()
    """How candidates are found."""
    links: LinksSpec = LinksSpec()
    """Measuring latency and bandwidth between nodes and within them."""
    profiling: ProfilingSpec = ProfilingSpec()
    """Measuring the layers on each accelerator."""
    trials: TrialsSpec = TrialsSpec()
    """Measuring the best candidates for real."""
    worker: WorkerSpec = WorkerSpec()
    """The pods that measure and train."""
    suspend: bool = False
    """Stop all work and free the devices; what was measured is kept, and false goes on from there."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Delete the TrainingPlan, with all it owns, so many seconds after it succeeded or failed. Absent: keep it."""
