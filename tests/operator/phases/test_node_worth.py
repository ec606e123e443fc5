"""Worth of each type of node, and a winner's figures per device, in the status."""

from __future__ import annotations

from typing import Any

import pytest
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright_operator.flow.documents.planned_trials import PlannedTrials

MIXED = (node("n1"), node("n2", "emulated-t4"))


def planned(world: World) -> PlannedTrials:
    world.run(until=lambda: world.status.candidates_ref is not None)
    assert world.status.candidates_ref is not None
    stored = world.stored[world.status.candidates_ref.config_map]
    found: PlannedTrials = documents.loads(stored.data["document.json"], PlannedTrials)
    return found


def test_status_says_what_each_type_of_node_is_worth() -> None:
    world = World(spec=spec_of(devices={"pricesPerHour": {"emulated-v100": 3.0}}), nodes=MIXED)
    best = min(trial.predicted_seconds for trial in planned(world).trials if trial.name.startswith("candidate"))
    worths = {one.accelerator: one for one in world.status.node_worth or ()}
    assert set(worths) == {"emulated-v100", "emulated-t4"}
    for one in worths.values():
        assert one.predicted_seconds is not None
        assert one.slowdown == pytest.approx(one.predicted_seconds / best - 1, abs=1e-3)
    assert {name: (one.devices, one.price_per_hour) for name, one in worths.items()} == {
        "emulated-v100": (2, 6.0),
        "emulated-t4": (2, None),
    }
    alone = World(spec=world.spec, nodes=MIXED[:1])
    without = planned(alone).best.predicted_seconds
    assert worths["emulated-t4"].predicted_seconds == pytest.approx(without, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": MIXED[:1]},
        {
            "search": {"planner": "Megatron", "objective": "Cost"},
            "devices": {"pricesPerHour": {"emulated-v100": 3.0, "emulated-t4": 1.0}},
        },
    ],
    ids=["one type", "another objective"],
)
def test_status_is_silent_where_nothing_is_compared(changes: dict[str, Any]) -> None:
    nodes = changes.pop("nodes", MIXED)
    world = World(spec=spec_of(**changes), nodes=nodes)
    assert planned(world).node_worth == ()
    assert "nodeWorth" not in world.status.dump()


@pytest.mark.parametrize("top", [0, 1])
def test_winner_has_tokens_per_second_and_device(top: int) -> None:
    world = World(spec=spec_of(trials={"topK": top, "baseline": "None"}), nodes=MIXED)
    winner = world.run().winner
    assert winner is not None
    plan: Plan = documents.parse(winner.plan, Plan)
    seconds = winner.measured_seconds or winner.predicted_seconds
    assert (winner.measured_seconds is None) == (top == 0)
    assert winner.tokens_per_second_per_device == pytest.approx(8 * 64 / seconds / len(plan.devices), rel=1e-3)
    assert winner.model_flop_utilisation is not None
    if top:
        (trial,) = world.status.trials
        assert trial.tokens_per_second_per_device == winner.tokens_per_second_per_device
