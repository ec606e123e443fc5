"""API server that checks preconditions: the operator's client sends its requests to objects in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trainwright_operator.kube.client import JSON_PATCH, Api, ApiError
from trainwright_operator.kube.write_guard import WriteGuard


class VersionedApi(Api):
    """Client of objects by path. Their uids and resource versions are checked as Kubernetes does.

    `between`: called once after the next read, as what somebody else does before the operator's next request.
    """

    def __init__(self, objects: dict[str, dict[str, Any]]) -> None:
        super().__init__(None, None, WriteGuard())  # type: ignore[arg-type]
        self.objects = objects
        self.sent: list[tuple[str, str, Any]] = []
        self.between: Callable[[], None] | None = None

    def bodies(self, method: str) -> dict[str, Any]:
        """Return the bodies of a method's requests by the object's name."""
        return {
            path.removesuffix("/status").rsplit("/", 1)[1]: body for verb, path, body in self.sent if verb == method
        }

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        if method == "GET":
            answer = json.dumps(self._listed_or_found(path)).encode()
            happens, self.between = self.between, None
            if happens is not None:
                happens()
            return answer
        self.sent.append((method, path, body))
        if method == "POST":
            return json.dumps(self._create(path, body)).encode()
        found = self._found(path.removesuffix("/status"))
        if method == "DELETE":
            wanted = (body.get("preconditions") or {}).get("uid")
            if wanted and wanted != found["metadata"]["uid"]:
                raise ApiError(409, f"the uid in the precondition ({wanted}) does not match")
            del self.objects[path]
            return b"{}"
        assert method == "PATCH"
        content_type = (headers or {}).get("Content-Type")
        return json.dumps((_json_patch if content_type == JSON_PATCH else _merge)(found, body)).encode()

    def _listed_or_found(self, path: str) -> dict[str, Any]:
        inside = [one for name, one in self.objects.items() if name.rsplit("/", 1)[0] == path]
        return {"metadata": {"resourceVersion": "1"}, "items": inside} if inside else self._found(path)

    def _found(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise ApiError(404, f"{path} not found")
        return self.objects[path]

    def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{len(self.objects)}"
        if f"{path}/{name}" in self.objects:
            raise ApiError(409, f"{name} already exists")
        made = {"name": name, "uid": f"uid-of-{len(self.sent)}", "resourceVersion": "1"}
        self.objects[f"{path}/{name}"] = body | {"metadata": body["metadata"] | made}
        return self.objects[f"{path}/{name}"]


def _json_patch(target: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Apply tests and additions, all of them or none."""
    changed = json.loads(json.dumps(target))
    for one in operations:
        *parents, last = one["path"].strip("/").split("/")
        place = changed
        for name in parents:
            place = place[name]
        if one["op"] == "test" and place.get(last) != one["value"]:
            raise ApiError(422, f"testing {one['path']} failed")
        if one["op"] == "add":
            place[last] = one["value"]
    return _updated(target, changed)


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    meta, given = target["metadata"], patch["metadata"]
    annotations = {**(meta.get("annotations") or {}), **given["annotations"]}
    return _updated(target, target | {"metadata": meta | given | {"annotations": annotations}})


def _updated(target: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    version = target["metadata"]["resourceVersion"]
    if changed["metadata"]["resourceVersion"] != version:
        raise ApiError(409, "the object has been modified; please apply your changes to the latest version")
    changed["metadata"]["resourceVersion"] = str(int(version) + 1)
    target.clear()
    target.update(changed)
    return target
