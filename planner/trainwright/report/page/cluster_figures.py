"""Map of a plan on its cluster, and the links between the nodes as a heat map."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree.ElementTree import Element

from trainwright.cluster import Cluster, Device, Link, Node, stream_bytes_per_second
from trainwright.plan import Plan
from trainwright.rank_layout import RankLayout
from trainwright.report.page.markup import SHADES, Row, element, figure, legend, missing_rows, scrollable, table
from trainwright.report.plan_summary import short_names

MAX_NODES: Final = 64
"""Maximum number of nodes that are drawn one by one; more are drawn by accelerator and rack."""
MAX_NUMBERED: Final = 16
"""Maximum number of nodes whose links are written as numbers."""
MAX_GROUPS: Final = 24
"""Maximum number of groups of nodes that are drawn."""
MAX_DEVICES: Final = 16
"""Maximum number of devices of a node that are drawn."""
RACK_SHARE: Final = 0.5
"""Share of an accelerator's fastest link between nodes above which a link joins two nodes to a rack."""
LEVELS: Final = 6
"""Number of colours of a heat map."""


@dataclass(frozen=True, slots=True)
class _Role:
    """Place of a device in a plan: stage over all pipelines, and its replica and tensor rank in words where there are several."""

    stage: int
    words: str


def _roles(plan: Plan) -> dict[Device, _Role]:
    roles: dict[Device, _Role] = {}
    for number, stage in enumerate(plan.stages):
        layout = RankLayout.of(stage.devices, stage.layers[0])
        tensor, data = stage.layers[0].strategy.degrees
        for index, device in enumerate(stage.devices):
            position = layout.position(index)
            places = [
                *([f"r{position.replica}"] if data > 1 else []),
                *([f"t{position.tensor_rank}"] if tensor > 1 else []),
            ]
            roles[device] = _Role(number, " ".join(places))
    return roles


def placement_figure(plan: Plan, cluster: Cluster) -> Element:
    """Draw each node with the stage of every device, or each rack where there are too many nodes."""
    roles, names = _roles(plan), short_names(cluster)
    if len(cluster.nodes) > MAX_NODES:
        return _rack_table(roles, cluster)
    caption = "One square a device: its stage, then its replica (r) and tensor rank (t) where there are several; dashed: idle."
    return figure(caption, element("ul", [_card(node, roles, names) for node in cluster.nodes], class_="nodes"))


def _card(node: Node, roles: Mapping[Device, _Role], names: Mapping[str, str]) -> Element:
    squares = [_square(roles.get(Device(node.name, slot)), slot) for slot in range(min(node.devices, MAX_DEVICES))]
    more = f" and {node.devices - MAX_DEVICES} more" if node.devices > MAX_DEVICES else ""
    kind = element("span", f" {node.devices} × {names[node.accelerator]}{more}")
    return element("li", element("h3", node.name, kind), element("ul", squares, class_="devices"))


def _square(role: _Role | None, slot: int) -> Element:
    if role is None:
        return element("li", "idle", class_="device idle", title=f"device {slot}: idle")
    title = f"device {slot}: stage {role.stage} {role.words}".strip()
    small = element("small", role.words) if role.words else None
    return element("li", f"S{role.stage}", small, class_=f"device c{role.stage % SHADES}", title=title)


def _rack_table(roles: Mapping[Device, _Role], cluster: Cluster) -> Element:
    groups, left_out = _shown(node_groups(cluster))
    rows: list[Row] = []
    for group in groups:
        stages = Counter(
            roles[device].stage
            for node in group.nodes
            for slot in range(node.devices)
            if (device := Device(node.name, slot)) in roles
        )
        devices, used = sum(node.devices for node in group.nodes), sum(stages.values())
        listed = ", ".join(f"S{stage}: {count}" for stage, count in sorted(stages.items())[:MAX_DEVICES])
        listed += f" and {len(stages) - MAX_DEVICES} stages more" if len(stages) > MAX_DEVICES else ""
        rows.append([group.name, str(len(group.nodes)), str(devices), str(used), str(devices - used), listed or "idle"])
    headings = ["accelerator and rack", "nodes", "devices", "used", "idle", "devices by stage"]
    caption = f"By accelerator and rack, since there are more than {MAX_NODES} nodes; a rack is joined by fast links."
    return figure(caption, table(headings, rows, label="Placement by accelerator and rack", left_out=left_out))


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one accelerator with equal ports, joined by fast links."""

    name: str
    nodes: tuple[Node, ...]


def node_groups(cluster: Cluster) -> list[NodeGroup]:
    """Group the nodes by accelerator and rack.

    A rack are nodes with equal network cards, of which listed links of at least half the fastest one's bandwidth join all that
    are not joined by their cards alone.
    """
    by_card: dict[object, list[Node]] = defaultdict(list)
    for node in cluster.nodes:
        by_card[node.accelerator, node.devices, node.network, node.inside].append(node)
    key_of = {node.name: key for key, nodes in by_card.items() for node in nodes}
    listed: dict[object, list[Link]] = defaultdict(list)
    for link in cluster.links:
        if link.source != link.target and key_of[link.source] == key_of[link.target]:
            listed[key_of[link.source]].append(link)
    names, racks = short_names(cluster), Counter[str]()
    groups = []
    for key, nodes in by_card.items():
        for members in _racks(nodes, listed[key]):
            accelerator = names[members[0].accelerator]
            racks[accelerator] += 1
            first, last = members[0].name, members[-1].name
            span = first if len(members) == 1 else f"{first} … {last}"
            groups.append(NodeGroup(f"{accelerator} rack {racks[accelerator]} ({span})", tuple(members)))
    return groups


def _racks(nodes: Sequence[Node], links: Sequence[Link]) -> list[list[Node]]:
    if not links:
        return [list(nodes)]
    least = RACK_SHARE * max(link.bandwidth_bytes_per_second for link in links)
    parent = {node.name: node.name for node in nodes}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for link in links:
        if link.bandwidth_bytes_per_second >= least:
            parent[root(link.source)] = root(link.target)
    racks: dict[str, list[Node]] = {}
    for node in nodes:
        racks.setdefault(root(node.name), []).append(node)
    return list(racks.values())


def _shown(groups: Sequence[NodeGroup]) -> tuple[Sequence[NodeGroup], str]:
    """Return the groups to draw, those with most devices, and which ones are left out."""
    if len(groups) <= MAX_GROUPS:
        return groups, ""
    shown = sorted(groups, key=lambda group: -sum(node.devices for node in group.nodes))[:MAX_GROUPS]
    return shown, missing_rows(len(shown), len(groups), "racks", ", the smallest")


def link_figure(cluster: Cluster) -> Element:
    """Draw the bandwidth from each node to each other one, and inside the nodes; by rack where there are too many nodes."""
    if len(cluster.nodes) > MAX_NODES:
        groups, left_out = _shown(node_groups(cluster))
        cells = [[_between(cluster, source, target) for target in groups] for source in groups]
        return _numbered([group.name for group in groups], cells, left_out, by_rack=True)
    names = [node.name for node in cluster.nodes]
    cells = [[_bandwidth(cluster, source, target) for target in names] for source in names]
    return _numbered(names, cells, "") if len(names) <= MAX_NUMBERED else _coloured(cells)


def _bandwidth(cluster: Cluster, source: str, target: str) -> float | None:
    if source == target and cluster.node(source).devices == 1:
        return None
    return stream_bytes_per_second(cluster.link(source, target))


def _between(cluster: Cluster, source: NodeGroup, target: NodeGroup) -> float | None:
    """Return the bandwidth between two nodes of the groups, which stands for that of all."""
    first, second = source.nodes[0].name, target.nodes[-1].name
    return None if first == second else stream_bytes_per_second(cluster.link(first, second))


def _numbered(
    names: Sequence[str], cells: Sequence[Sequence[float | None]], left_out: str, *, by_rack: bool = False
) -> Element:
    edges = _edges(cells)
    columns = [str(number) for number in range(1, len(names) + 1)]
    head = element(
        "tr", element("th", "from ↓ to →", scope="col"), [element("th", each, scope="col") for each in columns]
    )
    body = [
        element(
            "tr",
            element("th", f"{number} {name}", scope="row"),
            [
                element("td", "–", class_="heat")
                if value is None
                else element("td", rate_words(value), class_=f"heat h{_level(value, edges)}")
                for value in row
            ],
        )
        for number, (name, row) in enumerate(zip(names, cells, strict=True), 1)
    ]
    grid = element("table", element("thead", head), element("tbody", body))
    scrolled = scrollable(grid, "Bandwidth of links")
    inside = (
        "the diagonal is between two nodes of a rack" if by_rack else "the diagonal is between the devices of a node"
    )
    note = element("p", left_out, class_="note") if left_out else None
    return figure(f"Bandwidth of one stream in GB/s; {inside}.", scrolled, note)


def _coloured(cells: Sequence[Sequence[float | None]]) -> Element:
    edges = _edges(cells)
    moves: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            if value is not None:
                moves[_level(value, edges)].append(f"M{x} {y}h1v1h-1z")
    paths = [element("path", d="".join(squares), class_=f"h{level}") for level, squares in sorted(moves.items())]
    count = len(cells)
    words = [
        (f"h{level}", f"{rate_words(edges[level])} to {rate_words(edges[level + 1])} GB/s") for level in sorted(moves)
    ]
    return figure(
        "Bandwidth of one stream: rows send and columns receive, in the order of the nodes above; the diagonal is inside a node.",
        legend(*words),
        element(
            "svg", paths, viewBox=f"0 0 {count} {count}", class_="heat", role="img", aria_label="Heat map of links"
        ),
    )


def _edges(cells: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the borders of the colours, evenly spaced in the logarithm."""
    values = [value for row in cells for value in row if value is not None] or [1.0]
    least, greatest = min(values), max(values)
    return [least * (greatest / least) ** (step / LEVELS) for step in range(LEVELS + 1)]


def _level(value: float, edges: Sequence[float]) -> int:
    if edges[-1] <= edges[0]:
        return LEVELS - 1
    return min(int(LEVELS * math.log(value / edges[0]) / math.log(edges[-1] / edges[0]) + 1e-9), LEVELS - 1)


def rate_words(bytes_per_second: float) -> str:
    """Format in GB/s with three significant digits."""
    return f"{bytes_per_second / 1e9:.3g}"
