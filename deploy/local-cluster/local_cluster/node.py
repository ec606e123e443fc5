"""Kubernetes node with its own containerd, kubelet, kube-proxy and network namespace."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster.binaries import Binaries
from local_cluster.certificates import Certificates
from local_cluster.cleanup import remove_links_into
from local_cluster.config import ClusterConfig
from local_cluster.control_groups import ControlGroups
from local_cluster.image_stores import clone, containerd_basics, unused_plugins, wait_for_containerd
from local_cluster.images import SANDBOX
from local_cluster.mounts import unmount_below
from local_cluster.network import Network
from local_cluster.paths import Folders, write_if_changed
from local_cluster.processes import Processes, Program, in_namespace

_CNI_RESULTS = Path("/var/lib/cni/results")
_SHIM_SOCKETS = Path("/run/containerd/s")
# Receive window: enough for 1 Gbit/s at 0.25 ms, small enough that the shaped links' queues hold several windows and
# drop nothing.
_RECEIVE_WINDOW_BYTES = "4096 131072 524288"


@dataclass(frozen=True, slots=True)
class Node:
    """Configuration and processes of one node."""

    name: str
    folders: Folders
    config: ClusterConfig
    binaries: Binaries
    processes: Processes
    groups: ControlGroups

    @property
    def network(self) -> Network:
        return Network(self.config)

    @property
    def store(self) -> Path:
        return self.folders.node(self.name) / "containerd"

    @property
    def containerd_socket(self) -> Path:
        return self.folders.node_run(self.name) / "containerd.sock"

    @property
    def programs(self) -> tuple[str, str, str]:
        """Return the programs in start order."""
        return (f"containerd-{self.name}", f"kubelet-{self.name}", f"kube-proxy-{self.name}")

    @property
    def _seed_mark(self) -> Path:
        return self.folders.node(self.name) / "seed"

    def seed_name(self) -> str | None:
        """Return the seed store that the node's store was cloned from, or None without a store."""
        return self._seed_mark.read_text() if self.store.exists() and self._seed_mark.exists() else None

    @property
    def _place(self) -> str:
        return f"{self.config.node_address(self.name)} {self.config.pod_range(self.name)}"

    @property
    def _place_mark(self) -> Path:
        return self.folders.node_run(self.name) / "place"

    def leave_other_place(self) -> None:
        """Stop the node if its addresses now belong to another node."""
        if self._place_mark.exists() and self._place_mark.read_text() != self._place:
            self.stop()
            self.network.remove_namespace(self.name)

    def ensure(self, certificates: Certificates, seed: Path) -> None:
        """Start the node, unless it runs as configured."""
        if not self.network.healthy(self.name):
            self.stop()  # its pods hang on a network that is gone
            self.network.make_namespace(self.name)
        self.network.configure(self.name)
        if self.seed_name() != seed.name:
            self.stop()
            shutil.rmtree(self.store, ignore_errors=True)
            clone(seed, self.store)
            write_if_changed(self._seed_mark, seed.name)
        write_if_changed(self._place_mark, self._place)
        self.groups.create([self.name])
        containerd = self._containerd()
        socket = self.containerd_socket
        if self.processes.ensure(containerd):
            wait_for_containerd(socket, self.processes.log(containerd.name))
        self.ensure_kubelet(certificates)
        self.processes.ensure(self._kube_proxy(certificates))

    def ensure_kubelet(self, certificates: Certificates) -> None:
        """Start the kubelet unless it runs.

        On a busy machine it may end at once: containerd answers before its plug-in for kubelets does.
        """
        self.processes.ensure(self._kubelet(certificates))

    def stop(self) -> None:
        """Stop the node's programs and pods; its store stays."""
        for name in reversed(self.programs):
            self.processes.stop(name)
        self.groups.kill(self.name)
        self._kill_shims()
        self._remove_shim_sockets()
        self._forget_pod_networks()
        unmount_below(self.folders.node_run(self.name))
        unmount_below(self.folders.node(self.name))
        shutil.rmtree(self.folders.node_run(self.name), ignore_errors=True)

    def remove(self) -> None:
        """Stop the node and remove every trace of it."""
        self.stop()
        self.network.remove_namespace(self.name)
        self.groups.remove(self.name)
        remove_links_into(self.folders.node(self.name))
        shutil.rmtree(self.folders.node(self.name), ignore_errors=True)

    def _remove_shim_sockets(self) -> None:
        """Remove shim sockets outside the node's folders, named in each task's folder."""
        for file in self.folders.node_run(self.name).glob("containerd/io.containerd.runtime.v2.task/k8s.io/*/address"):
            socket = Path(file.read_text().strip().removeprefix("unix://"))
            if socket.is_relative_to(_SHIM_SOCKETS):
                socket.unlink(missing_ok=True)

    def _forget_pod_networks(self) -> None:
        """Remove the CNI library's records of this node's pods, which name the pods' network namespaces."""
        mark = f"{self.folders.node_run(self.name)}/"
        for file in _CNI_RESULTS.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another node's containerd removes its own meanwhile
                if mark in file.read_text():
                    file.unlink()

    @property
    def _pod_network(self) -> str:
        return f"{self.config.name}-{self.name}"

    def _kill_shims(self) -> None:
        """Kill the shims of this node's containerd, which outlive it."""
        mark = str(self.containerd_socket).encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].rpartition(b"/")[2].startswith(b"containerd-shim") and mark in words:
                    os.kill(int(entry.name), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile

    def _containerd(self) -> Program:
        run_folder = self.folders.node_run(self.name)
        plugin = '[plugins."io.containerd.grpc.v1.cri"'
        basics = containerd_basics(self.store, run_folder / "containerd", self.containerd_socket, unused_plugins())
        # The last two: the machine may forbid lowering the OOM score; and pods' network namespaces must be mounted
        # where `down` finds them.
        config = (
            f"{basics}{plugin}]\n"
            f'sandbox_image = "{SANDBOX}"\n'
            "disable_tcp_service = true\n"
            "restrict_oom_score_adj = true\n"
            "netns_mounts_under_state_dir = true\n"
            f"{plugin}.cni]\n"
            'bin_dir = "/usr/lib/cni"\n'
            f"conf_dir = {json.dumps(str(self._write_cni()))}\n"
            f'{plugin}.containerd]\nsnapshotter = "overlayfs"\n'
            f'{plugin}.containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
            f"{plugin}.containerd.runtimes.runc.options]\nRoot = {json.dumps(str(run_folder / 'runc'))}\n"
        )
        file = self.folders.node(self.name) / "containerd.toml"
        write_if_changed(file, config)
        arguments = in_namespace(self.network.namespace(self.name), ["containerd", "--config", file])
        return Program(self.programs[0], arguments, config)

    def _write_cni(self) -> Path:
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.folders.node_run(self.name) / "addresses"),
                "ranges": [[{"subnet": str(self.config.pod_range(self.name))}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        # Reno is in every kernel, and without drops it keeps the window full; bbr, the default of some machines, pauses
        # every 10 s to probe.
        tuning = {
            "type": "tuning",
            "sysctl": {"net.ipv4.tcp_rmem": _RECEIVE_WINDOW_BYTES, "net.ipv4.tcp_congestion_control": "reno"},
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        document = {"cniVersion": "0.4.0", "name": self._pod_network, "plugins": [bridge, tuning, ports]}
        folder = self.folders.node(self.name) / "cni"
        write_if_changed(folder / "10-pods.conflist", json.dumps(document, indent=2) + "\n")
        return folder

    def _kubelet(self, certificates: Certificates) -> Program:
        folder = self.folders.node(self.name)
        serving = certificates.pair(f"kubelet-serving-{self.name}")
        document = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"x509": {"clientCAFile": str(certificates.authority.certificate)}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.groups.name}/{self.name}",
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket}",
            "clusterDNS": [str(self.config.host_address)],
            "clusterDomain": "cluster.local",
            "podLogsDir": str(folder / "pod-logs"),
            "volumePluginDir": str(folder / "volume-plugins"),
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "50Mi"},
            # Without a registry, removed images could not be pulled again.
            "imageGCHighThresholdPercent": 100,
            "oomScoreAdj": 0,
            "maxPods": 60,
            "registryPullQPS": 0,
            "serializeImagePulls": False,
            "nodeStatusReportFrequency": "1m",
            "shutdownGracePeriod": "0s",
        }
        config = json.dumps(document, indent=2) + "\n"
        write_if_changed(folder / "kubelet.json", config)
        arguments: list[str | Path] = [
            self.binaries.path("kubelet"),
            f"--config={folder / 'kubelet.json'}",
            f"--root-dir={folder / 'kubelet'}",
            f"--cert-dir={folder / 'kubelet-certificates'}",
            f"--kubeconfig={certificates.kubeconfig(f'kubelet-{self.name}')}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.config.node_address(self.name)}",
        ]
        inside = in_namespace(self.network.namespace(self.name), arguments)
        return Program(self.programs[1], inside, config + serving.certificate.read_text())

    def _kube_proxy(self, certificates: Certificates) -> Program:
        folder = self.folders.node(self.name)
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(certificates.kubeconfig("kube-proxy"))},
            "clusterCIDR": str(self.config.network.pods),
            "hostnameOverride": self.name,
            "conntrack": {"maxPerCore": 0, "min": 0},
            "oomScoreAdj": 0,
        }
        config = json.dumps(document, indent=2) + "\n"
        write_if_changed(folder / "kube-proxy.json", config)
        arguments: list[str | Path] = [self.binaries.path("kube-proxy"), f"--config={folder / 'kube-proxy.json'}"]
        return Program(self.programs[2], in_namespace(self.network.namespace(self.name), arguments), config)


def node_patch(shape: ClusterConfig, name: str) -> dict[str, Any]:
    """Return the labels and annotations of such a GPU node, with its emulation table."""
    device = shape.node(name)
    if device is None:
        return {"metadata": {"labels": {"trainwright.dev/system": "true"}}}
    labels = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": device.accelerator,
        "nvidia.com/gpu.count": str(device.devices),
        "nvidia.com/gpu.memory": str(shape.accelerators[device.accelerator].memory_mib),
        "nvidia.com/gpu.family": "emulated",
    }
    return {
        "metadata": {
            "labels": labels,
            "annotations": {"trainwright.dev/emulation": json.dumps(shape.device_table(device.accelerator))},
        }
    }


def device_patch(shape: ClusterConfig, name: str) -> dict[str, Any] | None:
    """Return the node's status with its devices as an extended resource, or None without devices."""
    device = shape.node(name)
    if device is None:
        return None
    devices = {"nvidia.com/gpu": str(device.devices)}
    return {"status": {"capacity": devices, "allocatable": devices}}
