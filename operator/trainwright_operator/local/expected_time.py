"""Time that a plan will take on a CPU, told before anything starts, and a smaller model where that is long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from pydantic.alias_generators import to_camel

from trainwright.cluster import Node
from trainwright.families import Family
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import required_profiles
from trainwright.throughput import flops_per_row
from trainwright.worker_api import SERIES_ROUNDS
from trainwright_operator.api.spec import Baseline, TrainingPlanSpec
from trainwright_operator.flow.documents.number_formats import model_from_spec

LONG_SECONDS: Final = 600
"""Time from which a smaller model is offered."""
_SHORT_SECONDS: Final = 150
"""Time that the smaller model may take."""
_PRODUCT: Final = 512
"""Rows and columns of the matrices whose product is timed."""
_CODE: Final = f"""
import time, numpy
a = numpy.ones(({_PRODUCT}, {_PRODUCT}), numpy.float32)
a @ a
times = []
for _ in range(5):
    begin = time.perf_counter()
    a @ a
    times.append(time.perf_counter() - begin)
print(sorted(times)[2])
"""
_EFFICIENCY: Final = 0.4
"""Rate of a layer's passes over that of such a product: elementwise work and small products take the rest."""
_START_SECONDS: Final = 5.0
"""Start of a gang: imports of torch, rendezvous."""
_LINK_SECONDS: Final = 6.0
_SEARCH_SECONDS: Final = 8.0
_ROUND_SECONDS: Final = 1.0
"""Time that a profile is given; a slower layer takes its iterations."""
_HALVED: Final = ("layers", "sequence_length", "vocabulary_size", "hidden_size")
_LEAST: Final = {"layers": 4, "sequence_length": 128, "vocabulary_size": 1024, "hidden_size": 128}


def flops_per_second() -> float | None:
    """Return the rate of one thread in a float32 matrix product; None where it cannot be timed."""
    environment = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        shown = subprocess.run(
            [sys.executable, "-c", _CODE], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        return 2 * _PRODUCT**3 / float(shown.stdout)
    except (OSError, ValueError, subprocess.SubprocessError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """Time of a whole plan on CPU devices.

    Attributes:
        rate: FLOPs per second of one device.
    """

    spec: TrainingPlanSpec
    nodes: tuple[Node, ...]
    rate: float

    @property
    def seconds(self) -> float:
        return self.seconds_of(model_from_spec(self.spec, Dtype.FLOAT32))

    def seconds_of(self, model: Model) -> float:
        """Return the time for a model with the rest of the spec."""
        spec, rate = self.spec, self.rate * _EFFICIENCY
        batch, degree = spec.training.global_batch_size, spec.search.limits.max_tensor_degree
        runs = required_profiles(self.nodes, model, batch, degree)
        per_layer = flops_per_row(model) / rate / len(model.layers)
        iterations = spec.profiling.warmup_iterations + spec.profiling.iterations
        profiles = sum(
            len(model.kinds) * max(_ROUND_SECONDS, iterations * per_layer * rows / run.tensor_degree)
            for run in runs
            for rows in run.rows
        )
        trials = spec.trials.top_k + 2 * (spec.trials.baseline is Baseline.MEGATRON and spec.trials.top_k > 0)
        iteration = flops_per_row(model) * batch / rate / sum(node.devices for node in self.nodes)
        measured = trials * iteration * (spec.trials.iterations + SERIES_ROUNDS * spec.trials.warmup_iterations)
        gangs = 1 + len(runs) + (trials > 0)
        return gangs * _START_SECONDS + _LINK_SECONDS + _SEARCH_SECONDS + profiles + measured

    def find_smaller(self) -> tuple[dict[str, Any], float] | None:
        """Return the fields of a model of the same family that takes minutes, with its time; None if there is none."""
        family = model_from_spec(self.spec, Dtype.FLOAT32).family
        for smaller in _smaller(family):
            seconds = self.seconds_of(Model.of(smaller, Dtype.FLOAT32))
            if seconds <= _SHORT_SECONDS:
                return {to_camel(name): getattr(smaller, name) for name in self._stated_fields()}, seconds
        return None

    def _stated_fields(self) -> list[str]:
        model = self.spec.model
        (stated,) = (value for name in type(model).model_fields if (value := getattr(model, name)) is not None)
        return [name for name in type(stated).model_fields if name in stated.model_fields_set]


def _smaller(family: Family) -> Iterator[Family]:
    """Yield the family with fewer layers, then shorter sequences, fewer words and narrower layers, each halved down to a least."""
    names = {field.name for field in fields(family)}
    for name in _HALVED:
        while name in names and getattr(family, name) > _LEAST[name]:
            halved: dict[str, int] = {name: max(getattr(family, name) // 2, _LEAST[name])}
            if name == "hidden_size":  # as wide heads as before
                halved["heads"] = max(getattr(family, "heads", 2) // 2, 1)
            try:
                family = replace(cast("Any", family), **halved)
            except (TypeError, ValueError):  # it has no such field, or sizes that do not go together
                break
            yield family
