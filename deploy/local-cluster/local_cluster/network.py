"""Network of the cluster: a bridge, and for each node a network namespace with a shaped veth pair."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv4Network
from pathlib import Path

from local_cluster.commands import run, succeeds
from local_cluster.config import SYSTEM_NODE_NAME, ClusterConfig, burst_bytes, rate_bytes_per_second
from local_cluster.processes import in_namespace

_NAMESPACES = Path("/run/netns")
_LONGEST_QUEUE_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Network:
    """Network objects that carry the cluster's name."""

    config: ClusterConfig

    @property
    def bridge(self) -> str:
        return f"br-{self.config.name}"

    def namespace(self, node: str) -> Path:
        return _NAMESPACES / f"{self.config.name}-{node}"

    def cable(self, node: str) -> str:
        """Return the host end of a node's veth pair, hashed because interface names have at most 15 characters."""
        return f"tw-{sha256(f'{self.config.name}/{node}'.encode()).hexdigest()[:10]}"

    def ensure_bridge(self) -> None:
        if not succeeds(["ip", "link", "show", self.bridge]):
            run(["ip", "link", "add", self.bridge, "type", "bridge"], what="making the cluster's bridge")
        address = f"{self.config.host_address}/{self.config.network.nodes.prefixlen}"
        run(["ip", "address", "replace", address, "dev", self.bridge], what="giving the bridge its address")
        run(["ip", "link", "set", self.bridge, "up"], what="switching the bridge on")

    def healthy(self, node: str) -> bool:
        """Return whether the node's namespace and veth pair are connected. A reboot leaves only a plain file."""
        inside = in_namespace(self.namespace(node), ["ip", "link", "show", "eth0"])
        return succeeds(["ip", "link", "show", self.cable(node), "master", self.bridge]) and succeeds(inside)

    def make_namespace(self, node: str) -> None:
        """Recreate a node's namespace and veth pair."""
        self.remove_namespace(node)
        namespace, cable = self.namespace(node), self.cable(node)
        what = f"making the network of {node}"
        run(["ip", "netns", "add", namespace.name], what=what)
        run(["ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace.name], what=what)
        run(["ip", "link", "set", cable, "alias", f"{self.config.name} {node}"], what=what)
        run(["ip", "link", "set", cable, "master", self.bridge, "up"], what=what)

    def configure(self, node: str) -> None:
        """Set addresses, routes and the link's rate. Idempotent."""
        address = f"{self.config.node_address(node)}/{self.config.network.nodes.prefixlen}"
        inside = [
            "link set lo up",
            f"address replace {address} dev eth0",
            "link set eth0 up",
            f"route replace default via {self.config.host_address}",
            *(
                f"route replace {self.config.pod_range(other)} via {self.config.node_address(other)}"
                for other in self.config.node_names
                if other != node
            ),
        ]
        what = f"configuring the network of {node}"
        namespace = self.namespace(node)
        run(in_namespace(namespace, ["ip", "-batch", "-"]), what=what, text_input="\n".join(inside) + "\n")
        forward = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        run(in_namespace(namespace, forward), what=what)
        route = ["ip", "route", "replace", str(self.config.pod_range(node)), "via", str(self.config.node_address(node))]
        run(route, what=what)
        if node == SYSTEM_NODE_NAME:
            # The API server calls webhooks at service addresses, which this node's kube-proxy forwards.
            services = str(self.config.network.services)
            run(["ip", "route", "replace", services, "via", str(self.config.node_address(node))], what=what)
        device = self.config.node(node)
        if device is not None:
            self._shape_link(node, self.config.link_of(device))

    def remove_namespace(self, node_or_namespace: str) -> None:
        """Remove a node's namespace and veth pair, if any."""
        namespace = self.namespace(node_or_namespace)
        if succeeds(["ip", "link", "show", self.cable(node_or_namespace)]):
            run(
                ["ip", "link", "delete", self.cable(node_or_namespace)],
                what=f"removing the veth pair of {namespace.name}",
            )
        if namespace.exists():
            run(["ip", "netns", "delete", namespace.name], what=f"removing the namespace {namespace.name}")

    def nodes_present(self) -> list[str]:
        """Return the nodes with a namespace, including those of an earlier configuration."""
        prefix = f"{self.config.name}-"
        found = [file.name for file in _NAMESPACES.glob(f"{prefix}*")] if _NAMESPACES.exists() else []
        return sorted(name.removeprefix(prefix) for name in found)

    def remove(self) -> None:
        """Remove the bridge with its routes, and every namespace of the cluster."""
        for node in self.nodes_present():
            self.remove_namespace(node)
        if succeeds(["ip", "link", "show", self.bridge]):
            run(["ip", "link", "delete", self.bridge], what="removing the cluster's bridge")

    def link_rate(self, node: str) -> str:
        """Return the kernel's rate of a node's link, or 'unshaped'."""
        shown = json.loads(run(["tc", "-json", "qdisc", "show", "dev", self.cable(node)], what="reading a link's rate"))
        for discipline in shown:
            if discipline.get("kind") == "tbf":
                return f"{discipline['options']['rate'] * 8 / 1e6:g}mbit"
        return "unshaped"

    def _shape_link(self, node: str, link: str) -> None:
        cable = self.cable(node)
        what = f"setting the link of {node} to {link}"
        discipline = token_bucket(link)
        run(["tc", "qdisc", "replace", "dev", cable, *discipline], what=what)
        run(in_namespace(self.namespace(node), ["tc", "qdisc", "replace", "dev", "eth0", *discipline]), what=what)


def token_bucket(link: str) -> list[str]:
    """Return tc arguments for a rate in bits per second.

    The queue holds the bounded windows of several connections (see the nodes' pod network), so that nothing is
    dropped: each retransmission would add 0.2 s to a measurement.
    """
    queue_bytes = max(4 * 1024 * 1024, round(rate_bytes_per_second(link) * _LONGEST_QUEUE_SECONDS))
    bucket = ["burst", str(burst_bytes(link)), "limit", str(queue_bytes)]
    return ["root", "handle", "1:", "tbf", "rate", link, *bucket]


def overlapping_route(network: IPv4Network, bridge: str) -> str | None:
    """Return the route of this machine that overlaps the cluster's addresses, if any, ignoring the cluster's own."""
    for route in json.loads(run(["ip", "-json", "route", "show"], what="reading this machine's routes")):
        if route["dst"] == "default" or route.get("dev") == bridge:
            continue
        if IPv4Network(route["dst"], strict=False).overlaps(network):
            return f"{route['dst']} on {route.get('dev', 'this machine')}"
    return None
