"""Node cache: how often nodes and pods are read when many plans wait, and that no placement uses stale data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from flow_api import Lists

from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.nodes import node_cache as node_cache_module
from trainwright_operator.kube.nodes.node_cache import NodeCache

GPU = "nvidia.com/gpu"
WITHIN_SECONDS = 15.0


class Cluster(Lists):
    """Cluster with one node `alpha`; each read finds one more device occupied and calls `meanwhile`."""

    def __init__(self) -> None:
        self.nodes_read = self.pods_read = 0
        self.paths: list[str] = []
        self.refuses_all = False
        self.takes_seconds = 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self.failing = False

    async def pages(self, path: str, **_query: str) -> AsyncIterator[list[dict[str, Any]]]:
        if path.startswith("/apis/resource.k8s.io/"):
            raise ApiError(404, f"{path}: not served")
        if path.endswith("/nodes"):
            self.nodes_read += 1
            yield [{"metadata": {"name": "alpha"}}]
            return
        self.paths.append(path)
        if self.refuses_all and path == "/api/v1/pods":
            raise ApiError(403, "pods is forbidden")
        self.pods_read += 1
        asked = {"limits": {GPU: str(self.pods_read)}}
        await asyncio.sleep(self.takes_seconds)
        self.meanwhile()
        if self.failing:
            raise ApiError(500, "etcd is not there")
        yield [{"metadata": {}, "spec": {"nodeName": "alpha", "containers": [{"name": "pytorch", "resources": asked}]}}]


def story(told: Callable[[NodeCache, Cluster], Awaitable[None]]) -> Cluster:
    """Run a story on a node cache, and return the cluster that it read."""
    cluster = Cluster()

    async def whole() -> None:
        await told(NodeCache(cast("Api", cluster), ()), cluster)

    asyncio.run(asyncio.wait_for(whole(), WITHIN_SECONDS))
    return cluster


def test_waiting_plans_share_one_read() -> None:
    async def told(occupancy: NodeCache, _: Cluster) -> None:
        found = await asyncio.gather(*(occupancy.usage(GPU) for _ in range(50)))
        assert {one.devices["alpha"] for one in found} == {1}
        assert [node.name for node in found[-1].inventory.nodes] == ["alpha"]

    cluster = story(told)
    assert (cluster.nodes_read, cluster.pods_read) == (1, 1)


def test_everything_is_read_again_after_a_placement() -> None:
    async def told(occupancy: NodeCache, _: Cluster) -> None:
        assert (await occupancy.usage(GPU)).devices == {"alpha": 1}
        occupancy.invalidate()
        assert (await occupancy.usage(GPU)).devices == {"alpha": 2}

    story(told)


def test_read_during_a_placement_is_not_shared() -> None:
    async def told(occupancy: NodeCache, cluster: Cluster) -> None:
        cluster.meanwhile = occupancy.invalidate
        overtaken, behind = await asyncio.gather(occupancy.usage(GPU), occupancy.usage(GPU))
        assert (overtaken.devices, behind.devices) == ({"alpha": 1}, {"alpha": 2})

    story(told)


def test_stale_read_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache_module, "SHARED_SECONDS", 0.0)
    monkeypatch.setattr(node_cache_module, "_CACHE_TIME_FACTOR", 0.0)

    async def told(occupancy: NodeCache, _: Cluster) -> None:
        assert [(await occupancy.usage(GPU)).devices["alpha"] for _ in range(2)] == [1, 2]

    story(told)


def test_slow_read_is_shared_by_all_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache_module, "SHARED_SECONDS", 0.0)

    async def told(occupancy: NodeCache, cluster: Cluster) -> None:
        cluster.takes_seconds = 0.2
        found = await asyncio.gather(*(occupancy.usage(GPU) for _ in range(20)))
        assert {one.devices["alpha"] for one in found} == {1}

    story(told)


@pytest.mark.parametrize(
    ("refused", "read"),
    [
        (False, ["/api/v1/pods"]),
        (True, ["/api/v1/pods", "/api/v1/namespaces/team-a/pods", "/api/v1/namespaces/team-b/pods"]),
    ],
)
def test_pods_of_other_namespaces_are_counted_where_the_operator_may_list_them(refused: bool, read: list[str]) -> None:
    cluster = Cluster()
    cluster.refuses_all = refused
    found = asyncio.run(NodeCache(cast("Api", cluster), ("team-a", "team-b")).usage(GPU))
    assert cluster.paths == read
    assert found.devices["alpha"] > 0


def test_missing_right_to_list_pods_raises() -> None:
    cluster = Cluster()
    cluster.refuses_all = True
    with pytest.raises(ApiError):
        asyncio.run(NodeCache(cast("Api", cluster), ()).usage(GPU))


def test_resources_are_counted_separately() -> None:
    async def told(occupancy: NodeCache, _: Cluster) -> None:
        assert (await occupancy.usage(GPU)).devices == {"alpha": 1}
        assert "alpha" not in (await occupancy.usage("amd.com/gpu")).devices

    story(told)


def test_failed_read_is_repeated() -> None:
    async def told(occupancy: NodeCache, cluster: Cluster) -> None:
        cluster.failing = True
        with pytest.raises(ApiError):
            await occupancy.usage(GPU)
        cluster.failing = False
        assert (await occupancy.usage(GPU)).devices == {"alpha": 2}

    story(told)
