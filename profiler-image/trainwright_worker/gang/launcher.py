"""Launcher of a pod: starts one process per device with torchrun and reports processes that die silently."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.worker_api import NODE_NAME_VARIABLE, Cause, Failure, FailureReason, Gang, GangNode
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.abort import STATUS_TIMEOUT_SECONDS, AbortListener, GangSecret
from trainwright_worker.gang.errors import WorkerError, classify_error, classify_exit_code, out_of_memory_kills
from trainwright_worker.gang.rank_assignment import node_rank
from trainwright_worker.gang.startup import SigtermHandler
from trainwright_worker.gang.termination import run_with_timeout

_RUN_ID = "trainwright"
_REPORT_TIMEOUT_SECONDS = 2.0
_SELF_EXIT_SECONDS = 10.0
"""Time within which processes that receive an abort have exited."""
_SHUTDOWN_SECONDS = 3
"""Time from SIGTERM to SIGKILL; shorter than the delay after which the signal handler exits."""
_SHUTDOWN_OPTIONS: dict[str, Any] = {}
if hasattr(LaunchConfig, "shutdown_timeout"):
    _SHUTDOWN_OPTIONS["shutdown_timeout"] = _SHUTDOWN_SECONDS
else:  # older releases of torch wait for 30 s and take no option
    PContext.close = functools.partialmethod(PContext.close, timeout=_SHUTDOWN_SECONDS)  # type: ignore[assignment, method-assign]


def main(  # noqa: PLR0913 - what the command line says, and what runs
    gang: Gang,
    task_path: Path,
    address: str | None,
    port: int | None,
    *,
    sigterm_handler: SigtermHandler,
    run_task: Callable[[str, GangSecret], None],
) -> int:
    """Run the task in each of this pod's processes until they exit. Returns the exit code; a failure is reported."""
    oom_kills_before = out_of_memory_kills()
    # To log an error with its traceback, torch's formatter loads its compiler, which takes seconds.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lambda record: not record.exc_info)
    try:
        node_index = node_rank(gang, os.environ)
        config = _launch_config(gang, node_index, os.environ, address, port)
        secret = GangSecret.beside(task_path)
        pod = _PodReporter(gang, node_index, config.rdzv_endpoint, secret)
        sigterm_handler.notify_gang = pod.report_to_gang
        pod.terminate_after_abort(sigterm_handler, gang.deadline_seconds)
        elastic_launch(config, run_task)(str(task_path), secret)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            pod.report_child_failure(rank, failure, out_of_memory=out_of_memory_kills() > oom_kills_before)
        pod.keep_store_alive()
        return 1
    except SignalException:
        sigterm_handler.wait_until_reported()
        return 1
    except (WorkerError, OSError, RuntimeError, ValueError) as error:
        problem = classify_error(error)
        report_writer.write_failure(Failure(problem.reason, problem.message, node=os.environ.get(NODE_NAME_VARIABLE)))
        return 1
    return 0


def _launch_config(
    gang: Gang, node_index: int, environment: Mapping[str, str], address: str | None, port: int | None
) -> LaunchConfig:
    """Return torchrun's configuration: static rendezvous at the gang's first node, ranks in the order of `gang.nodes`.

    The variables that the training operator injects (PET_*, RANK, WORLD_SIZE) count pods within one PyTorchJob, but a gang
    may span several; only MASTER_ADDR and MASTER_PORT are used, as defaults.
    """
    address = address or environment.get("MASTER_ADDR")
    number = port or int(environment.get("MASTER_PORT", "0"))
    if not address or not number:
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            "the gang's store address is unknown; pass --master-addr and --master-port, or MASTER_ADDR and MASTER_PORT",
        )
    return LaunchConfig(
        min_nodes=len(gang.nodes),
        max_nodes=len(gang.nodes),
        nproc_per_node=len(gang.nodes[node_index].slots),
        run_id=_RUN_ID,
        rdzv_backend="static",
        rdzv_endpoint=f"{address}:{number}",
        rdzv_configs={"rank": node_index, "timeout": max(1, round(gang.deadline_seconds))},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        **_SHUTDOWN_OPTIONS,
    )


class _PodReporter:
    """Reporter of this pod's failures to the rest of the gang.

    The first node's launcher creates the gang's TCPStore; torchrun shares it within this process. It thus outlives
    torchrun for a moment, in which the other pods read the cause of the failure.
    """

    def __init__(self, gang: Gang, node_index: int, endpoint: str, secret: GangSecret) -> None:
        self._node: GangNode = gang.nodes[node_index]
        address, _, port = endpoint.rpartition(":")
        self._abort_listener = AbortListener(address, int(port), secret)
        self._store: Any = None
        if node_index == 0 and len(gang.nodes) > 1:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                int(port),
                is_master=True,
                multi_tenant=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=gang.deadline_seconds),
            )

    def report_to_gang(self, cause: Cause) -> None:
        """Post the failure and raise the abort signal; best effort, since the store may be gone."""

        def report() -> None:
            board = self._abort_listener.connect_board()
            board.report_pod_failure(cause)
            board.raise_abort(cause)

        run_with_timeout(_REPORT_TIMEOUT_SECONDS, report)

    def terminate_after_abort(self, sigterm_handler: SigtermHandler, start_up_seconds: float) -> None:
        """Terminate this pod some time after an abort to which its processes should have responded."""

        def on_abort(alarm: Cause) -> None:
            time.sleep(_SELF_EXIT_SECONDS)
            message = f"a process of this pod did not exit after an abort ({alarm.reason}: {alarm.message})"
            sigterm_handler.terminate_pod(Failure(FailureReason.HANG, message, node=self._node.name))

        self._abort_listener.listen(on_abort, start_up_seconds=start_up_seconds)

    def report_child_failure(self, rank: int, failure: ProcessFailure, *, out_of_memory: bool) -> None:
        """Report a child process that died silently; others have reported their own failure."""
        what = f"process {failure.local_rank} of this pod"
        problem = classify_exit_code(failure.exitcode, process_name=what, out_of_memory=out_of_memory)
        if problem is None:
            return
        node, slot = self._node.name, self._node.slots[failure.local_rank]
        report_writer.write_failure(Failure(problem.reason, problem.message, rank=rank, node=node, slot=slot))
        self.report_to_gang(Cause(problem.reason, problem.message, node, slot))

    def keep_store_alive(self) -> None:
        """Keep the store alive until the other pods have read the reports, if this pod hosts it."""
        if self._store is not None:
            time.sleep(STATUS_TIMEOUT_SECONDS)
