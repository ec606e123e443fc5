"""Real etcd and kube-apiserver on loopback, started once per test run, so that the API server itself validates.

There is no kubelet, no scheduler and no controller: pods stay Pending, nothing is garbage-collected, and tests write the
status that those would write. Each test gets a namespace of its own (`namespace`), which is never deleted.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import real_api_server
from operator_process import equip
from real_api_server import BINARIES, START_DEADLINE_SECONDS, ApiServer
from rich.console import Console

from local_cluster.binaries import API_SERVER_PROGRAMS
from local_cluster.progress import Steps
from trainwright_operator.api import API_VERSION, KIND, crd

BUILD_DEADLINE_SECONDS = 2400


def all_built() -> bool:
    return all(BINARIES.path(program).exists() for program in API_SERVER_PROGRAMS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test time for the start of the API server, and for its build if it is not built yet."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    seconds = START_DEADLINE_SECONDS + 60 if all_built() else BUILD_DEADLINE_SECONDS
    for item in here:
        item.add_marker(pytest.mark.apiserver)
        item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session")
def programs() -> None:
    """Everything that an API server consists of, built where it is missing."""
    if not all_built():
        BINARIES.build(Steps(Console()), API_SERVER_PROGRAMS)


@pytest.fixture(scope="session")
def bare_api_servers(
    programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], AbstractContextManager[ApiServer]]:
    """Return a function that runs an API server without our resources, until its block ends."""

    @contextmanager
    def run() -> Iterator[ApiServer]:
        with ExitStack() as running:
            yield real_api_server.start(tmp_path_factory.mktemp("bare"), running)

    return run


@pytest.fixture
def bare_api_server(bare_api_servers: Callable[[], AbstractContextManager[ApiServer]]) -> Iterator[ApiServer]:
    """Start an API server for one test, without our resources."""
    with bare_api_servers() as api:
        yield api


@pytest.fixture(scope="session")
def api_server(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Start the API server of the session, with the generated TrainingPlan definition."""
    with ExitStack() as running:
        api = real_api_server.start(tmp_path_factory.mktemp("apiserver"), running)
        done = api.try_kubectl("apply", document=crd.crd_manifest())
        assert done.returncode == 0, done.stderr
        assert not done.stderr, f"the definition is accepted with warnings: {done.stderr}"
        api.establish("crd/trainingplans.trainwright.dev")
        yield api


@pytest.fixture(scope="session")
def equipped_api_server(api_server: ApiServer) -> ApiServer:
    """Return the API server with the definitions of PyTorchJob and JobSet, and two nodes of two emulated devices each."""
    equip(api_server)
    return api_server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """Create a namespace for the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api_server.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def training_plan_of() -> Callable[..., dict[str, Any]]:
    """Return a builder of minimal TrainingPlans: `training_plan_of("namespace", "name", {"trials.topK": 0})`.

    A value of `...` leaves the field out.
    """

    def build(namespace: str, name: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "model": {"gpt": {"layers": 2, "hiddenSize": 8, "heads": 2, "sequenceLength": 4, "vocabularySize": 16}},
            "training": {"globalBatchSize": 4},
        }
        for path, value in copy.deepcopy(changes or {}).items():
            *parents, last = path.split(".")
            place = spec
            for parent in parents:
                place = place.setdefault(parent, {})
            if value is ...:
                del place[last]
            else:
                place[last] = value
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }

    return build


@pytest.fixture
def training_plan(namespace: str, training_plan_of: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a builder of minimal TrainingPlans in the test's namespace: `training_plan("name", {"trials.topK": 0})`."""

    def build(name: str = "tiny", changes: dict[str, Any] | None = None) -> dict[str, Any]:
        return training_plan_of(namespace, name, changes)

    return build
