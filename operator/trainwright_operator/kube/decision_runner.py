"""Decisions on large plans in a process of their own, so that the loop stays free for watches and other plans."""

from __future__ import annotations

import asyncio
import pickle
from datetime import datetime
from typing import Final

from trainwright_operator.decision_process import LENGTH_BYTES, DecisionRequest, packed_nodes
from trainwright_operator.flow.actions import Action
from trainwright_operator.flow.quarantine import DecisionError
from trainwright_operator.flow.snapshot import NodeFacts, Snapshot
from trainwright_operator.kube.child_process import start_module

LARGE_BYTES: Final = 100_000
"""Size of a plan's stored documents from which it is large: the discovery of some 600 nodes. On 1,000 nodes storing the
cluster takes 0.2 s. Kept measurements do not count: few of them are parsed."""
LARGE_NODES: Final = 600
"""Number of nodes from which their first discovery is large."""
_DEADLINE_SECONDS: Final = 60.0


def is_large(snapshot: Snapshot) -> bool:
    """Return whether a decision may hold the loop for too long."""
    if not snapshot.stored and len(snapshot.nodes) >= LARGE_NODES:
        return True  # they are about to be discovered
    return sum(len(text) for config_map in snapshot.stored for text in config_map.data.values()) >= LARGE_BYTES


class DecisionRunner:
    """Process that starts with the first large plan, and anew after it ended."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._nodes: tuple[NodeFacts, ...] | None = None
        self._packed = b""

    async def decide(self, snapshot: Snapshot, now: datetime) -> list[Action]:
        """Return the actions as `flow.decide` does. Raise DecisionError where that raises, or the process ends."""
        async with self._turn:
            if self._nodes is not snapshot.nodes:
                self._nodes, self._packed = snapshot.nodes, packed_nodes(snapshot)
            request = DecisionRequest.of(snapshot, self._packed, now)
            answer = await self._try(request)
            if answer is None:
                # Documents cached for former decisions may have filled the process's memory.
                answer = await self._try(request)
        if answer is None:
            raise DecisionError(
                "the process that decides on large plans ended or did not answer, perhaps for lack of memory; raise the "
                "operator's memory limit (resources.limits.memory), or use fewer nodes with devices.max"
            )
        if isinstance(answer, str):
            raise DecisionError(answer)
        return answer

    async def _try(self, request: DecisionRequest) -> list[Action] | str | None:
        """Return the answer; None, without the process, where that ends or takes too long."""
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                return await self._ask(request)
        except TimeoutError:
            await self.stop()
            raise DecisionError(
                f"the process that decides on large plans gave no answer in {_DEADLINE_SECONDS:.0f} s"
            ) from None
        except (OSError, EOFError):
            await self.stop()
            return None
        except BaseException:
            await self.stop()  # its answer would be taken for that to the next request
            raise

    async def _ask(self, request: DecisionRequest) -> list[Action] | str:
        if self._process is None or self._process.returncode is not None:
            self._process = await start_module("trainwright_operator.decision_process", errors=None)
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        requests.write(pickle.dumps(request))
        await requests.drain()
        length = int.from_bytes(await answers.readexactly(LENGTH_BYTES), "big")
        answer: list[Action] | str = pickle.loads(await answers.readexactly(length))  # noqa: S301 - from our process
        return answer

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
