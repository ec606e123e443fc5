"""Sequence of the phases: the condition that each sets, the word that is printed meanwhile, and its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import Phase
from trainwright_operator.flow.phase import Findings, PhaseResult, ReconcileContext
from trainwright_operator.flow.phases import (
    acceptance,
    discovery,
    links,
    node_changes,
    planning,
    profiling,
    result,
    trials,
)


class PlanPhase(NamedTuple):
    """Phase of a plan.

    Attributes:
        printed: phase in the printed column while the condition is the first that is not True.
        advances: functions that run one after another while each is done.
    """

    condition: ConditionType
    printed: Phase
    advances: tuple[Callable[[ReconcileContext, Findings], PhaseResult], ...]


PHASES: Final = (
    PlanPhase(ConditionType.ACCEPTED, Phase.PENDING, (acceptance.accept, acceptance.discard_transient_failures)),
    PlanPhase(
        ConditionType.NODES_DISCOVERED,
        Phase.DISCOVERING,
        (discovery.discover, discovery.check_prices, node_changes.watch_nodes),
    ),
    PlanPhase(ConditionType.LINKS_MEASURED, Phase.MEASURING_LINKS, (links.measure_links,)),
    PlanPhase(ConditionType.PROFILED, Phase.PROFILING, (profiling.profile,)),
    PlanPhase(ConditionType.PLANNED, Phase.PLANNING, (planning.store_cluster, planning.plan)),
    PlanPhase(ConditionType.TRIALS_COMPLETED, Phase.TRYING, (trials.try_plans,)),
    PlanPhase(ConditionType.SUCCEEDED, Phase.TRYING, (result.select_winner,)),
)
PHASE_CONDITIONS: Final = tuple(phase.condition for phase in PHASES if phase.condition is not ConditionType.SUCCEEDED)
"""Conditions of the phases before the answer, in order."""
