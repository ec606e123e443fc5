"""Seconds of a collective that shares no link."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.cluster import Device
from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Network


def all_reduce_seconds(members: Sequence[Device], message_bytes: float, fabric: Network) -> float:
    """Seconds of one all-reduce over the members while nothing else runs."""
    return Collectives(fabric).all_reduce((tuple(device.node for device in members),)).seconds(message_bytes)
