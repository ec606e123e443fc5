"""Images of this checkout on the nodes: the worker where devices are, the operator on the system node."""

from __future__ import annotations

from dataclasses import dataclass

from local_cluster.config import SYSTEM_NODE_NAME
from local_cluster.image_stores import import_image
from local_cluster.images import OPERATOR, WORKER, Images
from local_cluster.node import Node
from local_cluster.parallel import run_in_parallel
from local_cluster.paths import write_if_changed

_IMAGE_ON_SYSTEM_NODE = {WORKER: False, OPERATOR: True}


@dataclass(frozen=True, slots=True)
class ProjectImages:
    """Builds the code's images and brings them to running nodes."""

    images: Images
    nodes: list[Node]

    def load(self, *, reimport: bool) -> None:
        """Load the current code onto the nodes; with `reimport`, also where it is recorded as loaded."""
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
            if reimport or not mark.exists() or mark.read_text() != digest:
                import_image(self.images, image, node.store, node.containerd_socket)
                write_if_changed(mark, digest)

        run_in_parallel(bring, wanted)
        self.images.discard_unused()
