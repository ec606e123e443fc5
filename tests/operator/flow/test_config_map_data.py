"""ConfigMaps with more text than one holds: compressed when written, read like others, refused when still too large."""

from __future__ import annotations

import gzip
import json
import random
from base64 import b64decode, b64encode
from typing import Any

import pytest
from flow_world import World, node, spec_of
from hypothesis import given
from hypothesis import strategies as st

from trainwright.worker_api import SECRET_FILE
from trainwright_operator.flow import decide
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.documents import config_map_data
from trainwright_operator.flow.documents.config_map_data import MAX_BYTES, MAX_TEXT_BYTES, ConfigMapData
from trainwright_operator.kube import object_facts
from trainwright_operator.kube.requests.manifests import config_map

LONG = json.dumps([f"node-{number}" for number in range(100_000)])


def creation(role: StoredRole = StoredRole.DOCUMENT, **data: str) -> CreateConfigMap:
    return CreateConfigMap("demo-cluster", role, {f"{key}.json": text for key, text in data.items()})


def manifest(action: CreateConfigMap) -> dict[str, Any]:
    """Return the ConfigMap that the API server gets, with what it adds."""
    found = config_map(World().snapshot().plan, action)
    found["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return found


def test_long_document_is_compressed_and_read_like_others() -> None:
    action = creation(document=LONG, runtime="{}")
    found = manifest(action)
    assert found["data"] == {}
    assert gzip.decompress(b64decode(found["binaryData"]["document.json.gz"])).decode() == LONG
    assert len(json.dumps(found)) < len(LONG) / 4
    assert object_facts.stored_config_map(found).data == action.data


def test_short_document_is_stored_as_by_former_versions() -> None:
    found = manifest(creation(document="{}"))
    assert found["data"] == {"document.json": "{}"}
    assert "binaryData" not in found
    assert object_facts.stored_config_map(found).data == {"document.json": "{}"}


def test_task_is_never_compressed_since_pods_mount_it() -> None:
    assert manifest(creation(StoredRole.TASK, order=LONG))["data"]["order.json"] == LONG


@given(st.dictionaries(st.text("abc.", min_size=1), st.text(max_size=20), max_size=3), st.integers(0, 40))
def test_texts_are_read_as_they_were_written(data: dict[str, str], most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(config_map_data, "MAX_BYTES", most)
        stored = ConfigMapData.of(CreateConfigMap("x", StoredRole.RESULT, data))
    assert stored.read() == data
    assert bool(stored.compressed) == (sum(len(text.encode()) for text in data.values()) > most)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"\xff", mtime=0),
        gzip.compress(LONG.encode(), mtime=0)[:-9],
        gzip.compress(bytes(MAX_TEXT_BYTES + 1), mtime=0),
    ],
)
def test_damaged_and_expanding_texts_are_left_out(content: bytes) -> None:
    found = manifest(creation(runtime="{}")) | {"binaryData": {"document.json.gz": b64encode(content).decode()}}
    assert object_facts.stored_config_map(found).data == {"runtime.json": "{}"}


def test_discovery_of_thousands_of_nodes_with_long_names_fits() -> None:
    names = [f"gpu-pool-{number * 7919 % 4096:08x}.cluster.{'region.' * 16}example" for number in range(4096)]
    world = World(nodes=tuple(node(name, devices=1) for name in names))
    world.run(until=lambda: bool(world.stored))
    stored = next(one for one in world.stored.values() if one.name.endswith("-discovery"))
    data = ConfigMapData.of(CreateConfigMap(stored.name, StoredRole.DOCUMENT, stored.data))
    assert sum(map(len, stored.data.values())) > MAX_BYTES
    assert data.bytes < MAX_BYTES / 4


def test_plan_fails_with_a_remedy_when_a_document_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_BYTES", 400)
    seed = random.Random(0)
    world = World(nodes=tuple(node(f"node-{seed.randbytes(8).hex()}") for _ in range(100)), spec=spec_of())
    world.run()
    condition = world.condition("Succeeded")
    assert (condition.status, condition.reason) == ("False", "DocumentTooLarge")
    assert "devices.max" in condition.message
    assert not world.stored


def test_every_task_gets_a_secret_of_its_own_and_nothing_else_does() -> None:
    first, second = (manifest(creation(StoredRole.TASK))["data"][SECRET_FILE] for _ in range(2))
    assert first
    assert first != second
    others = (manifest(creation(role))["data"] for role in StoredRole if role is not StoredRole.TASK)
    assert not any(SECRET_FILE in data for data in others)
