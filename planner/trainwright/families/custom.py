"""User's own model, whose sizes are counted from the model itself, not by a formula."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from trainwright.bounds import OMITTED_DEFAULT, OMITTED_ONE
from trainwright.families.fields import LARGEST_SIZE, MAX_LAYERS, Bounds, Doc, FieldRule, Length, check
from trainwright.layer import NO_TRAFFIC, Attention, LayerKind, LayerList, Operator, OperatorKind, Segment, Traffic

_Name = Annotated[str, Length(1, 64)]
_Count = Annotated[float, Bounds(0, 1e18, limit=LARGEST_SIZE)]
_Size = Annotated[int, Bounds(0, 10**15, limit=LARGEST_SIZE)]
_Kernels = Annotated[int, Bounds(0, 10**9, limit=LARGEST_SIZE)]
_Positive = Annotated[float, Bounds(1, 1e18, limit=LARGEST_SIZE)]
ProductName = Literal["matmul", "batched_matmul", "convolution", "attention"]
MAX_PRODUCTS: Final = 8
"""Maximum number of shapes of a kind's products."""
_ROUNDED: Final = 1e-6
"""Share of FLOPs that is lost where products' figures are rounded."""
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class CustomProduct:
    """Product that a layer's forward computes, once or several times in the same shape."""

    product: Annotated[
        ProductName,
        Doc(
            "With a matrix that is the same for all rows, of two that each row has, a convolution, or fused attention."
        ),
    ]
    positions_per_row: Annotated[
        int, Bounds(1, 10**15, limit=LARGEST_SIZE), Doc("Rows of the first matrix: tokens, pixels, queries.")
    ]
    forward_flops_per_row: Annotated[_Positive, Doc("FLOPs of one call, 2 for each multiply-add.")]
    input_elements_per_row: Annotated[_Positive, Doc("Values that one call reads, a matrix for all rows aside.")]
    output_elements_per_row: Annotated[_Positive, Doc("Values that one call writes.")]
    calls: Annotated[int, Bounds(1, 10**9, limit=LARGEST_SIZE), Doc("Calls in one forward."), OMITTED_ONE] = 1
    is_causal: Annotated[bool, Doc("Whether a mask of the attention hides later positions."), OMITTED_DEFAULT] = False

    def __post_init__(self) -> None:
        check(self, lambda name: f"custom.kinds: {name} of a product")

    def operator(self) -> Operator:
        return Operator(
            name=self.product,
            kind=OperatorKind(self.product),
            forward_flops_per_row=self.calls * self.forward_flops_per_row,
            input_elements_per_row=self.calls * self.input_elements_per_row,
            output_elements_per_row=self.calls * self.output_elements_per_row,
            positions_per_row=self.positions_per_row,
            is_causal=self.is_causal,
            calls=self.calls,
        )


@dataclass(frozen=True, slots=True)
class CustomKind:
    """Sizes of a user model's uniform layers."""

    name: Annotated[_Name, Doc("Name of the kind, unique in the model.")]
    parameters: Annotated[_Size, Doc("Values of one layer's weights, frozen ones included.")]
    forward_flops_per_row: Annotated[_Count, Doc("FLOPs of its products, 2 for each multiply-add.")]
    output_elements_per_row: Annotated[
        int,
        Bounds(1, 10**15, limit=LARGEST_SIZE),
        Doc("Values of the tensors that it hands on, integers aside; 1 behind the last layer."),
    ]
    saved_elements_per_row: Annotated[
        _Count, Doc("Values of the number format that its forward keeps for its backward, its input included.")
    ]
    saved_bytes_per_row: Annotated[_Count, Doc("Bytes that it keeps in other formats (indices, masks).")] = 0.0
    half_saved_bytes_per_row: Annotated[
        _Count,
        Doc("Bytes that it keeps in half formats, where some values stay float32; 0: all of its values take 2 bytes."),
        OMITTED_DEFAULT,
    ] = 0.0
    passed_elements_per_row: Annotated[
        _Count,
        Doc(
            "Floats that it hands on as it takes them, such as skips, which the layer that uses them last keeps instead."
        ),
        OMITTED_DEFAULT,
    ] = 0.0
    workspace_bytes_per_row: Annotated[
        _Count,
        Doc("Bytes that its forward and backward take for a moment, in float32, besides what it keeps."),
        OMITTED_DEFAULT,
    ] = 0.0
    buffer_bytes: Annotated[_Size, Doc("Bytes of its buffers."), OMITTED_DEFAULT] = 0
    changed_buffer_bytes: Annotated[
        _Size,
        Doc(
            "Bytes of the buffers that its forward changes: recompute keeps their values for each micro-batch in flight."
        ),
        OMITTED_DEFAULT,
    ] = 0

    forward_kernels: Annotated[_Kernels, Doc("Operators of torch that its forward issues."), OMITTED_DEFAULT] = 0
    backward_kernels: Annotated[_Kernels, Doc("Operators of torch that its backward issues."), OMITTED_DEFAULT] = 0
    forward_moved_elements_per_row: Annotated[
        _Count,
        Doc("Values of the number format that its forward's operators besides products read and write."),
        OMITTED_DEFAULT,
    ] = 0.0
    forward_moved_bytes_per_row: Annotated[
        _Count,
        Doc("Bytes in other formats that its forward's operators besides products read and write."),
        OMITTED_DEFAULT,
    ] = 0.0
    backward_moved_elements_per_row: Annotated[
        _Count,
        Doc("Values of the number format that its backward's operators besides products read and write."),
        OMITTED_DEFAULT,
    ] = 0.0
    backward_moved_bytes_per_row: Annotated[
        _Count,
        Doc("Bytes in other formats that its backward's operators besides products read and write."),
        OMITTED_DEFAULT,
    ] = 0.0
    output_bytes_per_row: Annotated[
        _Size,
        Doc("Bytes of the integers that it hands on (indices, masks)."),
        OMITTED_DEFAULT,
    ] = 0
    frozen_parameters: Annotated[
        _Size,
        Doc("Values of its weights that are not trained (requires_grad_(False))."),
        OMITTED_DEFAULT,
    ] = 0
    without_backward: Annotated[
        bool,
        Doc("Whether it and all layers before it are frozen, so that no backward is computed."),
        OMITTED_DEFAULT,
    ] = False

    output_float32_elements_per_row: Annotated[
        _Size,
        Doc("Those of the values that it hands on which are float32 in half formats, too."),
        OMITTED_DEFAULT,
    ] = 0
    shared_weight: Annotated[
        str | None,
        Length(1, 256),
        Doc("Weight, by its name in checkpoints, that layers of this name share, such as tied embeddings."),
        OMITTED_DEFAULT,
    ] = None
    shared_parameters: Annotated[
        _Size,
        Doc("Values of that weight, which its layers' parameters include."),
        OMITTED_DEFAULT,
    ] = 0
    products: Annotated[
        tuple[Annotated[CustomProduct, Doc("Products of one shape.")], ...],
        Length(0, MAX_PRODUCTS),
        Doc("Its forward's products by shape, the largest first; absent: one square product takes all FLOPs."),
        OMITTED_DEFAULT,
    ] = ()

    def __post_init__(self) -> None:
        check(self, lambda name: f"custom.kinds: {name} of {self.name}")
        if self.shared_parameters > self.parameters or (self.shared_weight is None) != (self.shared_parameters == 0):
            raise ValueError(
                f"custom.kinds: shared_parameters of {self.name} must be those of shared_weight, and at most its parameters "
                f"({self.parameters}), got {self.shared_parameters}; describe the model again"
            )
        if self.frozen_parameters > self.parameters - self.shared_parameters:
            raise ValueError(
                f"custom.kinds: frozen_parameters of {self.name} must be among its {self.parameters - self.shared_parameters} "
                f"values that it does not share, got {self.frozen_parameters}; describe the model again"
            )

    @property
    def _traffic(self) -> Traffic | None:
        """Traffic of the operators besides products; None if it was not counted."""
        traffic = Traffic(
            self.forward_moved_elements_per_row,
            self.forward_moved_bytes_per_row,
            self.backward_moved_elements_per_row,
            self.backward_moved_bytes_per_row,
        )
        return traffic if traffic != NO_TRAFFIC else None

    def layer_kind(self) -> LayerKind:
        """Return the kind as its products, and one operator that holds the weights and moves what others do.

        Measured profiles need no more. Estimates from data sheets assume a square product for FLOPs whose shapes were not
        counted, and where no traffic was counted that the other operators read and write what the layer saves.
        """
        kept = self.saved_elements_per_row
        operators = [product.operator() for product in self.products]
        flops = self.forward_flops_per_row - sum(operator.forward_flops_per_row for operator in operators)
        in_product = 0 if operators or flops <= 0 else self.parameters
        if flops > _ROUNDED * self.forward_flops_per_row:
            positions = max(round(flops / 2 / max(self.parameters, 1)), 1)
            width = max(math.isqrt(self.parameters), 1)
            operators.append(
                Operator(
                    name="products",
                    kind=OperatorKind.CONVOLUTION,
                    forward_flops_per_row=flops,
                    input_elements_per_row=positions * width,
                    output_elements_per_row=positions * width,
                    positions_per_row=positions,
                    weight_elements=in_product,
                )
            )
        operators.append(
            Operator(
                name="element_wise",
                kind=OperatorKind.ELEMENT_WISE,
                forward_flops_per_row=0.0,
                input_elements_per_row=kept,
                output_elements_per_row=kept,
                weight_elements=self.parameters - in_product,
                saved_elements_per_row=kept,
                saved_bytes_per_row=self.saved_bytes_per_row,
                half_saved_bytes_per_row=self.half_saved_bytes_per_row,
                traffic=self._traffic,
            )
        )
        return LayerKind(
            self.name,
            (Segment(tuple(operators)),),
            self.output_elements_per_row,
            shared_weight=self.shared_weight,
            shared_parameters=self.shared_parameters,
            passed_elements_per_row=self.passed_elements_per_row,
            workspace_bytes_per_row=self.workspace_bytes_per_row,
            buffer_bytes=self.buffer_bytes,
            changed_buffer_bytes=self.changed_buffer_bytes,
            forward_kernels=self.forward_kernels,
            backward_kernels=self.backward_kernels,
            output_bytes_per_row=self.output_bytes_per_row,
            output_float32_elements_per_row=self.output_float32_elements_per_row,
            frozen_parameters=self.frozen_parameters,
            without_backward=self.without_backward,
        )


_Sentence = Annotated[str, Length(1, 1024)]


@dataclass(frozen=True, slots=True)
class CustomChecks:
    """Findings of the description when it ran the model's layers in every number format and on a few rows."""

    left_out: Annotated[
        tuple[Annotated[_Sentence, Doc("A part that was not checked, and why.")], ...],
        Length(0, 1026),
        Doc("What was not checked, and why."),
        OMITTED_DEFAULT,
    ] = ()
    remarks: Annotated[
        tuple[Annotated[_Sentence, Doc("A remark.")], ...],
        Length(0, 1026),
        Doc("What differs a little, such as whole numbers that half formats round."),
        OMITTED_DEFAULT,
    ] = ()
    zero_loss: Annotated[
        bool,
        Doc(
            "Whether the rows that were computed have losses of exactly 0, so that a trial may have such a first loss."
        ),
        OMITTED_DEFAULT,
    ] = False
    unchecked_kinds: Annotated[
        tuple[_Name, ...],
        Length(0, 256),
        Doc("Kinds of layers whose values were left out, which the gangs that profile them check before."),
        OMITTED_DEFAULT,
    ] = ()

    def __post_init__(self) -> None:
        check(self, lambda name: f"custom.checks: {name}")


@dataclass(frozen=True, slots=True)
class Custom:
    """User's own model, as `python -m trainwright_worker.describe` reports it; no tensor degree splits its layers."""

    entrypoint: Annotated[
        str,
        Length(3, 256),
        Doc(
            "The function, written package.module:function, that makes the model's layers. What python -m "
            "trainwright_worker.describe --training-plan ENTRYPOINT writes belongs here whole."
        ),
    ]
    kinds: Annotated[
        tuple[
            Annotated[
                CustomKind,
                Doc("What layers of the user's own model that are alike hold, compute, keep and hand on."),
            ],
            ...,
        ],
        Length(1, 256),
        Doc("Kinds of layers, each once."),
    ]
    layers: Annotated[
        tuple[_Name, ...],
        Length(1, 1026, limit=MAX_LAYERS, words="name {} layers"),
        Doc("The kind's name of every layer, in order."),
    ]
    min_rows: Annotated[
        int,
        Bounds(1, 1_000_000),
        Doc("Rows that one replica computes at once at least, such as those that batch normalisation needs."),
        OMITTED_ONE,
    ] = 1
    whole_batch: Annotated[
        bool,
        Doc(
            "Whether one replica computes the whole batch at once, as a loss over all rows needs: one pipeline, one micro-batch."
        ),
        OMITTED_DEFAULT,
    ] = False
    keep_float32: Annotated[
        tuple[Annotated[str, Length(1, 256), Doc("Name of a field.")], ...],
        Length(0, 256),
        Doc("Fields of the rows that stay float32 in half formats, such as times that these would round."),
        OMITTED_DEFAULT,
    ] = ()
    checks: Annotated[
        CustomChecks | None,
        Doc("What the description checked; absent where an older one, or a hand, wrote it."),
        OMITTED_DEFAULT,
    ] = None
    family: Annotated[Literal["custom"], Doc("A model of your own.")] = "custom"
    rules: ClassVar[tuple[FieldRule[Custom], ...]] = (
        FieldRule(
            "self.entrypoint.matches('^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$')",
            lambda custom: _ENTRYPOINT.fullmatch(custom.entrypoint) is not None,
            "entrypoint must be written package.module:function, for example models.resnet:resnet18",
            lambda custom: f"custom.entrypoint must be written package.module:function, got {custom.entrypoint!r}",
        ),
    )

    def __post_init__(self) -> None:
        check(self)
        names = [kind.name for kind in self.kinds]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"custom.kinds gives {twice} twice; name each kind once")
        if unknown := set(self.layers) - set(names):
            raise ValueError(
                f"custom.layers names {min(unknown)}, which custom.kinds does not give; describe the model again"
            )
        sizes = {(kind.shared_weight, kind.shared_parameters) for kind in self.kinds if kind.shared_weight is not None}
        if len(sizes) > len({name for name, _ in sizes}):
            raise ValueError("custom.kinds gives a shared_weight in two sizes; describe the model again")
        if self.checks is not None and (unknown := set(self.checks.unchecked_kinds) - set(names)):
            raise ValueError(
                f"custom.checks.unchecked_kinds names {min(unknown)}, which custom.kinds does not give; describe the model again"
            )
        if unused := set(names) - set(self.layers):
            raise ValueError(
                f"custom.kinds gives {min(unused)}, but no layer is of that kind; describe the model again"
            )

    @property
    def kinds_to_check(self) -> frozenset[str]:
        """Kinds of layers whose values the description did not check, all of them without checks."""
        if self.checks is not None:
            return frozenset(self.checks.unchecked_kinds)
        return frozenset(kind.name for kind in self.kinds)

    @property
    def unchecked(self) -> str:
        """Sentence on what was not checked for what plans would change; empty if the description checked all values."""
        if self.checks is None:
            return (
                f"the description of {self.entrypoint} was not checked, so plans may train another model than this one; "
                f"describe it again with python -m trainwright_worker.describe {self.entrypoint}"
            )
        if not self.checks.unchecked_kinds:
            return ""
        first, *others = self.checks.unchecked_kinds
        more = f" and of {len(others)} more kinds of layers" if others else ""
        return (
            f"the description of {self.entrypoint} left out the values of {first}{more}, which profiling checks first"
        )

    def stack(self, attention: Attention) -> LayerList:  # noqa: ARG002 - what it keeps was counted
        return LayerList(tuple(kind.layer_kind() for kind in self.kinds), self.layers, 1)
