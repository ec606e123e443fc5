"""A pod's first process: starts one process a device and joins the other pods."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.orders import NODE_NAME_VARIABLE, FailureReason, Gang
from trainwright_worker import output, process
from trainwright_worker.failures import WorkerError, classify
from trainwright_worker.seat import node_rank

_RUN_ID = "trainwright"


def main(gang: Gang, order_path: Path, address: str | None, port: int | None) -> int:
    """Run this pod's processes to their end. Returns the exit code; on failure the reason is written out."""
    try:
        config = _config(gang, os.environ, address, port)
        elastic_launch(config, process.main)(str(order_path))
    except ChildFailedError as error:
        return _children_failed(error)
    except (WorkerError, SignalException, OSError, RuntimeError, ValueError) as error:
        problem = classify(error)
        output.failure(problem.reason, problem.message, node=os.environ.get(NODE_NAME_VARIABLE))
        return 1
    return 0


def _config(gang: Gang, environment: Mapping[str, str], address: str | None, port: int | None) -> LaunchConfig:
    """The configuration of torchrun: a static rendezvous at the gang's first node, ranks in the order of gang.nodes.

    Everything is given here. The variables that the training operator injects (PET_*, RANK, WORLD_SIZE) count pods
    within one PyTorchJob, and a gang may span several; of them only the master's address is used, as a default.
    """
    place = node_rank(gang, environment)
    address = address or environment.get("MASTER_ADDR")
    number = port or int(environment.get("MASTER_PORT", "0"))
    if not address or not number:
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            "the gang's meeting point is not known: pass --master-addr and --master-port, or MASTER_ADDR and MASTER_PORT",
        )
    return LaunchConfig(
        min_nodes=len(gang.nodes),
        max_nodes=len(gang.nodes),
        nproc_per_node=len(gang.nodes[place].slots),
        run_id=_RUN_ID,
        rdzv_backend="static",
        rdzv_endpoint=f"{address}:{number}",
        rdzv_configs={"rank": place, "timeout": max(1, round(gang.deadline_seconds))},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        shutdown_timeout=5,
    )


def _children_failed(error: ChildFailedError) -> int:
    """A process that ended in words of its own has told its reason; one that was killed could not, so it is told here."""
    for rank, failure in error.failures.items():
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            hint = "; the kernel does so when memory runs out" if name == "SIGKILL" else ""
            reason = FailureReason.OUT_OF_MEMORY if _ran_out_of_memory() else FailureReason.CRASHED
            message = f"process {failure.local_rank} of this pod was ended by {name}{hint}"
            if failure.exitcode != -signal.SIGTERM:
                output.failure(reason, message, rank=rank, node=os.environ.get(NODE_NAME_VARIABLE))
    return 1


def _ran_out_of_memory() -> bool:
    """Whether the pod's control group counts a kill for lack of memory (control groups of version 2)."""
    events = Path("/sys/fs/cgroup/memory.events")
    if not events.exists():
        return False
    counts = dict(line.split() for line in events.read_text(encoding="utf-8").splitlines())
    return int(counts.get("oom_kill", "0")) > 0
