"""Answers of discovery about each node object in `node_objects.yaml`, each asked about alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import subjects as s
import yaml
from flow_world import World, spec_of

FILE = Path(__file__).with_name("nodes.json")
OBJECTS = Path(__file__).with_name("node_objects.yaml")
NAME = "n"
READY = [{"type": "Ready", "status": "True"}]


def record() -> dict[str, str]:
    """Return what discovery says of each row, by `group: row`."""
    return {name: said_of(row) for name, row in rows().items()}


def rows() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(OBJECTS.read_text())
    return {f"{group}: {name}": row for group, members in groups.items() for name, row in members.items()}


def said_of(row: dict[str, Any]) -> str:
    """Return the devices and the memory that a plan takes of the node, or why it is left out, with the code."""
    read = s.read_nodes(node_object(row), slice_objects(row), class_objects(row))
    snapshot = replace(World().snapshot(), nodes=read.nodes, slice_devices=read.slice_devices)
    found = s.inspect_nodes(snapshot, spec_of(**row.get("spec", {})))
    if not found.nodes:
        (left_out,) = found.excluded
        return f"left out ({left_out.code}): {left_out.reason}"
    ((used,), (accelerator,)) = found.nodes, found.accelerators
    return f"{used.devices} × {used.accelerator} of {accelerator.memory_bytes / 2**20:,.0f} MiB"


def node_object(row: dict[str, Any]) -> dict[str, Any]:
    given = row["node"]
    status = {"capacity": given["status"]["allocatable"], "conditions": READY} | given["status"]
    metadata = {"name": NAME, "uid": "1"} | given.get("metadata", {})
    return {"apiVersion": "v1", "kind": "Node", "spec": {}} | given | {"metadata": metadata, "status": status}


def slice_objects(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the node's ResourceSlices, each the only one of its pool."""
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    pool = {"name": NAME, "generation": 1, "resourceSliceCount": 1}
    return [
        {**head, "metadata": {"name": f"slice-{number}"}, "spec": {"nodeName": NAME, "pool": pool} | spec}
        for number, spec in enumerate(row.get("slices", ()))
    ]


def class_objects(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cluster's DeviceClasses."""
    return [{"metadata": {"name": name}, "spec": spec} for name, spec in row.get("classes", {}).items()]


def text(said: dict[str, str]) -> str:
    """Return the file's text."""
    return json.dumps(said, indent=1, ensure_ascii=False) + "\n"


def stored() -> dict[str, str]:
    """Return what the file has recorded."""
    found: dict[str, str] = json.loads(FILE.read_text())
    return found
