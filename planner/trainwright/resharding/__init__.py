"""Cross-mesh resharding (Alpa §6): a tensor that lies sharded over some devices comes to lie, otherwise, on others."""

from trainwright.resharding.messages import Delivery, Gather, MessagePlan, Part, Round, Send
from trainwright.resharding.quickest import message_plan, resharding_seconds
from trainwright.resharding.sharded import MeshAxes, Sharded, Tile, mesh_axes
from trainwright.resharding.stages import StageMessages, stage_messages

__all__ = [
    "Delivery",
    "Gather",
    "MeshAxes",
    "MessagePlan",
    "Part",
    "Round",
    "Send",
    "Sharded",
    "StageMessages",
    "Tile",
    "mesh_axes",
    "message_plan",
    "resharding_seconds",
    "stage_messages",
]
