"""Control groups of the cluster: one tree with all its processes and pods.

    /NAME/system      the control plane, and each node's containerd, kubelet and kube-proxy
    /NAME/<node>      the pods of a node (the kubelet's cgroupRoot)

Cgroup v1 has a tree for each controller, v2 one for all; both are supported.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from local_cluster.commands import ClusterError, wait_until

_CLUSTER_CPU_SHARES = 8192  # of 1024 that each process outside has: tests beside the cluster must not starve it
_SYSTEM_CPU_SHARES = 4096  # against 1024 of each node's pods: the control plane answers while all devices compute


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Control groups below one name."""

    name: str
    trees: tuple[Path, ...]
    unified: bool

    def create(self, node_names: list[str]) -> None:
        """Create missing groups."""
        for tree in self.trees:
            top = tree / self.name
            for group in (top, *(top / leaf for leaf in ("system", *node_names))):
                group.mkdir(exist_ok=True)
                if self.unified and group == top:
                    _pass_controllers_on(tree, top)
                _inherit_cpuset(group)
            for group, shares in ((top, _CLUSTER_CPU_SHARES), (top / "system", _SYSTEM_CPU_SHARES)):
                if (group / "cpu.shares").exists():
                    (group / "cpu.shares").write_text(str(shares))
                if (group / "cpu.weight").exists():
                    (group / "cpu.weight").write_text(str(shares * 100 // 1024))

    def attach(self, pid: int) -> None:
        """Move a process into the system group."""
        for tree in self.trees:
            (tree / self.name / "system" / "cgroup.procs").write_text(str(pid))

    def pids(self, group: str = "") -> set[int]:
        """Return all processes in a group of the cluster and below it; '' is the whole cluster."""
        found: set[int] = set()
        for tree in self.trees:
            for folder, _, files in os.walk(tree / self.name / group):
                if "cgroup.procs" in files:
                    found.update(_read_pids(Path(folder) / "cgroup.procs"))
        return found - {0, os.getpid()}

    def kill(self, group: str = "") -> None:
        """Kill every process of a group. Raise ClusterError when one does not end."""

        def gone() -> bool:
            pids = self.pids(group)
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return not pids

        wait_until(gone, what=f"the processes of {self.name}/{group} to end", deadline_seconds=30, pause_seconds=0.05)

    def remove(self, group: str = "") -> None:
        """Remove a group and its subgroups in every tree. Its processes must have ended."""
        for tree in self.trees:
            folders = [Path(folder) for folder, _, _ in os.walk(tree / self.name / group, topdown=False)]
            for folder in folders:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise ClusterError(f"the control group {folder} cannot be removed: {error.strerror}") from error

    def exists(self) -> bool:
        return any((tree / self.name).exists() for tree in self.trees)


def control_groups(name: str, mounts: str | None = None) -> ControlGroups:
    """Find this machine's trees; `mounts` is the text of /proc/mounts."""
    text = Path("/proc/mounts").read_text() if mounts is None else mounts
    rows = [line.split() for line in text.splitlines()]
    kinds = {row[2] for row in rows}
    if not kinds & {"cgroup", "cgroup2"}:
        raise ClusterError("no control groups are mounted under /sys/fs/cgroup; mount them as systemd does")
    # A v1 machine may also mount an empty v2 tree, in which runc creates groups too.
    trees = tuple(Path(row[1]) for row in rows if row[2] in {"cgroup", "cgroup2"})
    return ControlGroups(name, trees, unified="cgroup" not in kinds)


def _inherit_cpuset(group: Path) -> None:
    """Copy the parent's CPUs and memory nodes, without which cgroup v1 admits no process."""
    if (group / "cgroup.controllers").exists():
        return
    for setting in ("cpuset.cpus", "cpuset.mems"):
        file = group / setting
        if file.exists() and not file.read_text().strip():
            file.write_text((group.parent / setting).read_text())


def _pass_controllers_on(tree: Path, top: Path) -> None:
    controllers = " ".join(f"+{name}" for name in (tree / "cgroup.controllers").read_text().split())
    (tree / "cgroup.subtree_control").write_text(controllers)
    (top / "cgroup.subtree_control").write_text(controllers)


def _read_pids(file: Path) -> set[int]:
    try:
        return {int(line) for line in file.read_text().split()}
    except OSError:  # the group went away while it was read
        return set()
