"""Jobs that plans owned and that outlived them are deleted; those of users and of plans that exist stay."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from trainwright_operator.flow.names import HANDED_OVER_ANNOTATION, HANDED_OVER_LABEL, OWNED_ANNOTATION, handover_name
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.orphaned_jobs import SWEEP_SECONDS, OrphanedJobs


class Jobs:
    """API server with JobSets of three plans, and without PyTorchJobs."""

    def __init__(self) -> None:
        self.deleted: list[tuple[str, str]] = []
        self.lists = 0
        self.refusal: ApiError | None = None

    async def list(self, path: str, labelSelector: str) -> list[dict[str, Any]]:  # noqa: N803 - the API server's name
        assert labelSelector == HANDED_OVER_LABEL
        self.lists += 1
        if "pytorchjobs" in path:
            raise ApiError(404, "the server could not find the requested resource")
        owned = {OWNED_ANNOTATION: "true"}
        return [job("lives", owned), job("gone", owned), job("gone", {}), job("gone", owned, copied_as="gone-by-hand")]

    async def delete(self, path: str, uid: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.deleted.append((path, uid))


class Claims:
    """Claims of namespaces, which another release may hold."""

    def __init__(self, holder: str = "") -> None:
        self.holder = holder

    async def other_holder(self, namespace: str) -> str:
        return self.holder


def job(plan: str, annotations: dict[str, str], copied_as: str = "") -> dict[str, Any]:
    """Return a job; `copied_as`: name that a user gave to a copy of it, with all of its labels and annotations."""
    name = copied_as or handover_name(plan, f"uid-{plan}") + ("" if annotations else "-free")
    meta = {"namespace": "team-a", "name": name, "uid": f"uid-of-{name}", "labels": {HANDED_OVER_LABEL: plan}}
    return {"metadata": meta | {"annotations": {HANDED_OVER_ANNOTATION: f"uid-{plan}"} | annotations}}


def sweep(api: Jobs, claims: Claims, *moments: float) -> None:
    now = [0.0]
    swept = OrphanedJobs(cast("Any", api), cast("Any", claims), clock=lambda: now[0])

    async def story() -> None:
        for moment in moments:
            now[0] = moment
            found = await swept.find("team-a")
            await swept.delete(found, {"uid-lives"})

    asyncio.run(story())


def test_job_that_a_deleted_plan_owned_is_deleted() -> None:
    api = Jobs()
    sweep(api, Claims(), SWEEP_SECONDS)
    ((path, uid),) = api.deleted
    name = handover_name("gone", "uid-gone")
    assert path == f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/team-a/jobsets/{name}"
    assert uid == f"uid-of-{name}"


def test_jobs_are_listed_once_in_an_interval_and_not_at_the_start() -> None:
    api = Jobs()
    sweep(api, Claims(), 30.0, 60.0)
    assert api.lists == 0
    sweep(api, Claims(), SWEEP_SECONDS, SWEEP_SECONDS + 30, SWEEP_SECONDS + 60)
    assert api.lists == 2


def test_namespace_of_another_release_is_left_alone() -> None:
    api = Jobs()
    sweep(api, Claims("other/other"), SWEEP_SECONDS)
    assert not api.deleted


def test_deletion_that_is_refused_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    api = Jobs()
    api.refusal = ApiError(403, "forbidden by a policy")
    sweep(api, Claims(), SWEEP_SECONDS)
    assert f"team-a/{handover_name('gone', 'uid-gone')} of a plan that is gone cannot be deleted: " in caplog.text
    api.refusal = None
    sweep(api, Claims(), SWEEP_SECONDS, 2 * SWEEP_SECONDS)
    assert len(api.deleted) == 2
