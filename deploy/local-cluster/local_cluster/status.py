"""Tables of the cluster's components and nodes."""

from __future__ import annotations

from rich.table import Table

from local_cluster import control_plane
from local_cluster.cluster import LocalCluster
from local_cluster.commands import ClusterError


def component_table(cluster: LocalCluster) -> tuple[Table, bool]:
    """Return a table of all programs, and whether all run."""
    table = Table("component", "state", "pid", "log", title=f"local cluster '{cluster.config.name}'")
    wanted = [*control_plane.PROGRAMS]
    for name in cluster.config.node_names:
        wanted += cluster.node(name).programs
    all_run = True
    for name in wanted:
        identity = cluster.processes.identity(name)
        runs = identity is not None and identity.alive
        all_run = all_run and runs
        state = "[green]running" if runs else "[red]stopped" if identity is not None else "[dim]not started"
        log = cluster.processes.log(name)
        table.add_row(name, state, str(identity.pid) if identity and runs else "", str(log) if log.exists() else "")
    return table, all_run


def node_table(cluster: LocalCluster) -> tuple[Table, bool]:
    """Return a table of nodes with their links, and whether all match the configuration."""
    table = Table("node", "ready", "accelerator", "devices", "address", "link, described", "link, kernel")
    try:
        items = {item["metadata"]["name"]: item for item in cluster.kubectl.get("nodes")["items"]}
        ready = cluster.node_readiness()
    except ClusterError:
        items, ready = {}, {}
    well = True
    for name in cluster.config.node_names:
        device = cluster.config.node(name)
        allocatable = items.get(name, {}).get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", "0")
        described = cluster.config.link_of(device) if device else "unshaped"
        kernel = cluster.network.link_rate(name) if cluster.network.healthy(name) else "absent"
        node_well = (
            ready.get(name, False) and allocatable == str(device.devices if device else 0) and kernel != "absent"
        )
        well = well and node_well
        table.add_row(
            name,
            "[green]yes" if ready.get(name, False) else "[red]no",
            device.accelerator if device else "none",
            allocatable,
            str(cluster.config.node_address(name)),
            described,
            kernel,
        )
    return table, well
