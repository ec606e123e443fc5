"""Messages of the boundary between two neighbouring stages of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost.network import Network
from trainwright.document_kind import document
from trainwright.model import Model
from trainwright.plan import LayerRun, Plan, Stage
from trainwright.resharding.messages import Delivery, MessagePlan
from trainwright.resharding.quickest import message_plan
from trainwright.resharding.sharded import ShardedTensor


@document("StageMessages")
@dataclass(frozen=True)
class StageMessages:
    """Messages of two neighbouring stages per micro-batch; the tensor is [row, value of the boundary].

    Attributes:
        stage: the upper one, which sends the activations forward and receives their gradients.
        backward: every replica of the lower stage holds the full gradient of its rows, reduced over its tensor group,
            so that messages only move it.
    """

    pipeline: int
    stage: int
    forward: MessagePlan
    backward: MessagePlan


def stage_messages(
    plan: Plan, model: Model, fabric: Network, place: tuple[int, int] = (0, 0), delivery: Delivery | None = None
) -> StageMessages:
    """Return the messages after a stage, for any degrees and rows on both sides.

    `place` is the pipeline and its upper stage; `delivery` is how slices reach the ranks of a tensor group, by default
    the fastest in each direction. Raises ValueError if there is no such boundary.
    """
    pipeline, number = place
    if not (0 <= pipeline < len(plan.pipelines) and 0 <= number < len(plan.pipelines[pipeline].stages) - 1):
        raise ValueError(f"the plan has no boundary after stage {number} of pipeline {pipeline}")
    upper, lower = plan.pipelines[pipeline].stages[number : number + 2]
    width = model.kind_of(upper.end - 1).output_elements_per_row
    source, target = stage_rows(upper, upper.layers[-1], width), stage_rows(lower, lower.layers[0], width)
    size = model.dtype.num_bytes
    return StageMessages(
        pipeline,
        number,
        message_plan(source, target, fabric, size, delivery),
        message_plan(target, source, fabric, size, delivery),
    )


def stage_rows(stage: Stage, run: LayerRun, width: int) -> ShardedTensor:
    """Return a micro-batch as a stage's layer run holds it: rows by data replica, each in full on its tensor group."""
    return ShardedTensor.in_rows(run.rows, width, run.tensor_groups(stage.devices))
