"""Plain requests to the API server: dictionaries in, dictionaries out, and errors that say what to do about them.

The official client carries the connection, credentials and certificates. Its typed models are not used: they refuse
fields that a newer server or a person's pod template brings.
"""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
_TIMEOUT_SECONDS = (5.0, 30.0)
_LOG_TIMEOUT_SECONDS = (5.0, 5.0)
"""A log comes from a pod's kubelet, and for a dead one the API server waits long. The next pass asks again."""
_LOG_THREADS = 16
_PAGE = 500


class ApiError(Exception):
    """The API server said no, or could not be reached (status 0). The message is in its own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        return self.status == 409

    @property
    def is_refusal(self) -> bool:
        """Whether the same request would be refused again: nothing that waiting heals."""
        return 400 <= self.status < 500 and self.status not in (401, 404, 408, 409, 429)


def connect() -> Api:
    """An API client for this pod's service account, or else for the kube config's current context."""
    once = _configuration()
    once.retries = False
    return Api(ApiClient(_configuration()), ApiClient(once))


def _configuration() -> Configuration:
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return configuration


class Api:
    """Requests by path. Each waits in a thread: logs in threads of their own, so that dead nodes hold up nothing else.

    `once` is a client that does not try again; `threads` are where all but logs wait, by default the event loop's own.
    """

    def __init__(self, client: ApiClient, once: ApiClient, threads: Executor | None = None) -> None:
        self._client = client
        self._once = once
        self._threads = threads
        self._log_threads = ThreadPoolExecutor(_LOG_THREADS, thread_name_prefix="log")

    def apart(self, name: str) -> Api:
        """The same in one thread of its own, for what must never wait behind others' requests."""
        return Api(self._client, self._once, ThreadPoolExecutor(1, thread_name_prefix=name))

    async def get(self, path: str, **query: str) -> Any:
        return json.loads(await self._request("GET", path, query=query))

    async def get_text(self, path: str, **query: str) -> str:
        """A pod's log. Its kubelet gets a short while to answer, once."""
        read = partial(_Way(self._once, _LOG_TIMEOUT_SECONDS).request, "GET", path, None, query)
        data = await asyncio.get_running_loop().run_in_executor(self._log_threads, read)
        return data.decode(errors="replace")

    async def list(self, path: str, **query: str) -> list[dict[str, Any]]:
        """All items."""
        return [item async for page in self.pages(path, **query) for item in page]

    async def pages(self, path: str, **query: str) -> AsyncIterator[builtins.list[dict[str, Any]]]:
        """All items, page by page: for what is too much to be held at a time."""
        token = ""
        while True:
            page = await self.get(path, limit=str(_PAGE), **({"continue": token} if token else {}), **query)
            yield page.get("items") or []
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        return json.loads(await self._request("POST", path, body=body, query=query))

    async def replace(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(await self._request("PUT", path, body=body))

    async def patch(self, path: str, body: Any, content_type: str) -> Any:
        return json.loads(await self._request("PATCH", path, body=body, content_type=content_type))

    async def delete(self, path: str) -> None:
        """Delete with all dependents; what is gone already is fine."""
        try:
            await self._request("DELETE", path, body={"propagationPolicy": "Background"})
        except ApiError as error:
            if not error.is_missing:
                raise

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        way = _Way(self._client, _TIMEOUT_SECONDS)
        ask = partial(way.request, method, path, body, query or {}, content_type)
        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)


@dataclass(frozen=True, slots=True)
class _Way:
    """A client, and the seconds that it waits for a connection and for each next part of an answer."""

    client: ApiClient
    timeout: tuple[float, float]

    def request(
        self, method: str, path: str, body: Any, query: dict[str, str], content_type: str = "application/json"
    ) -> bytes:
        """Ask, and wait for the answer in this thread."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if method == "GET" and path.endswith("/log"):
            headers["Accept"] = "*/*"
        try:
            prepared = self.client.param_serialize(
                method, path, query_params=list(query.items()), header_params=headers, body=body,
                auth_settings=["BearerToken"],
            )  # fmt: skip
            response = self.client.call_api(*prepared, _request_timeout=self.timeout)
            data: bytes = response.read() or b""  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"the API server cannot be reached: {error}") from error
        except ApiException as error:
            raise ApiError(error.status or 0, str(error.reason)) from error
        if response.status >= 400:
            raise ApiError(response.status, _message(data, response.status))
        return data


def _message(data: bytes, status: int) -> str:
    """The API server's own sentence."""
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{status}: {data[:300].decode(errors='replace')}"
