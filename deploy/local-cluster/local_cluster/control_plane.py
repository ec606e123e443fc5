"""The control plane: etcd, the API server, the controller manager, the scheduler and the cluster's DNS, on this machine.

They listen on the bridge's address alone, so they take no port from anything else that runs here.
"""

from __future__ import annotations

from dataclasses import dataclass

from local_cluster.binaries import Binaries
from local_cluster.certificates import Certificates
from local_cluster.commands import wait_until
from local_cluster.folders import Folders, write_if_changed
from local_cluster.kubectl import Kubectl
from local_cluster.processes import Processes, Program
from local_cluster.shape import ClusterShape

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Renders and starts the programs that every cluster has once."""

    folders: Folders
    shape: ClusterShape
    binaries: Binaries
    certificates: Certificates
    processes: Processes

    def ensure(self, kubectl: Kubectl) -> None:
        """Start what does not run as wanted and wait until the API server is ready."""
        # A cluster for rehearsals may lose its data in a power cut; it may not wait for the disk at each write.
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
        address = self.shape.host_address
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
        address, made = self.shape.host_address, self.certificates
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
            f"--service-cluster-ip-range={self.shape.network.services}",
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
            f"--bind-address={self.shape.host_address}",
            f"--cert-dir={self.folders.cluster / 'controller-manager'}",
            f"--root-ca-file={made.authority.certificate}",
            f"--service-account-private-key-file={made.pair('service-accounts').key}",
            f"--cluster-signing-cert-file={made.authority.certificate}",
            f"--cluster-signing-key-file={made.authority.key}",
            "--use-service-account-credentials=true",
            # One instance: nobody to elect against, and a restart need not wait for a lease to run out.
            "--leader-elect=false",
        )

    def _scheduler(self) -> Program:
        kubeconfig = self.certificates.kubeconfig("scheduler")
        return self._program(
            "kube-scheduler",
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={self.shape.host_address}",
            f"--cert-dir={self.folders.cluster / 'scheduler'}",
            "--leader-elect=false",
        )

    def _coredns(self) -> Program:
        address = self.shape.host_address
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
