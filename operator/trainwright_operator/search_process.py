"""The search's own process: a request as JSON on standard input, the plans to try on standard output.

Exit 0: standard output holds a `PlannedTrials` document. Exit 3: there is no feasible plan, and standard output says
why. Anything else, 4 for want of memory among them: the last line of standard error says what went wrong.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Final

from trainwright.search import NoFeasiblePlan
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.search_run import search

EXIT_INFEASIBLE: Final = 3
EXIT_OUT_OF_MEMORY: Final = 4
CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_SHARE: Final = 0.6
"""Of the container's memory, for all searches; the rest is the operator's own, and what they have before they begin."""
_NICENESS = 10
"""A search takes a whole core for a while; what measures on the same machine goes first."""


def main(concurrent: int) -> int:
    """Answer one request, as one of so many searches at a time."""
    os.nice(_NICENESS)
    gc.freeze()  # what imports made stays: collections need not walk through it
    allowed = allowed_bytes(CONTAINER_LIMIT, concurrent)
    if allowed is not None:
        bound_memory(allowed)
    request = PlanningRequest(**json.load(sys.stdin))
    try:
        answer = search(request)
    except NoFeasiblePlan as refusal:
        answer = str(refusal)
        sys.stdout.write(answer)
        return EXIT_INFEASIBLE
    except MemoryError:
        share = f"the {allowed >> 20} MiB that it may take" if allowed is not None else "there is"
        sys.stderr.write(
            f"it needs more memory than {share}; raise the operator's memory limit (resources.limits.memory), "
            "or bound the search with search.limits.maxTensorDegree or devices.max\n"
        )
        return EXIT_OUT_OF_MEMORY
    sys.stdout.write(answer)
    return 0


def allowed_bytes(container_limit: Path, concurrent: int) -> int | None:
    """Bytes that each of so many searches may take of their container's memory; None where it has no limit."""
    try:
        text = container_limit.read_text().strip()
    except OSError:
        return None  # no control groups of version 2: there the kernel ends the process that takes most, alone
    return int(int(text) * _SHARE / concurrent) if text.isdecimal() else None


def bound_memory(allowed: int) -> None:
    """Let this process take so many bytes more than it has now.

    With control groups of version 2 the kernel ends a container whole when its memory is used up, so an operator whose
    search asks for too much would begin it anew for ever. With the limit the search alone ends.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + allowed
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
