"""kopf's part: watching. A handler only wakes a plan's task, so no edge that is missed can do harm.

Only `on.event` handlers are used: with others kopf keeps the whole spec in an annotation, and with timers or daemons it
adds a finalizer, which would keep plans from being deleted while no operator runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from trainwright_operator.api import GROUP, PLURAL, VERSION
from trainwright_operator.flow.names import PLAN_UID_LABEL
from trainwright_operator.kube.reconciler import Reconciler


def registry_for(reconciler: Reconciler) -> kopf.OperatorRegistry:
    """The handlers."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**options: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**options) or kopf.login_with_kubeconfig(**options)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def plan_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            reconciler.wake(namespace, name)

    async def child_changed(labels: Mapping[str, str], **_: Any) -> None:
        reconciler.wake_owner(labels.get(PLAN_UID_LABEL, ""))

    present = {PLAN_UID_LABEL: kopf.PRESENT}
    kopf.on.event("kubeflow.org", "v1", "pytorchjobs", labels=present, id="job", registry=registry)(child_changed)
    kopf.on.event("", "v1", "pods", labels=present, id="pod", registry=registry)(child_changed)
    return registry


def settings() -> kopf.OperatorSettings:
    """Kopf's settings, each with its reason."""
    chosen = kopf.OperatorSettings()
    # Should a later handler keep progress, it must not go into the status, whose schema would drop it.
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # Events are made by the flow, one for each change of a condition.
    chosen.posting.enabled = False
    # A watch that is closed by the server from time to time heals by itself whatever went wrong with it.
    chosen.watching.server_timeout = 600
    chosen.watching.connect_timeout = 10
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 10
    # The default grows to ten minutes; nobody waits that long for an operator that recovers.
    chosen.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 34, 60)
    # The server sends only pods and jobs of plans, of the thousands that a cluster may have.
    chosen.watching.label_selectors["", "v1", "pods"] = PLAN_UID_LABEL
    chosen.watching.label_selectors["kubeflow.org", "v1", "pytorchjobs"] = PLAN_UID_LABEL
    # Nothing is left half-done by an end at any point, so nothing is waited for.
    chosen.process.ultimate_exiting_timeout = 5
    return chosen
