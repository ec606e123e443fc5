"""Measurements that plans keep, made by the simulated cluster, on a real API server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flow_world import World, node

from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.kube.requests.manifests import config_map


def keep_measurements(api: Any, namespace: str, spec: dict[str, Any], nodes: list[dict[str, Any]]) -> list[str]:
    """Create the ConfigMaps that a plan on these nodes keeps in the simulated cluster, and return their names."""
    seen = tuple(
        node(one["metadata"]["name"], annotations=one["metadata"]["annotations"], uid=one["metadata"]["uid"])
        for one in nodes
    )
    digest = f"worker@sha256:{'1' * 64}"
    world = World(
        spec=TrainingPlanSpec.model_validate(spec), nodes=seen, image="worker:test", image_id=lambda *_: digest
    )
    kept: list[CreateConfigMap] = []
    apply = world.apply
    world.apply = lambda todo: (kept.extend(_measurements(todo)), apply(todo))[1]  # type: ignore[method-assign]
    world.run()
    plan = replace(world.snapshot().plan, namespace=namespace)
    for one in kept:
        api.create(config_map(plan, replace(one, annotations={})))  # the simulated cluster's time is long ago
    return [one.name for one in kept]


def _measurements(todo: list[Any]) -> list[CreateConfigMap]:
    creations = (one for one in todo if isinstance(one, CreateConfigMap))
    return [one for one in creations if one.role is StoredRole.MEASUREMENT]
