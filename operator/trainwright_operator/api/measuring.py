"""What a person asks of the measurements before the search: `spec.links` and `spec.profiling`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright_operator.api.section import Seconds, Section


class LinksSpec(Section):
    """Measuring latency and bandwidth between nodes and within them."""

    deadline_seconds: Seconds = 300
    """The measurement fails with the reason DeadlineExceeded when it takes longer, waiting for devices included."""
    all_pairs_up_to_nodes: Annotated[int, Field(ge=2, le=40)] = 12
    """Up to so many nodes the links between every two are measured. With more, a few links of every kind are, and all
    those (1200 pairs at most) of a kind whose links turn out not to be alike. Nodes with equal topologyLabels and
    machines (accelerator, number of devices, node.kubernetes.io/instance-type) are of one kind."""
    topology_labels: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=317)], ...],
        Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ("topology.kubernetes.io/zone", "topology.kubernetes.io/rack")
    """Labels that say where in the network a node is, from the widest place to the narrowest; a cloud may have its own,
    for example cloud.google.com/gce-topology-block or topology.k8s.aws/network-node-layer-3. Nodes without one count as
    in one place."""
    collectives: bool = True
    """Measure all-reduce, all-gather and reduce-scatter too, inside the nodes and over them, of the sizes that plans for
    this model use, and tell how far the cost model is off. Takes about 20 s."""
    overlap: bool = True
    """Measure by how much computation slows down while its device communicates, for the search to reckon with. Never
    done on emulated devices, whose computation is a wait that nothing slows down."""


class ProfilingSpec(Section):
    """Measuring the layers on each accelerator."""

    deadline_seconds: Seconds = 600
    """Profiling fails with the reason DeadlineExceeded when it takes longer, waiting for devices included."""
    warmup_iterations: Annotated[int, Field(ge=0, le=1000)] = 3
    """Repeats of a layer that are run first and not counted."""
    iterations: Annotated[int, Field(ge=1, le=1000)] = 10
    """Repeats of a layer that are timed; their median counts."""
