"""The checkout's own code on the nodes: the worker on those with devices, the operator on the system node."""

from __future__ import annotations

from dataclasses import dataclass

from local_cluster.each import each
from local_cluster.folders import write_if_changed
from local_cluster.images import OPERATOR, WORKER, Images
from local_cluster.node import Node
from local_cluster.shape import SYSTEM_NODE_NAME
from local_cluster.stores import import_image

_IMAGE_ON_SYSTEM_NODE = {WORKER: False, OPERATOR: True}


@dataclass(frozen=True, slots=True)
class Code:
    """Builds the code's images and brings them to running nodes."""

    images: Images
    nodes: list[Node]

    def load(self, *, again: bool) -> None:
        """Bring the code as it is now to the nodes. With `again`, also where a node is known to have it."""
        for image in _IMAGE_ON_SYSTEM_NODE:  # one after the other: they share the builder's storage and the layout
            self.images.build_code(image)
            self.images.export(image)
        wanted = [
            (image, node)
            for image, on_system_node in _IMAGE_ON_SYSTEM_NODE.items()
            for node in self.nodes
            if on_system_node == (node.name == SYSTEM_NODE_NAME)
        ]

        def bring(pair: tuple[str, Node]) -> None:
            image, node = pair
            digest = self.images.digest(image)
            mark = node.store / f"loaded-{image.rpartition('/')[2].replace(':', '-')}"
            if again or not mark.exists() or mark.read_text() != digest:
                import_image(self.images, image, node.store, node.containerd_socket)
                write_if_changed(mark, digest)

        each(bring, wanted)
        self.images.discard_unused()
