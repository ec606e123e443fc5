"""`python -m trainwright_worker`: do a task, in a pod (`launch`, the default) or on this machine alone (`local`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from trainwright.worker_api import NODE_NAME_VARIABLE, TASK_PATH, Failure
from trainwright_worker import validation
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.gang.rank_assignment import node_rank
from trainwright_worker.gang.startup import SigtermHandler, limit_threads, silence_torch_logs, start_fork_server


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainwright_worker", description=__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=("launch", "local"),
        default="launch",
        help="launch: this pod's part of the gang, by the node that the pod runs on; local: the whole gang, here",
    )
    parser.add_argument("--order", type=Path, default=Path(TASK_PATH), help=f"the task's file (default {TASK_PATH})")
    parser.add_argument("--termination-log", type=Path, help="local: file that gets the failure closest to the cause")
    parser.add_argument(
        "--visible-devices",
        type=json.loads,
        default={},
        help="local: JSON with the GPUs (UUIDs) that the processes of each node see, first those of its slots; all of them are of one machine",
    )
    parser.add_argument("--master-addr", help="launch: host of the gang's store (default: $MASTER_ADDR)")
    parser.add_argument("--master-port", type=int, help="launch: port of the gang's store (default: $MASTER_PORT)")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.termination_log is not None:
        os.environ[report_writer.TERMINATION_LOG_VARIABLE] = str(arguments.termination_log)
    try:
        task = validation.read_task(arguments.order)
        if arguments.command == "launch":
            node_rank(task.gang)
    except WorkerError as error:
        report_writer.write_failure(Failure(error.reason, error.message, node=os.environ.get(NODE_NAME_VARIABLE)))
        return 1
    limit_threads()
    silence_torch_logs()
    if arguments.command == "local":
        from trainwright_worker import run_task  # noqa: PLC0415 (load torch only for a valid task)
        from trainwright_worker.gang import local_launcher  # noqa: PLC0415

        return local_launcher.main(
            task.gang, run_task.task_devices(task), arguments.order, run_task.main, arguments.visible_devices
        )
    sigterm_handler = SigtermHandler()
    sigterm_handler.install()
    start_fork_server("trainwright_worker.run_task")  # loads torch in parallel with this process
    from trainwright_worker import run_task  # noqa: PLC0415
    from trainwright_worker.gang import launcher  # noqa: PLC0415

    return launcher.main(
        task.gang,
        arguments.order,
        arguments.master_addr,
        arguments.master_port,
        sigterm_handler=sigterm_handler,
        run_task=run_task.main,
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch takes seconds to shut down, and the next gang waits for the devices
