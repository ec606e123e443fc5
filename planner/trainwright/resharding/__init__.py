"""Cross-mesh resharding (Alpa §6): moves a sharded tensor to another sharding on other devices."""

from trainwright.resharding.messages import Delivery, Gather, MessagePlan, Part, Round, Send
from trainwright.resharding.quickest import message_plan, resharding_seconds
from trainwright.resharding.sharded import MeshAxes, ShardedTensor, Tile, mesh_axes
from trainwright.resharding.stages import StageMessages, stage_messages

__all__ = [
    "Delivery",
    "Gather",
    "MeshAxes",
    "MessagePlan",
    "Part",
    "Round",
    "Send",
    "ShardedTensor",
    "StageMessages",
    "Tile",
    "mesh_axes",
    "message_plan",
    "resharding_seconds",
    "stage_messages",
]
