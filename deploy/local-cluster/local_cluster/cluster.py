"""Local cluster: up, down, build and load, under a lock."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_cluster import host_settings, packages
from local_cluster.addons import JOB_CONTROLLERS, JobController, apply_dns_rights, kueue_controller
from local_cluster.binaries import Binaries, GoModule
from local_cluster.certificates import Certificates, make_certificates
from local_cluster.cleanup import remove_builders_cache, remove_dead_sockets, remove_leftovers
from local_cluster.commands import ClusterError, wait_until
from local_cluster.config import SYSTEM_NODE_NAME, ClusterConfig
from local_cluster.control_groups import ControlGroups, control_groups
from local_cluster.control_plane import ControlPlane
from local_cluster.image_stores import SeedStore, import_image
from local_cluster.images import RUN_ROOT, Images
from local_cluster.kubectl import Kubectl
from local_cluster.mounts import unmount_below
from local_cluster.network import Network, overlapping_route
from local_cluster.node import Node, device_patch, node_patch
from local_cluster.parallel import run_in_parallel
from local_cluster.paths import Folders, write_if_changed
from local_cluster.processes import Processes, boot_id
from local_cluster.progress import Steps
from local_cluster.project_images import ProjectImages


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """Cluster on this machine, identified by its name; `kueue`: the release of Kueue that is built and installed, too, if any."""

    folders: Folders
    config: ClusterConfig
    steps: Steps
    kueue: GoModule | None = None

    @property
    def groups(self) -> ControlGroups:
        return control_groups(self.config.name)

    @property
    def processes(self) -> Processes:
        return Processes(self.folders.run / "processes", self.folders.logs, self.groups)

    @property
    def binaries(self) -> Binaries:
        return Binaries(self.folders, (self.kueue,) if self.kueue is not None else ())

    @property
    def images(self) -> Images:
        return Images(self.folders, self.binaries)

    @property
    def network(self) -> Network:
        return Network(self.config)

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.binaries.path("kubectl"), Certificates(self.folders.certificates).kubeconfig("admin"))

    @property
    def code(self) -> ProjectImages:
        return ProjectImages(self.images, [self.node(name) for name in self.config.node_names])

    def node(self, name: str) -> Node:
        return Node(name, self.folders, self.config, self.binaries, self.processes, self.groups)

    def up(self) -> None:
        """Start the cluster as configured; running parts that match stay unchanged."""
        if os.geteuid() != 0:
            raise ClusterError("the local cluster makes network namespaces and control groups; run it as root")
        self.folders.check_socket_lengths(self.config.node_names)
        with self._locked():
            self._install_packages()
            self._check_addresses()
            self._check_same_network()
            self._clear_earlier_boot()
            self.groups.create([])
            seed = self._prepare()
            certificates = make_certificates(self.folders.certificates, self.config)
            host_settings.remember(self.folders.host_settings)
            self.network.ensure_bridge()
            with self.steps.step("start the control plane"):
                plane = ControlPlane(self.folders, self.config, self.binaries, certificates, self.processes)
                plane.ensure(self.kubectl)
            self._write_checkout(certificates)
            with self.steps.step("start the nodes", total=len(self.config.node_names)) as step:
                self._remove_nodes_no_longer_wanted()

                def start(name: str) -> None:
                    self.node(name).ensure(certificates, seed)
                    step.advance(name)

                run_in_parallel(lambda name: self.node(name).leave_other_place(), self.config.node_names)
                run_in_parallel(start, self.config.node_names)
            with self.steps.step("wait for the nodes and give them their devices"):
                self._wait_for_nodes(certificates)
                run_in_parallel(self._patch_node, self.config.node_names)
                apply_dns_rights(self.folders, self.kubectl)
            with self.steps.step("install the training operator and JobSet"):
                for one in JOB_CONTROLLERS:
                    one.apply(self.folders, self.binaries, self.kubectl, self.images.digest(one.image))
                self.code.load(reimport=False)
                for one in JOB_CONTROLLERS:
                    one.wait(self.folders, self.kubectl)
            if self.kueue is not None:
                with self.steps.step(f"install Kueue {self.kueue.version(self.folders)}"):
                    self._install(kueue_controller(self.kueue))
            self._check_devices()

    def _install(self, controller: JobController) -> None:
        """Install a controller from an image that only the system node gets: few clusters need it."""
        node = self.node(SYSTEM_NODE_NAME)
        self.images.build_programs([controller.image])
        self.images.export(controller.image)
        import_image(self.images, controller.image, node.store, node.containerd_socket)
        controller.apply(self.folders, self.binaries, self.kubectl, self.images.digest(controller.image))
        controller.wait(self.folders, self.kubectl)

    def build(self, only: Collection[str] | None = None) -> None:
        """Build missing programs, with `only` those of these."""
        with self._locked():
            self.binaries.build(self.steps, only)

    def load(self) -> None:
        """Load the current worker and operator code onto the running nodes."""
        with self._locked():
            self._require_running()
            self.images.build_base(self.steps)
            self.images.build_dependencies(self.steps)
            seed = SeedStore(self.folders, self.images).ensure(self.steps, self.processes)
            certificates = make_certificates(self.folders.certificates, self.config)
            outdated = [name for name in self.config.node_names if self.node(name).seed_name() != seed.name]
            if outdated:
                with self.steps.step("dependencies changed: restart the nodes on the new image store"):
                    run_in_parallel(lambda name: self.node(name).ensure(certificates, seed), outdated)
                    self._wait_for_nodes(certificates)
                    run_in_parallel(self._patch_node, outdated)
            with self.steps.step("bring the code onto the nodes"):
                self.code.load(reimport=True)

    def down(self, *, purge: bool = False) -> None:
        """Remove every trace of the cluster; with `purge`, also cached programs, images and stores."""
        with self._locked():
            with self.steps.step("stop and remove the cluster"):
                self._tear_down()
            self.folders.kubeconfig.unlink(missing_ok=True)
            (self.folders.checkout / "logs").unlink(missing_ok=True)
            if self.folders.checkout.exists() and not any(self.folders.checkout.iterdir()):
                self.folders.checkout.rmdir()
            if purge:
                others = [folder.name for folder in self.folders.cluster.parent.glob("*")]
                if others:
                    raise ClusterError(f"kept files are in use by the cluster {', '.join(others)}; take it down first")
                with self.steps.step("remove the kept programs, images and stores"):
                    for kept in (self.folders.binaries, self.folders.images):
                        unmount_below(kept)
                        shutil.rmtree(kept, ignore_errors=True)
                    remove_builders_cache()

    def _tear_down(self) -> None:
        nodes = {*self.config.node_names, *self.network.nodes_present(), *self._nodes_on_disk()}
        for name in self.processes.names():
            if name.startswith(("kubelet-", "kube-proxy-")):
                self.processes.stop(name, patience_seconds=3)
        run_in_parallel(lambda name: self.node(name).remove(), sorted(nodes))
        ControlPlane(
            self.folders, self.config, self.binaries, Certificates(self.folders.certificates), self.processes
        ).stop()
        if self.groups.exists():
            self.groups.kill()
            self.groups.remove()
        self.network.remove()
        for folder in (self.folders.run, self.folders.cluster):
            unmount_below(folder)
            shutil.rmtree(folder, ignore_errors=True)
        remove_dead_sockets()
        if self.folders.cluster.parent.exists() and any(self.folders.cluster.parent.iterdir()):
            return  # another cluster of this machine still needs the rest
        host_settings.restore(self.folders.host_settings)
        unmount_below(self.folders.images)
        unmount_below(RUN_ROOT)
        shutil.rmtree(RUN_ROOT, ignore_errors=True)
        remove_leftovers()

    def _prepare(self) -> Path:
        """Build programs (limited by CPU) and images (limited by downloads) in parallel."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            programs = pool.submit(self.binaries.build, self.steps)
            layers = pool.submit(self._build_layers)
            programs.result()
            layers.result()
        self.images.build_programs()
        return SeedStore(self.folders, self.images).ensure(self.steps, self.processes)

    def _build_layers(self) -> None:
        self.images.build_base(self.steps)
        self.images.build_dependencies(self.steps)

    def _install_packages(self) -> None:
        missing = packages.missing_packages()
        if missing:
            with self.steps.step(f"install Debian packages: {', '.join(missing)}"):
                packages.install(missing)

    def _check_addresses(self) -> None:
        wanted = self.config.network
        for network in (wanted.nodes, wanted.pods, wanted.services):
            route = overlapping_route(network, self.network.bridge)
            if route is not None:
                raise ClusterError(f"{network} is in use on this machine ({route}); change `network` in cluster.yaml")

    def _check_same_network(self) -> None:
        """Raise ClusterError if the address ranges changed, since etcd stores service addresses."""
        mark = self.folders.cluster / "network.json"
        wanted = self.config.network.model_dump_json()
        if mark.exists() and mark.read_text() != wanted:
            raise ClusterError("`network` in cluster.yaml was changed; take the cluster down first, then up again")
        write_if_changed(mark, wanted)

    def _clear_earlier_boot(self) -> None:
        """Remove sockets and process files of an earlier boot."""
        mark = self.folders.run / "boot"
        if self.folders.run.exists() and (not mark.exists() or mark.read_text() != boot_id()):
            unmount_below(self.folders.run)
            shutil.rmtree(self.folders.run)
        write_if_changed(mark, boot_id())

    def _remove_nodes_no_longer_wanted(self) -> None:
        present = {*self.network.nodes_present(), *self._nodes_on_disk()}
        for name in sorted(present - set(self.config.node_names)):
            self.node(name).remove()
            self.kubectl("delete", "node", name, "--ignore-not-found")

    def _nodes_on_disk(self) -> list[str]:
        folder = self.folders.cluster / "nodes"
        return [entry.name for entry in folder.iterdir()] if folder.exists() else []

    def _wait_for_nodes(self, certificates: Certificates) -> None:
        def ready() -> bool:
            states = self.node_readiness()
            late = [name for name in self.config.node_names if not states.get(name, False)]
            for name in late:
                self.node(name).ensure_kubelet(certificates)
            return not late

        try:
            wait_until(ready, what="all nodes to be Ready", deadline_seconds=120, pause_seconds=0.5)
        except ClusterError as error:
            states = self.node_readiness()
            late = next(name for name in self.config.node_names if not states.get(name, False))
            log = self.processes.log(f"kubelet-{late}")
            wait_until(lambda: False, what=f"{error}; node {late}", deadline_seconds=0, log=log)

    def node_readiness(self) -> dict[str, bool]:
        """Return whether each registered node is Ready."""
        return {
            item["metadata"]["name"]: any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in item["status"].get("conditions", [])
            )
            for item in self.kubectl.get("nodes")["items"]
        }

    def _patch_node(self, name: str) -> None:
        self.kubectl("patch", "node", name, "--type", "merge", "--patch", json.dumps(node_patch(self.config, name)))
        devices = device_patch(self.config, name)
        if devices is None:
            return
        status = ("--subresource", "status", "--type", "merge", "--patch", json.dumps(devices))
        self.kubectl("patch", "node", name, *status)

    def _check_devices(self) -> None:
        """Patch devices that a killed and restarted kubelet may have withdrawn."""
        for item in self.kubectl.get("nodes")["items"]:
            name = item["metadata"]["name"]
            wanted = device_patch(self.config, name) if name in self.config.node_names else None
            if (
                wanted is not None
                and not wanted["status"]["allocatable"].items() <= item["status"]["allocatable"].items()
            ):
                self._patch_node(name)

    def _write_checkout(self, certificates: Certificates) -> None:
        write_if_changed(self.folders.kubeconfig, certificates.kubeconfig("admin").read_text(), mode=0o600)
        logs = self.folders.checkout / "logs"
        if not logs.is_symlink() or logs.readlink() != self.folders.logs:
            logs.unlink(missing_ok=True)
            logs.symlink_to(self.folders.logs)

    def _require_running(self) -> None:
        if not self.processes.running("kube-apiserver"):
            raise ClusterError(f"the cluster '{self.config.name}' is not running; bring it up first")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock this machine's cache, across all checkouts."""
        self.folders.cache.mkdir(parents=True, exist_ok=True)
        with (self.folders.cache / "local-cluster.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with self.steps.step("wait for another command on the local cluster to end"):
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield
