"""Limits on what pods of a plan may have, by the chart's `worker.allowPodTemplate` and `limits`.

The pod is looked at as it is rendered, since a template can also take away what the worker's own pod has. Fields are
allowed by name, so that those of later versions of Kubernetes need `Any`. A pod that `Namespace` allows passes the Pod
Security Standard `restricted` (https://kubernetes.io/docs/concepts/security/pod-security-standards/).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from trainwright_operator.api.installation import InstallationRules, PodTemplateRule, TenantLimits
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.flow.gangs import pod_fields, pod_template
from trainwright_operator.flow.gangs.kueue import TOPOLOGY_ANNOTATION
from trainwright_operator.flow.gangs.pod_fields import FieldNames
from trainwright_operator.flow.names import TASK_SUFFIX

_RULES: Final = tuple(PodTemplateRule)


class Excess(NamedTuple):
    """Field that needs a wider rule, or a higher limit where `rule` is None.

    Attributes:
        required: value that would not, where leaving it out is not enough.
        correction: what to do about a field that no pod is known to have.
    """

    field: str
    rule: PodTemplateRule | None
    required: str = ""
    correction: str = ""

    def sentence(self, place: str) -> str:
        """Return what is wrong and what to do, with the field's place."""
        if self.correction:
            return (
                f"{place}.{self.field}: unknown field `{self.field.rpartition('.')[2]}`; {self.correction}; or, if it is of a "
                f"newer Kubernetes, install the operator with worker.allowPodTemplate: {self.rule}"
            )
        problem = f"has to be {self.required}" if self.required else "gives pods more than the worker's own have"
        if self.rule is None:
            mending, setting = "lower it", "a higher limits.maxTerminationGracePeriodSeconds"
        else:
            mending, setting = "set it" if self.required else "remove it", f"worker.allowPodTemplate: {self.rule}"
        return f"{place}.{self.field}: {problem}; {mending}, or install the operator with {setting}"


_OFF: Final[tuple[object, ...]] = (None, False, "", [], {})
_GRACE: Final = "terminationGracePeriodSeconds"
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")
_PROFILES: Final = ("RuntimeDefault", "Localhost")
"""Types of seccomp and AppArmor profiles that confine."""
_CAPABILITIES: Final = frozenset({"NET_BIND_SERVICE"})
"""Capabilities that may be added."""
_OWN_ANNOTATIONS: Final = {**pod_template.ANNOTATIONS, **TOPOLOGY_ANNOTATION}
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"


def find_template_excess(template: PodTemplate, rules: InstallationRules) -> Excess | None:
    """Return the first part of a user's template that the rules do not allow, or None."""
    rendered = pod_template.render(
        image="", task_map="", resource_name="", devices=1, labels={}, template=template, container={}
    )
    return find_pod_excess(rendered, rules, own_labels=())


def find_pod_excess(
    pod: Mapping[str, Any],
    rules: InstallationRules,
    *,
    own_labels: Collection[str],
    own_annotations: Mapping[str, str] = MappingProxyType({}),
    own_priority_class: str = "",
) -> Excess | None:
    """Return the first part of a rendered pod template that the rules do not allow, or None.

    `own_labels`, `own_annotations`, `own_priority_class`: what the operator sets.
    """
    wider = _RULES[_RULES.index(rules.pod_template) + 1 :]
    excesses = _all_excesses(pod, own_labels, own_annotations, own_priority_class)
    return next((excess for excess in excesses if excess.rule in wider), None) or next(
        _long_graces(pod, rules.limits), None
    )


def _long_graces(pod: Mapping[str, Any], limits: TenantLimits) -> Iterator[Excess]:
    """Yield what lets a pod keep its devices for too long after it was deleted: its grace, or that of a probe."""
    spec = _object(pod.get("spec"))
    given = [("spec", spec)]
    for kind in ("containers", "initContainers"):
        for container in _objects(spec.get(kind)):
            place = f"spec.{kind}[{container.get('name')}]"
            given += [(f"{place}.{probe}", _object(container.get(probe))) for probe in _PROBES]
    for place, holder in given:
        seconds = holder.get(_GRACE)
        if limits.is_too_long(seconds):
            yield Excess(f"{place}.{_GRACE}", None, f"at most {limits.grace_seconds}, got {seconds}")


def _all_excesses(
    pod: Mapping[str, Any], own_labels: Collection[str], own_annotations: Mapping[str, str], own_priority_class: str
) -> Iterator[Excess]:
    metadata, spec = _object(pod.get("metadata")), _object(pod.get("spec"))
    for key in _object(metadata.get("labels")):
        if key not in own_labels:  # network policies, services and webhooks that give identities go by labels
            yield Excess(f"metadata.labels[{key}]", PodTemplateRule.NAMESPACE)
    for key, value in _object(metadata.get("annotations")).items():
        if {**_OWN_ANNOTATIONS, **own_annotations}.get(key) != value:
            rule = PodTemplateRule.ANY if key.startswith(_APPARMOR) else PodTemplateRule.NAMESPACE
            yield Excess(f"metadata.annotations[{key}]", rule)
    is_own = spec.get("priorityClassName") == own_priority_class
    yield from _fields("spec", spec, pod_fields.POD.freeing("priorityClassName") if is_own else pod_fields.POD)
    security = _object(spec.get("securityContext"))
    yield from _fields("spec.securityContext", security, _confined(security, pod_fields.POD_SECURITY))
    for volume in _objects(spec.get("volumes")):
        place = f"spec.volumes[{volume.get('name')}]"
        yield from _fields(place, volume, pod_fields.VOLUME)
        if volume.get("name") != pod_template.TASK_VOLUME:
            yield from _task_excesses(place, volume, "configMap")
    for kind in ("containers", "initContainers"):
        for container in _objects(spec.get(kind)):
            place = f"spec.{kind}[{container.get('name')}]"
            yield from _container_excesses(place, container)
            yield from _security_excesses(place, _object(container.get("securityContext")), security)


def _container_excesses(place: str, container: Mapping[str, Any]) -> Iterator[Excess]:
    yield from _fields(place, container, pod_fields.CONTAINER)
    for port in _objects(container.get("ports")):
        yield from _fields(f"{place}.ports", port, pod_fields.PORT)
    for variable in _objects(container.get("env")):
        source = _object(variable.get("valueFrom"))
        own_place = f"{place}.env[{variable.get('name')}].valueFrom"
        yield from _fields(own_place, source, pod_fields.SOURCE)
        yield from _task_excesses(own_place, source, "configMapKeyRef")
    for source in _objects(container.get("envFrom")):
        yield from _fields(f"{place}.envFrom", source, pod_fields.SOURCE)
        yield from _task_excesses(f"{place}.envFrom", source, "configMapRef")
    hooks = _object(container.get("lifecycle"))
    handlers = {name: container.get(name) for name in _PROBES}
    handlers |= {f"lifecycle.{name}": hooks.get(name) for name in ("postStart", "preStop")}
    for name, handler in handlers.items():
        for action in ("httpGet", "tcpSocket"):  # sent by the kubelet, from the node's network
            if _object(_object(handler).get(action)).get("host"):
                yield Excess(f"{place}.{name}.{action}.host", PodTemplateRule.ANY)


def _task_excesses(place: str, source: Mapping[str, Any], field: str) -> Iterator[Excess]:
    """Yield a reference to a ConfigMap that may hold the secret of another gang."""
    if str(_object(source.get(field)).get("name", "")).endswith(TASK_SUFFIX):
        yield Excess(f"{place}.{field}.name", PodTemplateRule.NAMESPACE)


def _security_excesses(place: str, own: Mapping[str, Any], of_pod: Mapping[str, Any]) -> Iterator[Excess]:
    """Yield what a container's security context, or the pod's where it is silent, lacks or has too much."""
    yield from _fields(f"{place}.securityContext", own, _confined(own, pod_fields.CONTAINER_SECURITY))

    def effective(field: str) -> tuple[str, Any]:
        is_own = own.get(field) is not None
        return f"{place if is_own else 'spec'}.securityContext.{field}", own[field] if is_own else of_pod.get(field)

    user, non_root, seccomp = effective("runAsUser"), effective("runAsNonRoot"), effective("seccompProfile")
    capabilities = _object(own.get("capabilities"))
    added, dropped = capabilities.get("add") or (), capabilities.get("drop") or ()
    demands = (
        (user[0], user[1] != 0, "another user than 0"),
        (non_root[0], non_root[1] is True, "true"),
        (f"{seccomp[0]}.type", _object(seccomp[1]).get("type") in _PROFILES, " or ".join(_PROFILES)),
        (
            f"{place}.securityContext.allowPrivilegeEscalation",
            own.get("allowPrivilegeEscalation") is False,
            "false",
        ),
        (f"{place}.securityContext.capabilities.drop", "ALL" in dropped, "[ALL]"),
    )
    yield from (Excess(field, PodTemplateRule.ANY, required) for field, is_met, required in demands if not is_met)
    if not _CAPABILITIES.issuperset(added):
        yield Excess(f"{place}.securityContext.capabilities.add", PodTemplateRule.ANY)


def _confined(security: Mapping[str, Any], names: FieldNames) -> FieldNames:
    """Return the fields of a security context, that for AppArmor free where it confines."""
    profile = _object(security.get("appArmorProfile"))
    return names.freeing("appArmorProfile") if profile.get("type") in _PROFILES else names


def _fields(place: str, given: Mapping[str, Any], names: FieldNames) -> Iterator[Excess]:
    """Yield the fields that are set and not free."""
    for name, value in given.items():
        if name in names.free or value in _OFF:
            continue
        rule = PodTemplateRule.NAMESPACE if name in names.of_namespace else PodTemplateRule.ANY
        correction = "" if name in names.known else pod_fields.describe_unknown(name, names)
        yield Excess(f"{place}.{name}", rule, correction=correction)


def _object(value: object) -> Mapping[str, Any]:
    """Return an object; anything else is for the API server to refuse."""
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list | tuple) else iter(())
