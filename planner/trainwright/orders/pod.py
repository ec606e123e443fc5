"""Where a pod finds its order and its node's name, and how it marks the lines of its answers."""

from __future__ import annotations

ORDER_PATH = "/etc/trainwright/order.json"
NODE_NAME_VARIABLE = "TRAINWRIGHT_NODE_NAME"

PROGRESS_MARKER = "TRAINWRIGHT-PROGRESS"
PART_MARKER = "TRAINWRIGHT-PART"
REPORT_MARKER = "TRAINWRIGHT-REPORT"
FAILURE_MARKER = "TRAINWRIGHT-FAILURE"
MAX_REPORT_BYTES = 900_000
"""A report larger than this is refused: it must fit into one ConfigMap (1 MiB) with room to spare."""
