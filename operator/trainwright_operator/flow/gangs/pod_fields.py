"""Fields of a pod by the rule that allows them: the one list of names. Any other name is unknown.

As of Kubernetes 1.35. Fields of later versions are unknown here, and need `Any`.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of an object's fields: free ones, those that need `Namespace`, and those that need `Any`."""

    free: frozenset[str]
    of_namespace: frozenset[str] = frozenset()
    of_node: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        return self.free | self.of_namespace | self.of_node

    def freeing(self, *names: str) -> FieldNames:
        """Return the same names with some of them free."""
        return FieldNames(self.free.union(names), self.of_namespace, self.of_node)


POD: Final = FieldNames(
    _words(
        "activeDeadlineSeconds affinity containers dnsConfig dnsPolicy enableServiceLinks hostAliases hostUsers hostname "
        "initContainers os readinessGates resources restartPolicy schedulingGates securityContext setHostnameAsFQDN "
        "shareProcessNamespace subdomain terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes"
    ),
    _words(
        "imagePullSecrets preemptionPolicy priority priorityClassName resourceClaims runtimeClassName schedulerName "
        "serviceAccount serviceAccountName"
    ),
    _words(
        "automountServiceAccountToken ephemeralContainers hostIPC hostNetwork hostPID hostnameOverride nodeName "
        "nodeSelector overhead workloadRef"
    ),
)
VOLUME: Final = FieldNames(
    _words("name configMap downwardAPI emptyDir"),
    _words("csi ephemeral image persistentVolumeClaim projected secret"),
    _words(
        "awsElasticBlockStore azureDisk azureFile cephfs cinder fc flexVolume flocker gcePersistentDisk gitRepo glusterfs "
        "hostPath iscsi nfs photonPersistentDisk portworxVolume quobyte rbd scaleIO storageos vsphereVolume"
    ),
)
CONTAINER: Final = FieldNames(
    _words(
        "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy "
        "resources restartPolicy securityContext startupProbe stdin stdinOnce terminationMessagePath "
        "terminationMessagePolicy tty volumeDevices volumeMounts workingDir"
    ),
    of_node=_words("restartPolicyRules"),
)
PORT: Final = FieldNames(_words("containerPort name protocol"), of_node=_words("hostIP hostPort"))
SOURCE: Final = FieldNames(
    _words("prefix configMapRef configMapKeyRef fieldRef fileKeyRef resourceFieldRef"),
    _words("secretKeyRef secretRef"),
)
_USER: Final = _words("runAsGroup runAsNonRoot runAsUser seccompProfile")
POD_SECURITY: Final = FieldNames(
    _USER | _words("fsGroup fsGroupChangePolicy supplementalGroups supplementalGroupsPolicy"),
    of_node=_words("appArmorProfile seLinuxChangePolicy seLinuxOptions sysctls windowsOptions"),
)
CONTAINER_SECURITY: Final = FieldNames(
    _USER | _words("allowPrivilegeEscalation capabilities readOnlyRootFilesystem"),
    of_node=_words("appArmorProfile privileged procMount seLinuxOptions windowsOptions"),
)


def describe_unknown(name: str, names: FieldNames) -> str:
    """Return what to do about a field that no pod has: correct it, move it, or remove it."""
    close = get_close_matches(name, sorted(names.known), n=1, cutoff=0.75)
    if close:
        return f"write {close[0]}"
    if names is POD and name in CONTAINER.known:
        return "move it into an entry of containers"
    return "remove it"
