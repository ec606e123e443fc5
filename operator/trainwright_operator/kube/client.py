"""Client of the API server and its resource paths: dictionaries in and out, errors that say what to do.

The official client manages connection, credentials and certificates. Its typed models are not used: they refuse fields
of newer servers or of a user's pod template.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import re
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException

from trainwright.outside.plain_text import plain_line, plain_text
from trainwright_operator.api import GROUP, PLURAL, VERSION
from trainwright_operator.flow.gangs.launchers.launcher import JobApi
from trainwright_operator.kube.write_guard import NotLeading, WriteGuard

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
_TIMEOUT_SECONDS = (5.0, 30.0)
_LOG_TIMEOUT_SECONDS = (5.0, 5.0)
"""Log timeout, short because the API server waits long for a dead node's kubelet. The next reconciliation retries."""
_LEASE_TIMEOUT_SECONDS = (2.0, 3.0)
"""Timeout of a renewal: two attempts fit into the time for which the last one lasts."""
_LOG_THREADS = 16
_CONNECTION_RETRIES = 3
_PAGE = 500
_JSON: Final = "application/json"
_ANY: Final = {"Accept": "*/*"}
_DENIED: Final = re.compile(r"denied (the )?request|does not support dry run")
"""Words of the API server for refusals by a ValidatingAdmissionPolicy (422 by default) or a webhook (400 without a code)."""
_UNDEFINED: Final = re.compile(r"404 page not found|could not find the requested resource")
"""Words of the API server for a path that it does not serve; a missing object or namespace is named."""
_METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class ApiError(Exception):
    """Error response of the API server with its message on one line, or status 0 if the server is unreachable.

    Webhooks and policies write messages, too.

    Attributes:
        retry_after_seconds: for how long the server asks to be left alone; 0 where it does not.
    """

    def __init__(self, status: int, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(plain_line(message))
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def is_undefined(self) -> bool:
        """Return whether it is the kind that is missing: its definition was removed, or never installed."""
        return self.is_missing and _UNDEFINED.search(str(self)) is not None

    @property
    def is_conflict(self) -> bool:
        return self.status == 409

    @property
    def is_refusal(self) -> bool:
        """Return whether a retry of the same request would be refused again."""
        return 400 <= self.status < 500 and self.status not in (401, 404, 408, 409, 429)

    @property
    def is_forbidden(self) -> bool:
        """Return whether a right, a quota or a policy is in the way; policies answer with a code of their choice."""
        return self.status == 403 or (self.is_refusal and _DENIED.search(str(self)) is not None)


def connect(guard: WriteGuard, identity: str) -> Api:
    """Return an API client for this pod's service account, else for the kube config's current context.

    The API server's audit log tells the operators of one cluster apart by their identity.
    """
    return Api(_client(identity), _client(identity, retries=False), guard)


def connect_for_lease(identity: str) -> TimedClient:
    """Return a client with connections of its own and short timeouts, for renewals."""
    return TimedClient(_client(identity, retries=False), _LEASE_TIMEOUT_SECONDS)


def _client(identity: str, *, retries: bool = True) -> ApiClient:
    configuration = _configuration()
    if not retries:
        configuration.retries = False
    else:
        # For lost connections. What the API server answers with 429 waits for the plan's own back-off.
        configuration.retries = urllib3.Retry(_CONNECTION_RETRIES, status=0, respect_retry_after_header=False)
    api_client = ApiClient(configuration)
    api_client.user_agent = f"trainwright-operator/{version('trainwright')} ({identity})"
    return api_client


def _configuration() -> Configuration:
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return configuration


class Api:
    """Requests by path, each in a thread; log requests have their own threads, so that dead nodes block nothing else.

    `once`: a client without retries, for logs and for writes, which the guard checks one by one.
    """

    def __init__(self, client: ApiClient, once: ApiClient, guard: WriteGuard) -> None:
        self._client = client
        self._no_retry_client = once
        self._guard = guard
        self._log_threads = ThreadPoolExecutor(_LOG_THREADS, thread_name_prefix="log")

    async def get(self, path: str, **query: str) -> Any:
        return json.loads(await self._request("GET", path, query=query))

    async def get_text(self, path: str, **query: str) -> str:
        """Read a pod's log with a short timeout and no retry, without what would steer a terminal."""

        def read() -> str:
            sender = TimedClient(self._no_retry_client, _LOG_TIMEOUT_SECONDS)
            return plain_text(sender.request("GET", path, None, query, _ANY).decode(errors="replace"))

        return await asyncio.get_running_loop().run_in_executor(self._log_threads, read)

    async def list(self, path: str, **query: str) -> builtins.list[dict[str, Any]]:
        """List all items."""
        return (await self.list_with_version(path, **query))[0]

    async def list_with_version(self, path: str, **query: str) -> tuple[builtins.list[dict[str, Any]], str]:
        """List all items, and return the resource version of the list too."""
        items: builtins.list[dict[str, Any]] = []
        version = ""
        async for page in self._pages(path, query):
            items += page.get("items") or []
            version = str(page.get("metadata", {}).get("resourceVersion", ""))
        return items, version

    async def list_metadata(self, path: str) -> builtins.list[dict[str, Any]]:
        """List the metadata of all items."""
        return [item async for page in self._pages(path, {}, {"Accept": _METADATA}) for item in page.get("items") or []]

    async def pages(self, path: str, **query: str) -> AsyncIterator[builtins.list[dict[str, Any]]]:
        """Iterate over all items by page, for lists too large for memory."""
        async for page in self._pages(path, query):
            yield page.get("items") or []

    async def _pages(
        self, path: str, query: dict[str, str], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        token = ""
        while True:
            parameters = {"limit": str(_PAGE), **({"continue": token} if token else {}), **query}
            page = json.loads(await self._request("GET", path, query=parameters, headers=headers))
            yield page
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        return json.loads(await self._request("POST", path, body=body, query=query))

    async def replace(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(await self._request("PUT", path, body=body))

    async def patch(self, path: str, body: Any, content_type: str) -> Any:
        return json.loads(await self._request("PATCH", path, body=body, headers={"Content-Type": content_type}))

    async def delete(self, path: str, uid: str = "") -> bool:
        """Delete an object with all dependents. Return False where it is missing, or another of that name."""
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        try:
            await self._request("DELETE", path, body=options | ({"preconditions": {"uid": uid}} if uid else {}))
        except ApiError as error:
            if not error.is_missing and not (uid and error.is_conflict):
                raise
            return False
        return True

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        send = self._read if method == "GET" else self._write
        ask = partial(send, method, path, body, query or {}, headers)
        return await asyncio.get_running_loop().run_in_executor(None, ask)

    def _read(self, *request: Any) -> bytes:
        return TimedClient(self._client, _TIMEOUT_SECONDS).request(*request)

    def _write(self, *request: Any) -> bytes:
        """Send a write within the time that the lease leaves. It is checked here, in the thread that sends."""
        connect_seconds, read_seconds = _TIMEOUT_SECONDS
        try:
            with self._guard.write() as left:
                timeouts = (min(connect_seconds, left / 2), min(read_seconds, left / 2))
                return TimedClient(self._no_retry_client, timeouts).request(*request)
        except NotLeading as error:
            raise ApiError(0, f"not sent: {error}") from error


@dataclass(frozen=True, slots=True)
class TimedClient:
    """API client with seconds of timeout for connecting and for each read."""

    client: ApiClient
    timeout: tuple[float, float]

    def request(
        self, method: str, path: str, body: Any, query: dict[str, str], headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send a request and wait for its response in this thread."""
        given = {"Accept": _JSON, "Content-Type": _JSON} | dict(headers or {})
        try:
            prepared = self.client.param_serialize(
                method, path, query_params=list(query.items()), header_params=given, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            response = self.client.call_api(*prepared, _request_timeout=self.timeout)
            data: bytes = response.read() or b""  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"cannot reach the API server: {error}") from error
        except ApiException as error:
            raise ApiError(error.status or 0, str(error.reason)) from error
        if response.status >= 400:
            raise ApiError(response.status, _message(data, response.status), _retry_after(response.headers))
        return data


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; 0 without one, or with a date, which the API server never sends."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _message(data: bytes, status: int) -> str:
    """Return the API server's message."""
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{status}: {data[:300].decode(errors='replace')}"


def plans_path(namespace: str = "") -> str:
    """Return the path of TrainingPlans in one namespace, or in all."""
    return f"/apis/{GROUP}/{VERSION}/{_namespace_path(namespace)}{PLURAL}"


def plan_path(namespace: str, name: str) -> str:
    return f"{plans_path(namespace)}/{name}"


def jobs_path(api: JobApi, namespace: str) -> str:
    """Return the path of a launcher's objects."""
    return f"/apis/{api.group}/{api.version}/{_namespace_path(namespace)}{api.plural}"


def core_path(kind: str, namespace: str = "") -> str:
    """Return the path of Pods, ConfigMaps, Events or Nodes."""
    return f"/api/v1/{_namespace_path(namespace)}{kind}"


def leases_path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/{_namespace_path(namespace)}leases"


def device_path(kind: str, namespace: str = "") -> str:
    """Return the path of ResourceSlices, DeviceClasses or ResourceClaims."""
    return f"/apis/resource.k8s.io/v1/{_namespace_path(namespace)}{kind}"


def _namespace_path(namespace: str) -> str:
    return f"namespaces/{namespace}/" if namespace else ""
