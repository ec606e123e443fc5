"""The layers of a model on one accelerator: what is to be measured of them, and what was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.model import Model
from trainwright.orders.gang import Gang
from trainwright.profiles import LayerProfile, LayerTooLarge


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
class ProfileReport:
    """The measured layers of one accelerator at one tensor degree.

    Attributes:
        out_of_memory: of each kind, the first number of rows that did not fit; larger ones were not tried.
    """

    layers: tuple[LayerProfile, ...]
    out_of_memory: tuple[LayerTooLarge, ...] = ()
    kind: Literal["profile"] = "profile"
