"""`trainwright report NAME`: the page of a plan's answer, as the operator stored it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final

from trainwright_operator.flow.answer_page import PAGE_KEY
from trainwright_operator.flow.documents.config_map_data import ConfigMapData
from trainwright_operator.kubectl.client import Kubectl, KubectlError, condition

_STORED_KEY: Final = f"{PAGE_KEY}.gz"


def stored_page(kubectl: Kubectl, name: str) -> str:
    """Return the page of a plan. Raise KubectlError with why there is none to be had."""
    resource = kubectl.get_plan(name)
    reference = (resource.get("status", {}).get("report") or {}).get("configMap")
    if reference is None:
        raise KubectlError(_why_none(resource, name))
    try:
        config_map = kubectl.get("configmap", reference)
    except KubectlError as error:
        if error.is_missing:
            raise KubectlError(
                f"the page of the plan {name} is gone: somebody deleted the ConfigMap {reference}; the operator stores it again "
                "within an hour of the answer"
            ) from None
        if error.is_forbidden:
            raise KubectlError(
                f"you may not read the ConfigMap {reference}, which holds the page of the plan {name}: {error}"
            ) from None
        raise
    return _page_in(config_map, reference)


def _page_in(config_map: Mapping[str, Any], name: str) -> str:
    binary = config_map.get("binaryData") or {}
    texts = ConfigMapData({}, {key: b64decode(text) for key, text in binary.items() if key == _STORED_KEY}).read()
    if PAGE_KEY not in texts:
        raise KubectlError(f"the ConfigMap {name} holds no page that can be read under {_STORED_KEY}")
    return texts[PAGE_KEY]


def _why_none(resource: Mapping[str, Any], name: str) -> str:
    """Return why a plan has no page."""
    status, succeeded = resource.get("status", {}), condition(resource, "Succeeded")
    problem = (status.get("report") or {}).get("problem")
    if succeeded.get("status") == "False":
        return f"the plan {name} has no page, since it failed: {succeeded.get('reason')}: {succeeded.get('message')}"
    if succeeded.get("status") != "True":
        progress = (status.get("progress") or {}).get("text", "")
        where = ", ".join(part for part in (status.get("phase", "Pending"), progress) if part)
        return (
            f"the plan {name} has no page yet, since it has no answer ({where}); "
            f"`trainwright watch {name}` shows how far it is"
        )
    if problem is not None:
        return f"the plan {name} has its answer, but no page: {problem}"
    return (
        f"the plan {name} has its answer, but no page: it is being drawn, which takes seconds, or the operator that gave the "
        "answer was of a version that draws none"
    )
