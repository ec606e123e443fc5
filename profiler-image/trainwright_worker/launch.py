"""A pod's first process: starts one process a device and joins the other pods."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.orders import NODE_NAME_VARIABLE, Cause, Failure, FailureReason, Gang, GangNode
from trainwright_worker import output, process
from trainwright_worker.bell import PATIENCE_SECONDS, Bell
from trainwright_worker.failures import WorkerError, classify, unspoken
from trainwright_worker.kernel import out_of_memory_kills
from trainwright_worker.last_words import within
from trainwright_worker.pod_end import PodEnd
from trainwright_worker.seat import node_rank

_RUN_ID = "trainwright"
_TALK_SECONDS = 2.0
_OWN_END_SECONDS = 10.0
"""Processes that hear an alarm have ended by then."""


def main(gang: Gang, order_path: Path, address: str | None, port: int | None, pod_end: PodEnd) -> int:
    """Run this pod's processes to their end. Returns the exit code; on failure the reason is written out."""
    kills = out_of_memory_kills()
    # To write an error with its traceback, torch's formatter loads its compiler, which takes seconds; it is told here.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lambda record: not record.exc_info)
    try:
        place = node_rank(gang, os.environ)
        config = _config(gang, place, os.environ, address, port)
        pod = _Pod(gang, place, config.rdzv_endpoint)
        pod_end.tell_others = pod.tell
        pod.heed_alarm(pod_end, gang.deadline_seconds)
        elastic_launch(config, process.main)(str(order_path))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            pod.child_failed(rank, failure, out_of_memory=out_of_memory_kills() > kills)
        pod.stay()
        return 1
    except SignalException:
        pod_end.wait()
        return 1
    except (WorkerError, OSError, RuntimeError, ValueError) as error:
        problem = classify(error)
        output.failure(Failure(problem.reason, problem.message, node=os.environ.get(NODE_NAME_VARIABLE)))
        return 1
    return 0


def _config(
    gang: Gang, place: int, environment: Mapping[str, str], address: str | None, port: int | None
) -> LaunchConfig:
    """The configuration of torchrun: a static rendezvous at the gang's first node, ranks in the order of gang.nodes.

    Everything is given here. The variables that the training operator injects (PET_*, RANK, WORLD_SIZE) count pods
    within one PyTorchJob, and a gang may span several; of them only the master's address is used, as a default.
    """
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
        shutdown_timeout=3,
    )


class _Pod:
    """What this pod's launcher says to the others of the gang.

    The first node's launcher hosts the store in which the gang meets. It makes it here, and torchrun, in the same
    process, shares it: so it lives on for a moment after torchrun gave up, in which the others learn why.
    """

    def __init__(self, gang: Gang, place: int, endpoint: str) -> None:
        self._node: GangNode = gang.nodes[place]
        address, _, port = endpoint.rpartition(":")
        self._bell = Bell(address, int(port))
        self._store: Any = None
        if place == 0 and len(gang.nodes) > 1:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                int(port),
                is_master=True,
                multi_tenant=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=gang.deadline_seconds),
            )

    def tell(self, cause: Cause) -> None:
        """Let the others hear of it; they may be gone."""

        def talk() -> None:
            board = self._bell.board()
            board.tell_of_pod(cause)
            board.ring(cause)

        within(_TALK_SECONDS, talk)

    def heed_alarm(self, pod_end: PodEnd, start_up_seconds: float) -> None:
        """End this pod some time after an alarm that its processes should have heard, too."""

        def heard(alarm: Cause) -> None:
            time.sleep(_OWN_END_SECONDS)
            message = f"a process of this pod did not end by itself after an alarm ({alarm.reason}: {alarm.message})"
            pod_end.from_inside(Failure(FailureReason.HANG, message, node=self._node.name))

        self._bell.listen(heard, start_up_seconds=start_up_seconds)

    def child_failed(self, rank: int, failure: ProcessFailure, *, out_of_memory: bool) -> None:
        """A process that ended in words of its own has told its reason; one that could not, has it told here."""
        what = f"process {failure.local_rank} of this pod"
        problem = unspoken(failure.exitcode, what=what, out_of_memory=out_of_memory)
        if problem is None:
            return
        node, slot = self._node.name, self._node.slots[failure.local_rank]
        output.failure(Failure(problem.reason, problem.message, rank=rank, node=node, slot=slot))
        self.tell(Cause(problem.reason, problem.message, node, slot))

    def stay(self) -> None:
        """Until the others have read what was told, where this pod hosts the store."""
        if self._store is not None:
            time.sleep(PATIENCE_SECONDS)
