"""`python -m trainwright_worker`: do an order, in a pod (`launch`, the default) or on this machine alone (`local`)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainwright.orders import NODE_NAME_VARIABLE, ORDER_PATH, Failure
from trainwright_worker import acceptance, output
from trainwright_worker.failures import WorkerError
from trainwright_worker.pod_end import PodEnd
from trainwright_worker.seat import node_rank
from trainwright_worker.start import few_words, one_thread, start_server


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainwright_worker", description=__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=("launch", "local"),
        default="launch",
        help="launch: this pod's part of the gang, by the node that the pod runs on; local: the whole gang, here",
    )
    parser.add_argument("--order", type=Path, default=Path(ORDER_PATH), help=f"the order's file (default {ORDER_PATH})")
    parser.add_argument("--master-addr", help="launch: where the gang meets (default: $MASTER_ADDR)")
    parser.add_argument("--master-port", type=int, help="launch: and at which port (default: $MASTER_PORT)")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    try:
        order = acceptance.read_order(arguments.order)
        if arguments.command == "launch":
            node_rank(order.gang)
    except WorkerError as error:
        output.failure(Failure(error.reason, error.message, node=os.environ.get(NODE_NAME_VARIABLE)))
        return 1
    one_thread()
    few_words()
    if arguments.command == "local":
        from trainwright_worker import local  # noqa: PLC0415 (torch is loaded only for an order that can be done)

        return local.main(order, arguments.order)
    pod_end = PodEnd()
    pod_end.heed()
    start_server()  # it loads torch while this process does
    from trainwright_worker import launch  # noqa: PLC0415

    return launch.main(order.gang, arguments.order, arguments.master_addr, arguments.master_port, pod_end)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch takes seconds to take itself down, and the next gang waits for the devices
