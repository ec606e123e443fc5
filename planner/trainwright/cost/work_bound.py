"""Work bound: lower bound on every plan's iteration, in which all devices compute all the time and nothing else takes time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from trainwright.cost.context import CostContext
from trainwright.cost.divided_activations import least_seconds_ratio
from trainwright.cost.layer_sums import Array
from trainwright.layer import LayerKind, TensorSplit

_ROUNDING = 1e-9
"""Share by which the bound is lowered, since bound and estimate add up the same seconds in different orders."""


def work_bound_seconds(context: CostContext, nodes: Iterable[str], global_batch_size: int) -> float:
    """Return seconds that no plan on these nodes can undercut in one iteration.

    Rows of every layer kind are split over accelerators, in fractions, so that all devices end together:

        minimise T subject to sum_a x[a, k] = B n_k and sum_k w[a, k] x[a, k] <= N_a T,

    with B rows, n_k layers of kind k, N_a devices of accelerator a, and w[a, k] device-seconds of one row of one such
    layer at the best number of rows and the best tensor degree. Messages, waiting, recompute, sharding and the optimizer
    take no time, and memory has no limit. The runtime's constant seconds per iteration are added.

    Raises ValueError if some layer kind has no profile on any device.
    """
    devices = Counter[str]()
    for name in nodes:
        node = context.cluster.node(name)
        devices[node.accelerator] += node.devices
    layers = Counter(context.model.layers)
    kinds = [kind for kind in context.model.kinds if layers[kind.name]]
    work = np.array(
        [
            [
                layers[kind.name] * global_batch_size * _row_seconds(context, name, kind, global_batch_size)
                for kind in kinds
            ]
            for name in devices
        ]
    )
    seconds = balanced_seconds(work, np.array(list(devices.values()), dtype=np.float64))
    return (seconds + context.runtime.constant_seconds) * (1 - _ROUNDING)


def _row_seconds(context: CostContext, accelerator: str, kind: LayerKind, max_rows: int) -> float:
    """Return w[a, k]: minimum device-seconds of one row of one layer; infinite without a profile of the kind.

    A tensor group of degree t spends t times the seconds of a rank. Seconds are linear between profiled rows, so seconds per
    row are minimal at a profiled number of rows, at 1 or at the batch. Forward and backward are minimised separately, since
    either may be clamped to zero between profiled rows.
    """
    profiled = {
        layer.rows for layer in context.profiles.layers if layer.accelerator == accelerator and layer.rows <= max_rows
    }
    max_degree = context.model.max_tensor_degree
    least = np.inf
    for tensor in (degree for degree in range(1, max_degree + 1) if max_degree % degree == 0):
        if not context.is_tensor_sharded(kind, tensor):
            continue
        with suppress(ValueError):  # not profiled at this degree
            costs = [
                (rows, context.layer_cost(accelerator, kind, TensorSplit(tensor), rows))
                for rows in {1, *profiled, max_rows}
            ]
            forward = min(cost.forward_seconds / rows for rows, cost in costs)
            backward = min(cost.backward_seconds / rows for rows, cost in costs)
            ratio = least_seconds_ratio(context.model, kind, tensor, max_rows, context.divided_at(tensor).kind(kind))
            least = min(least, tensor * (forward + backward) * ratio)
    return least


def balanced_seconds(work: Array, devices: Array) -> float:
    """Return T for work[a, k], the device-seconds that accelerator a needs for all rows of kind k.

    Dual prices p >= 0 of the accelerators with sum_a N_a p_a = 1 bound T from below whatever the solver's precision:
    T >= sum_k min_a p_a work[a, k].
    """
    from scipy.optimize import linprog  # noqa: PLC0415 - slow to import, and few commands need it

    if not np.isfinite(work).any(axis=0).all():
        raise ValueError("a layer kind is not profiled on any device; profile it on the accelerators that are to train")
    cheapest = work.min(axis=0)
    scale = float(cheapest.sum() / devices.sum())
    if scale == 0:
        return 0.0
    accelerators, kinds = work.shape
    # Variables: share of each kind per accelerator, in the order of `work.flat`; last T, in units of `scale`.
    usable = np.isfinite(work)
    busy = np.zeros((accelerators, work.size + 1))
    whole = np.zeros((kinds, work.size + 1))
    for accelerator in range(accelerators):
        columns = slice(accelerator * kinds, (accelerator + 1) * kinds)
        busy[accelerator, columns] = np.where(usable, work, 0.0)[accelerator] / (devices[accelerator] * scale)
        whole[:, columns] = np.eye(kinds)
    busy[:, -1] = -1.0
    objective = np.append(np.zeros(work.size), 1.0)
    limits = [(0.0, 1.0 if is_usable else 0.0) for is_usable in usable.flat]
    solution = linprog(
        objective,
        A_ub=busy,
        b_ub=np.zeros(accelerators),
        A_eq=whole,
        b_eq=np.ones(kinds),
        bounds=[*limits, (0.0, None)],
    )
    if solution.x is None:
        raise RuntimeError(f"HiGHS did not solve a program that always has a solution: {solution.message}")
    prices = np.maximum(-solution.ineqlin.marginals, 0.0) / devices
    prices /= float(prices @ devices)
    priced = np.where(usable, prices[:, None] * np.where(usable, work, 0.0), np.inf)
    return float(priced.min(axis=0).sum())
