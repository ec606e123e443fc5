"""Plan whose winner is handed over, in a cluster of two nodes."""

from __future__ import annotations

from typing import Any

from flow_world import World, node, spec_of

from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.snapshot import StoredConfigMap

JOB = {
    "image": "lab/train:7",
    "command": ["bash", "/etc/trainwright/launch.sh"],
    "podTemplate": {"spec": {"containers": [{"name": "pytorch", "env": [{"name": "DATA", "value": "c4"}]}]}},
}
ASKED: dict[str, Any] = {
    "search": {"planner": "Megatron", "limits": {"maxTensorDegree": 1}},
    "trials": {"topK": 1, "baseline": "None"},
}
RUN = ASKED | {"apply": "Run", "job": JOB}


NODES = (node("n1", devices=2), node("n2", devices=1))


def world_of(**spec: Any) -> World:
    return World(spec=spec_of(**(RUN | spec)), nodes=NODES)


def record_of(world: World) -> StoredConfigMap:
    """Return the record of the job, as soon as there is one."""
    while not (found := [one for one in world.stored.values() if one.role == StoredRole.HANDOVER]):
        world.step()
    return found[0]
