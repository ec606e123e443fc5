"""The boundary between two neighbouring stages of a plan, as messages."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost.fabric import Fabric
from trainwright.model import Model
from trainwright.plan import LayerRun, Plan, Stage
from trainwright.resharding.messages import Delivery, MessagePlan
from trainwright.resharding.quickest import message_plan
from trainwright.resharding.sharded import Sharded


@dataclass(frozen=True)
class StageMessages:
    """What two neighbouring stages exchange for every micro-batch; the tensor is [row, value of the boundary].

    Attributes:
        stage: the upper one; it sends the activations forward, and the one below it their gradients backward.
        backward: every replica of the lower stage holds the whole gradient of its rows, summed over its tensor group, so
            that messages only move it.
    """

    pipeline: int
    stage: int
    forward: MessagePlan
    backward: MessagePlan


def stage_messages(
    plan: Plan, model: Model, fabric: Fabric, place: tuple[int, int] = (0, 0), delivery: Delivery | None = None
) -> StageMessages:
    """The messages behind a stage, whatever the degrees and rows on its sides.

    `place` names the pipeline and the upper stage in it; `delivery` says how slices reach the ranks of a tensor group, and
    where none is given each way takes the quickest. Raises ValueError where there is no such boundary.
    """
    pipeline, number = place
    if not (0 <= pipeline < len(plan.pipelines) and 0 <= number < len(plan.pipelines[pipeline].stages) - 1):
        raise ValueError(f"the plan has no boundary behind stage {number} of pipeline {pipeline}")
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


def stage_rows(stage: Stage, run: LayerRun, width: int) -> Sharded:
    """A micro-batch as one layer run of a stage holds it: rows by data replica, each whole on the tensor group."""
    return Sharded.in_rows(run.rows, width, run.tensor_groups(stage.devices))
