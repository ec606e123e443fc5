"""API server in memory: objects by path, for tests of the edges that need no watch and no admission."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from trainwright_operator.kube.client import ApiError


class Lists:
    """Lists of a fake API server, all from its `list`."""

    async def list(self, path: str, **query: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def list_with_version(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        return await self.list(path, **query), "1"

    async def list_metadata(self, path: str) -> list[dict[str, Any]]:
        return await self.list(path)

    async def pages(self, path: str, **query: str) -> AsyncIterator[list[dict[str, Any]]]:
        yield await self.list(path, **query)


class MemoryApi(Lists):
    """Requests by path on stored objects; `refused`: status of the answer to every request, if any."""

    def __init__(self, objects: dict[str, dict[str, Any]]) -> None:
        self.objects = objects
        self.refused = 0
        self.writes: list[tuple[str, str]] = []

    async def get(self, path: str, **query: str) -> Any:
        return self._find(path)

    async def list(self, path: str, labelSelector: str = "", **query: str) -> list[dict[str, Any]]:  # noqa: N803
        self._check()
        wanted = dict(part.split("=") for part in labelSelector.split(",") if part)
        inside = [one for name, one in self.objects.items() if name.rsplit("/", 1)[0] == path]
        return [one for one in inside if wanted.items() <= one["metadata"].get("labels", {}).items()]

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        self._check()
        name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{len(self.objects)}"
        self.writes.append(("create", f"{path}/{name}"))
        self.objects[f"{path}/{name}"] = body
        return {**body, "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z", **body["metadata"]}}

    async def replace(self, path: str, body: dict[str, Any]) -> Any:
        self._find(path)
        self.writes.append(("replace", path))
        self.objects[path] = body
        return body

    async def patch(self, path: str, body: Any, content_type: str) -> Any:
        target = self._find(path.removesuffix("/status"))
        self.writes.append(("patch", path))
        target["status"] = next(part["value"] for part in body if part["path"] == "/status")
        target["metadata"]["resourceVersion"] = str(len(self.writes))
        return target

    async def delete(self, path: str, **query: str) -> None:
        self._check()
        self.writes.append(("delete", path))
        self.objects.pop(path, None)

    def _find(self, path: str) -> dict[str, Any]:
        self._check()
        if path not in self.objects:
            raise ApiError(404, f"{path} not found")
        return self.objects[path]

    def _check(self) -> None:
        if self.refused:
            raise ApiError(self.refused, "refused by the test")
