"""The search's own process: a request as JSON on standard input, the plans to try on standard output.

Exit 0: standard output holds a `PlannedTrials` document. Exit 3: there is no feasible plan, and standard output says
why. Anything else: standard error says what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

from trainwright.search import NoFeasiblePlan
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.search_run import search

EXIT_INFEASIBLE: Final = 3
_NICENESS = 10
"""A search takes a whole core for a while; what measures on the same machine goes first."""


def main() -> int:
    """Answer one request."""
    os.nice(_NICENESS)
    request = PlanningRequest(**json.load(sys.stdin))
    try:
        answer = search(request)
    except NoFeasiblePlan as refusal:
        answer = str(refusal)
        sys.stdout.write(answer)
        return EXIT_INFEASIBLE
    sys.stdout.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
