"""Control plane on this machine: etcd, API server, controller manager, scheduler and DNS.

They listen only on the bridge's address, so they occupy no port of other programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from local_cluster.binaries import Binaries
from local_cluster.certificates import Certificates
from local_cluster.commands import wait_until
from local_cluster.config import ClusterConfig
from local_cluster.kubectl import Kubectl
from local_cluster.paths import Folders, write_if_changed
from local_cluster.processes import Processes, Program

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Configuration and processes of the control plane."""

    folders: Folders
    config: ClusterConfig
    binaries: Binaries
    certificates: Certificates
    processes: Processes

    def ensure(self, kubectl: Kubectl) -> None:
        """Start missing or changed programs and wait until the API server is ready."""
        # Data loss at a power cut is acceptable for a test cluster; waiting for the disk at each write is not.
        etcd_data = self.folders.cluster / "etcd"
        etcd_data.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.processes.ensure(self._etcd())
        self.processes.ensure(self._api_server())
        wait_until(
            kubectl.ready,
            what="the API server to be ready",
            deadline_seconds=90,
            log=self.processes.log("kube-apiserver"),
        )
        for program in (self._controller_manager(), self._scheduler(), self._coredns()):
            self.processes.ensure(program)

    def stop(self) -> None:
        for name in reversed(PROGRAMS):
            self.processes.stop(name)

    def _etcd(self) -> Program:
        address = self.config.host_address
        pair, authority = self.certificates.pair("etcd"), self.certificates.etcd_authority
        return self._program(
            "etcd",
            f"--data-dir={self.folders.cluster / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls=https://{address}:2379",
            f"--advertise-client-urls=https://{address}:2379",
            f"--listen-peer-urls=https://{address}:2380",
            f"--initial-advertise-peer-urls=https://{address}:2380",
            f"--initial-cluster=default=https://{address}:2380",
            f"--cert-file={pair.certificate}",
            f"--key-file={pair.key}",
            f"--trusted-ca-file={authority.certificate}",
            "--client-cert-auth",
            f"--peer-cert-file={pair.certificate}",
            f"--peer-key-file={pair.key}",
            f"--peer-trusted-ca-file={authority.certificate}",
            "--peer-client-cert-auth",
            "--log-level=warn",
        )

    def _api_server(self) -> Program:
        address, made = self.config.host_address, self.certificates
        serving, kubelet, etcd = made.pair("apiserver"), made.pair("kubelet-client"), made.pair("etcd-client")
        accounts = made.pair("service-accounts")
        return self._program(
            "kube-apiserver",
            f"--etcd-servers=https://{address}:2379",
            f"--etcd-cafile={made.etcd_authority.certificate}",
            f"--etcd-certfile={etcd.certificate}",
            f"--etcd-keyfile={etcd.key}",
            "--secure-port=6443",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={made.authority.certificate}",
            f"--service-account-key-file={accounts.key}",
            f"--service-account-signing-key-file={accounts.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={self.config.network.services}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={made.authority.certificate}",
            f"--kubelet-client-certificate={kubelet.certificate}",
            f"--kubelet-client-key={kubelet.key}",
            settings=serving.certificate.read_text(),
        )

    def _controller_manager(self) -> Program:
        made = self.certificates
        kubeconfig = made.kubeconfig("controller-manager")
        return self._program(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={self.config.host_address}",
            f"--cert-dir={self.folders.cluster / 'controller-manager'}",
            f"--root-ca-file={made.authority.certificate}",
            f"--service-account-private-key-file={made.pair('service-accounts').key}",
            f"--cluster-signing-cert-file={made.authority.certificate}",
            f"--cluster-signing-key-file={made.authority.key}",
            "--use-service-account-credentials=true",
            # A single instance needs no election, and a restart need not wait for a lease to expire.
            "--leader-elect=false",
        )

    def _scheduler(self) -> Program:
        kubeconfig = self.certificates.kubeconfig("scheduler")
        return self._program(
            "kube-scheduler",
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={self.config.host_address}",
            f"--cert-dir={self.folders.cluster / 'scheduler'}",
            "--leader-elect=false",
        )

    def _coredns(self) -> Program:
        address = self.config.host_address
        corefile = (
            ".:53 {\n"
            f"    bind {address}\n"
            "    errors\n"
            f"    health {address}:8080\n"
            "    kubernetes cluster.local in-addr.arpa {\n"
            f"        kubeconfig {self.certificates.kubeconfig('coredns')}\n"
            "        pods insecure\n"
            "        ttl 5\n"
            "    }\n"
            "    cache 5\n"
            "}\n"
        )
        file = self.folders.cluster / "Corefile"
        write_if_changed(file, corefile)
        return self._program("coredns", "-conf", str(file), settings=corefile)

    def _program(self, name: str, *arguments: str, settings: str = "") -> Program:
        return Program(name, (str(self.binaries.path(name)), *arguments), settings)
