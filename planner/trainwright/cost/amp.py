"""AMP's own cost model (Eq. 3–5), for faithful reproduction and for its layer assignment. No bound in either direction.

A layer's time at a tensor degree is what AMP profiles: computation and tensor all-reduces. Here the profile holds the
computation alone, so that the all-reduces (Eq. 3, with the latency of their steps) are added for the group's own links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.links import Links, links_of
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage


def all_reduce_seconds(members: int, message_bytes: float, bandwidth: float) -> float:
    """Eq. 3: 2(n - 1) M / (n B), B the lowest bandwidth between any two members (B')."""
    return 2 * (members - 1) * message_bytes / (members * bandwidth)


def tensor_sync_seconds(  # noqa: PLR0913 - what Eq. 3 is made of
    kind: LayerKind, tensor: int, rows: int, *, bandwidth: float, latency: float, setting: Setting
) -> float:
    """The tensor all-reduces of one forward and one backward of a layer (Eq. 3, and the latency of their steps)."""
    if tensor == 1 or not kind.is_tensor_parallel:
        return 0.0
    elements = [
        number
        for segment in kind.segments
        for number in (segment.forward_all_reduce_elements_per_row, segment.backward_all_reduce_elements_per_row)
        if number
    ]
    message = rows * sum(elements) * setting.model.dtype.num_bytes
    steps = 2 * (tensor - 1) * len(elements)
    return steps * latency + all_reduce_seconds(tensor, message, bandwidth * setting.runtime.link_ratio)


def layer_seconds(accelerators: Sequence[str], kind: LayerKind, tensor: int, rows: int, setting: Setting) -> float:
    """Computation of t_layer, forward and backward, where devices of several accelerators wait for each other."""
    costs = [setting.layer_cost(name, kind, tensor, rows) for name in accelerators]
    return max(cost.forward_seconds for cost in costs) + max(cost.backward_seconds for cost in costs)


def estimate_seconds(plan: Plan, setting: Setting) -> float:
    """T of Eq. 4: the slowest pipeline (Eq. 5) plus the slowest device's gradient synchronisation (Eq. 3).

    A stage's time is that of its slowest replica, so that one pipeline stands for all of them. Raises ValueError for
    plans that the paper's model does not know.
    """
    pipeline = _only_pipeline(plan, setting)
    scene = _Scene(setting)
    times = [scene.stage_seconds(stage) for stage in pipeline.stages]
    exchanges = [scene.exchange_seconds(pipeline, number) for number in range(len(pipeline.stages) - 1)]
    pipeline_seconds = (pipeline.micro_batches - 1) * max(times) + sum(exchanges) + sum(times)
    return pipeline_seconds + max(scene.sync_seconds(stage) for stage in pipeline.stages)


def _only_pipeline(plan: Plan, setting: Setting) -> Pipeline:
    layers = len(setting.model.layers)
    if plan.model_layers != layers:
        raise ValueError(f"the plan is for a model of {plan.model_layers} layers, but this one has {layers}")
    if len(plan.pipelines) > 1:
        raise ValueError(f"AMP's cost model covers plans of one pipeline, this one has {len(plan.pipelines)}")
    for number, stage in enumerate(plan.pipelines[0].stages):
        for run in stage.layers:
            if run.sharding is not Sharding.NONE or run.recompute or len(stage.layers) > 1:
                raise ValueError(
                    f"AMP's cost model covers stages of one layer run without sharding and recompute; stage {number} "
                    "has more, so take the exact cost model"
                )
    return plan.pipelines[0]


class _Scene:
    """The links and devices that all terms of Eq. 4 and 5 look up."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.links: Links = links_of(setting.cluster)
        self.number = {node.name: index for index, node in enumerate(setting.cluster.nodes)}

    def stage_seconds(self, stage: Stage) -> float:
        """t_i: one micro-batch, forward and backward, on the slowest replica."""
        run = stage.layers[0]
        groups = zip(run.tensor_groups(stage.devices), run.rows, strict=True)
        return max(self._group_seconds(run, group, rows) for group, rows in groups)

    def _group_seconds(self, run: LayerRun, group: tuple[Device, ...], rows: int) -> float:
        model, setting = self.setting.model, self.setting
        accelerators = sorted({setting.cluster.accelerator_of(device).name for device in group})
        bandwidth, latency = self.links.slowest(self._nodes(group))
        seconds = 0.0
        for name, count in Counter(model.layers[run.first : run.first + run.count]).items():
            kind = model.kind(name)
            seconds += count * layer_seconds(accelerators, kind, run.tensor, rows, setting)
            seconds += count * tensor_sync_seconds(
                kind, run.tensor, rows, bandwidth=float(bandwidth), latency=float(latency), setting=setting
            )
        return seconds

    def exchange_seconds(self, pipeline: Pipeline, number: int) -> float:
        """e_i: the slowest pair's activation forward and gradient backward, v / b each."""
        upper, lower = pipeline.stages[number], pipeline.stages[number + 1]
        row_bytes = self.setting.model.output_bytes_per_row(upper.end - 1)
        seconds = 0.0
        for senders, receivers, rows in _overlaps(upper, lower):
            there, back = self._nodes(senders), self._nodes(receivers)
            there = there[np.arange(len(back)) % len(there)]
            bandwidths = (self.links.bandwidth[there, back].min(), self.links.bandwidth[back, there].min())
            seconds = max(seconds, sum(rows * row_bytes / self._achieved(float(b)) for b in bandwidths))
        return seconds

    def sync_seconds(self, stage: Stage) -> float:
        """T_dpsync of the slowest data group of a stage: Eq. 3 with M = all parameters held at a device."""
        run = stage.layers[0]
        if run.data == 1:
            return 0.0
        message = self.setting.parameters(stage.first, stage.end, run.tensor) * self.setting.gradient_dtype.num_bytes
        bandwidth = min(self.links.slowest_bandwidth(self._nodes(group)) for group in run.data_groups(stage.devices))
        return all_reduce_seconds(run.data, message, self._achieved(bandwidth))

    def _nodes(self, devices: Sequence[Device]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        return np.array([self.number[device.node] for device in devices], dtype=np.intp)

    def _achieved(self, bandwidth: float) -> float:
        return bandwidth * self.setting.runtime.link_ratio


def _overlaps(upper: Stage, lower: Stage) -> Iterator[tuple[tuple[Device, ...], tuple[Device, ...], int]]:
    """Which replica sends how many rows to which: the overlaps of their rows of a micro-batch."""
    for sender, first, end in _rows(upper):
        for receiver, other_first, other_end in _rows(lower):
            rows = min(end, other_end) - max(first, other_first)
            if rows > 0:
                yield sender, receiver, rows


def _rows(stage: Stage) -> Iterator[tuple[tuple[Device, ...], int, int]]:
    run, first = stage.layers[0], 0
    for group, rows in zip(run.tensor_groups(stage.devices), run.rows, strict=True):
        yield group, first, first + rows
        first += rows
