"""Behaviour of the training runtime that a plan does not state: facts, and ratios that calibration fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field

from trainwright.bounds import OMITTED_DEFAULT, OMITTED_NONE, OMITTED_ONE
from trainwright.document_kind import document
from trainwright.layer import Dtype


@dataclass(frozen=True, slots=True)
class ComputeRatio:
    """Ratio of measured to profiled compute seconds of one accelerator."""

    accelerator: str
    ratio: float

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ValueError(f"the compute ratio of {self.accelerator} must be above 0, got {self.ratio}")


@dataclass(frozen=True, slots=True)
class CollectiveRatios:
    """Ratios of measured collectives over several nodes to undisturbed rings, or messages, on their links; at least 1.

    Within a node little is lost. A library may move more than a ring does: PyTorch's gloo reduces everything where each
    rank needs only its shard.

    Attributes:
        all_to_all: None where it was not measured: that of all-gathers then stands for it.
    """

    all_reduce: float = 1.0
    all_gather: float = 1.0
    reduce_scatter: float = 1.0
    all_to_all: Annotated[float | None, OMITTED_NONE] = None

    def __post_init__(self) -> None:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            ratio = getattr(self, name)
            if ratio is not None and ratio < 1:
                raise ValueError(f"the ratio of {name} must be at least 1, got {ratio}")

    @property
    def exchange(self) -> float:
        """Ratio of all-to-alls."""
        return self.all_gather if self.all_to_all is None else self.all_to_all


IDEAL_RINGS = CollectiveRatios()


@dataclass(frozen=True, slots=True)
class ProcessBytes:
    """Bytes that a process holds on a device of one accelerator besides its tensors: context, libraries, kernels."""

    accelerator: str
    held_bytes: int

    def __post_init__(self) -> None:
        if self.held_bytes < 0:
            raise ValueError(f"held_bytes of {self.accelerator} must be at least 0, got {self.held_bytes}")


PRIOR_TRIALS: Final = 2
"""Own trials that weigh as much as what published runs say of errors (docs/accuracy.md)."""


@dataclass(frozen=True, slots=True)
class OwnTrials:
    """Measured trials of a user to which calibration fitted the seconds, or the memory, of a runtime.

    Attributes:
        count: plans that were tried.
        error_ratio: root mean square of the logarithms of measured over predicted figures, each trial predicted by the fit to
            the others; None for a single plan, which cannot say.
    """

    count: int
    error_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count of own_trials must be at least 1, got {self.count}; leave own_trials out instead")
        if self.error_ratio is not None and self.error_ratio < 0:
            raise ValueError(f"error_ratio of own_trials must be at least 0, got {self.error_ratio}")

    def remaining_variance(self, published: float) -> float:
        """Return the variance of errors of one user, given that of published runs, which counts as PRIOR_TRIALS trials.

        The squared errors are of predictions by the other trials, whose mean errs, too: by 1 / (count - 1) of the variance.
        """
        if self.error_ratio is None:
            return published
        own = self.error_ratio**2 * (self.count - 1) / self.count
        return (PRIOR_TRIALS * published + self.count * own) / (PRIOR_TRIALS + self.count)


class Kernels(StrEnum):
    """Kernels of operators other than matrix products: PyTorch's, a framework's fused ones, or those of a compiler."""

    EAGER = "eager"
    FUSED = "fused"
    COMPILED = "compiled"


class AttentionLibrary(StrEnum):
    """Origin of attention: PyTorch's kernels, the first FlashAttention, or cuDNN (as Transformer Engine uses it).

    STORED: no library; products and a softmax of their own write the scores to memory, on every accelerator.
    """

    PYTORCH = "pytorch"
    FLASH_ATTENTION_1 = "flash_attention_1"
    CUDNN = "cudnn"
    STORED = "stored"


class Messages(StrEnum):
    """Messages in which replicas reduce gradients and gather updated weights: one a tensor, one a bucket, or as few as can be.

    ALL: one for all layers with the same owners, and one a layer during the backward.
    """

    TENSOR = "tensor"
    BUCKET = "bucket"
    ALL = "all"


class SelectiveRecompute(StrEnum):
    """Operators that every layer computes again in its backward: attention's own, or all but costly ones (torchtitan's `op`)."""

    ATTENTION = "attention"
    OPERATORS = "operators"


def _check_named_once(field: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"{field} name an accelerator twice: {', '.join(names)}")


_ABOVE_ZERO: Final = ("row_growth_ratio", "link_ratio", "activation_ratio", "inside_link_ratio", "product_ratio")
_NOT_BELOW_ZERO: Final = (
    "constant_seconds",
    "constant_bytes",
    "copied_bytes_per_parameter",
    "host_seconds_per_operator",
    "bucket_bytes",
    "update_bytes_per_parameter",
    "update_calls_per_tensor",
)
_OMITTED_ALL: Final[Any] = Field(exclude_if=lambda value: value == Messages.ALL)


@document("Runtime")
@dataclass(frozen=True)
class Runtime:
    """Facts and ratios that hold for every plan run by one runtime on one cluster.

    Attributes:
        compute_ratios: by accelerator; 1 for those not named.
        row_growth_ratio: achieved over profiled growth of compute seconds with the rows beyond the first: a layer takes
            compute_ratio × (profile(1) + row_growth_ratio × (profile(rows) - profile(1))). It corrects profiles whose
            growth with the micro-batch was derived from a data sheet.
        link_ratio: achieved over stated bandwidth of every link between nodes.
        inside_link_ratio: of links inside nodes; None: as link_ratio.
        collective_ratios: of collectives, on top of their links' times.
        overlaps_gradients: replicas reduce each layer's gradients during the last backward even without sharding and
            under zero1, as PyTorch's DDP does. (Under zero2 and zero3 they always do.)
        overlap_slowdown_ratio: slowdown of compute and communication while both run (Galvatron: 1.3).
        constant_seconds: of every iteration, for any plan.
        constant_bytes: on every device, for any plan (communication buffers, fragmentation), besides process_bytes.
        process_bytes: by accelerator, as measured with the profiles; 0 for those not named.
        fragmented_ratio: share of every device's memory that the allocator holds besides a plan's tensors, in pieces that fit
            none; plans leave it free where no head-room is given.
        activation_ratio: actual over profiled activation bytes.
        copied_bytes_per_parameter: for each parameter of a rank, sharded or not, besides its weight, gradient and optimizer
            state: flat buffers and copies of the framework.
        gradient_dtype: number format in which gradients are stored and reduced, regardless of the weights' (Megatron
            and torchtitan: float32); None: that of the weights (DeepSpeed).
        splits_boundaries: where a boundary crosses between nodes, each rank of a tensor group is sent a slice of it and
            the ranks on a node all-gather it (Megatron's scatter and gather), instead of a full copy for every rank. It is
            not about boundaries that stay divided along the sequence, of which each rank sends its slice.
        reduces_every_micro_batch: under zero2 and zero3 replicas reduce gradients in the backward of every micro-batch and
            keep their shard (FSDP without `no_sync`), instead of whole gradients until the last one.
        syncs_every_micro_batch: replicas of a pipeline of one stage reduce gradients in the backward of every micro-batch, sharded
            or not, and under zero2 gather weights in its forward (FSDP2 and DDP without `no_sync`).
        kernels: of operators other than matrix products, where profiles are estimated from data sheets.
        attention_library: of fused attention, where profiles are estimated from data sheets; accelerators and number formats
            for which it has no kernel store the scores.
        host_seconds_per_operator: of the process to issue the forward of one operator, where profiles are estimated from
            data sheets. The default is what eager blocks took beside an H200 (60 µs) and an H100 (55 to 65 µs).
        fuses_loss: one kernel computes the loss from logits in the model's number format, another their gradient; no copy
            of them is in float32.
        overlaps_tensor_sync: tensor groups communicate piece by piece while the products around it compute (torch's
            asynchronous tensor parallelism, Megatron's `--tp-comm-overlap`).
        virtual_stages: chunks of layers that each rank of a pipeline holds (Megatron's interleaved schedule); 1: a stage.
            Only where the stages divide the micro-batches and have as many layers each; other pipelines are plain.
        selective_recompute: what layers that are not recomputed compute again nevertheless, where profiles are estimated.
        hides_transfers: stages compute while boundaries are sent, as our worker does. Megatron and DeepSpeed send
            between computations: a message begins when sender and receiver are both free, and occupies both.
        sequence_parallel: plans that searches make divide activations along the sequence wherever a tensor degree divides all
            sequences (Korthikanti et al. 2022), unless that is slower. A plan that is given states it itself.
        keeps_gathered_weights: under zero3 searches keep gathered weights for later passes where memory allows and that is faster;
            zero1 and zero2 become zero3 for it.
        gathers_inputs_again: under sequence parallelism ranks save their slices of the inputs of products and gather them again in
            the backward while its products compute (Megatron), instead of saving whole inputs.
        messages: in which replicas reduce gradients and gather weights that they updated in shards. Each takes the latency of
            the whole ring, which on many ranks exceeds the transfer of a tensor.
        bucket_bytes: of a message where `messages` is bucket.
        gathers_by_module: under zero3 a layer's weights are gathered product by product (DeepSpeed), not at once.
        overlaps_weight_gathers: weights that zero1 and zero2 updated in shards are gathered during the next iteration's first
            forward (Megatron's `--overlap-param-gather`).
        product_ratio: achieved rate of products on tensor (matrix) cores over the best case of the data sheets' efficiencies,
            where profiles are estimated from them.
        update_bytes_per_parameter: memory traffic of the optimizer's step, where profiles are estimated: of casts, unscaling,
            clipping and copies, too; 0: a fused step's.
        update_calls_per_tensor: kernels that the host issues for each tensor in the optimizer's step, each in a third of
            host_seconds_per_operator, where profiles are estimated; 0: one kernel updates many tensors.
        trainer: name of the trainer whose runtime it is: the command line then proposes plans that it supports; None: any plan.
        own_trials: to which calibration fitted its seconds; None: none, or by a release that did not write them.
        own_memory_trials: likewise its memory.
    """

    compute_ratios: tuple[ComputeRatio, ...] = ()
    row_growth_ratio: float = 1.0
    link_ratio: float = 1.0
    collective_ratios: CollectiveRatios = IDEAL_RINGS
    overlaps_gradients: bool = True
    overlap_slowdown_ratio: float = 1.3
    constant_seconds: float = 0.0
    constant_bytes: int = 0
    activation_ratio: float = 1.0
    gradient_dtype: Dtype | None = Dtype.FLOAT32
    splits_boundaries: bool = True
    process_bytes: tuple[ProcessBytes, ...] = ()
    reduces_every_micro_batch: bool = False
    kernels: Kernels = Kernels.EAGER
    attention_library: AttentionLibrary = AttentionLibrary.PYTORCH
    fuses_loss: bool = False
    overlaps_tensor_sync: bool = False
    virtual_stages: int = 1
    selective_recompute: SelectiveRecompute | None = None
    hides_transfers: bool = True
    copied_bytes_per_parameter: float = 0.0
    inside_link_ratio: float | None = None
    host_seconds_per_operator: float = 60e-6
    sequence_parallel: bool = True
    keeps_gathered_weights: bool = True
    gathers_inputs_again: bool = False
    syncs_every_micro_batch: bool = False
    trainer: Annotated[str | None, OMITTED_DEFAULT] = None
    fragmented_ratio: Annotated[float, OMITTED_DEFAULT] = 0.0
    messages: Annotated[Messages, _OMITTED_ALL] = Messages.ALL
    bucket_bytes: Annotated[int, OMITTED_DEFAULT] = 0
    gathers_by_module: Annotated[bool, OMITTED_DEFAULT] = False
    overlaps_weight_gathers: Annotated[bool, OMITTED_DEFAULT] = False
    product_ratio: Annotated[float, OMITTED_ONE] = 1.0
    update_bytes_per_parameter: Annotated[float, OMITTED_DEFAULT] = 0.0
    update_calls_per_tensor: Annotated[int, OMITTED_DEFAULT] = 0
    own_trials: Annotated[OwnTrials | None, OMITTED_NONE] = None
    own_memory_trials: Annotated[OwnTrials | None, OMITTED_NONE] = None

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            ratio = getattr(self, name)
            if ratio is not None and ratio <= 0:
                raise ValueError(f"{name} must be above 0, got {ratio}")
        for name in _NOT_BELOW_ZERO:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.overlap_slowdown_ratio < 1:
            raise ValueError(f"overlap_slowdown_ratio must be at least 1, got {self.overlap_slowdown_ratio}")
        if self.virtual_stages < 1:
            raise ValueError(f"virtual_stages must be at least 1, got {self.virtual_stages}; 1 is a plain pipeline")
        if self.messages is Messages.BUCKET and not self.bucket_bytes:
            raise ValueError(
                "bucket_bytes must be given where messages is bucket; PyTorch's default is 25 MiB, 26214400"
            )
        if not 0 <= self.fragmented_ratio < 1:
            raise ValueError(f"fragmented_ratio must be at least 0 and below 1, got {self.fragmented_ratio}")
        _check_named_once("compute_ratios", [entry.accelerator for entry in self.compute_ratios])
        _check_named_once("process_bytes", [entry.accelerator for entry in self.process_bytes])

    @property
    def inside_ratio(self) -> float:
        """Return achieved over stated bandwidth of links inside nodes."""
        return self.link_ratio if self.inside_link_ratio is None else self.inside_link_ratio

    def chunks_of(self, micro_batches: int, layer_counts: Sequence[int]) -> int:
        """Return the chunks of layers that each rank of a pipeline holds, given the number of layers of its stages.

        Megatron interleaves several stages, each of as many layers as chunks, and only if they divide the micro-batches.
        """
        stages = len(layer_counts)
        interleaves = stages > 1 and micro_batches % stages == 0 and min(layer_counts) >= self.virtual_stages
        return self.virtual_stages if interleaves else 1

    def compute_ratio(self, accelerator: str) -> float:
        """Return measured over profiled compute seconds; 1 if the accelerator is not named."""
        return next((ratio.ratio for ratio in self.compute_ratios if ratio.accelerator == accelerator), 1.0)

    def constant_bytes_of(self, *accelerators: str) -> int:
        """Return the bytes that any plan takes on a device, the most over the accelerators."""
        sizes = (
            process_bytes.held_bytes
            for process_bytes in self.process_bytes
            if process_bytes.accelerator in accelerators
        )
        return self.constant_bytes + max(sizes, default=0)
