"""Simulated worlds in which several trials share a gang, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from flow_reports import parts_of, report_of
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright.worker_api import Failure, FailureReason, TrialSeriesTask, TrialTask
from trainwright_operator.flow.documents.outcome import GangOutcome
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials
from trainwright_worker import validation

OUT_OF_MEMORY = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB", rank=1))


def world_of(per_gang: int, annotations: dict[str, str] | None = None, **trials: object) -> World:
    """Return a small world with few, quick trials."""
    spec = spec_of(
        search={"planner": "Amp", "limits": {"maxTensorDegree": 1}},
        trials={"topK": 3, "perGang": per_gang, **trials},
    )
    nodes = (node("n1", devices=1), node("n2", "emulated-t4", devices=1))
    return World(spec=spec, nodes=nodes, annotations=annotations or {})


def gangs(world: World) -> list[str]:
    """Return the gangs of trials, in the order in which their tasks were created."""
    orders = [name.removesuffix("-order").partition("-")[2] for name in world.created if name.endswith("-order")]
    known = [name.partition("-")[2] for name in orders]
    return [name for name in known if name.startswith(("candidate", "baseline"))]


def orders_of(world: World) -> list[TrialTask | TrialSeriesTask]:
    """Collect the tasks of trials, and check that workers would accept them."""
    found: list[TrialTask | TrialSeriesTask] = []

    def seen(order) -> None:
        validation.check_task(order)
        if isinstance(order, TrialTask | TrialSeriesTask):
            found.append(order)

    world.log = seen
    return found


def states(world: World) -> dict[str, str]:
    return {trial.name: str(trial.state) for trial in world.status.trials}


def run_breaking(world: World, is_broken: Callable[[Plan], bool], *, tells: bool = False, lags: float = 0.0) -> None:
    """Run to the end; pods that are to run a broken plan fail.

    With `tells` the main process has reported the trials before it; its own pod fails `lags` seconds after the others.
    """

    def look() -> bool:
        for name, pod in world.pods.items():
            since = pod.started_at or world.now
            running = (world.now - since).total_seconds()
            order = world.order_of(pod) if pod.phase == "Running" and running > 4 else None
            plans = order.plans if isinstance(order, TrialSeriesTask) else [getattr(order, "plan", None)]
            broken = next((number for number, plan in enumerate(plans) if plan is not None and is_broken(plan)), None)
            is_speaker = pod.reports
            if broken is None or (is_speaker and running <= 4 + lags):
                continue
            ended = replace(pod.containers[0], running_since=None, started_at=pod.started_at,
                            finished_at=world.now, exit_code=1, termination_message=OUT_OF_MEMORY)  # fmt: skip
            log = None
            if is_speaker:
                told = report_of(order).trials[:broken] if isinstance(order, TrialSeriesTask) and tells else ()
                log = f"starting\n{parts_of(told)}"
            world.pods[name] = replace(pod, phase="Failed", containers=(ended,), log=log)
        return world.succeeded != "Unknown"

    world.run(until=look)


def planned_in(world: World) -> list[PlannedTrial]:
    world.run(until=lambda: bool(world.status.trials))
    document = world.stored[world.status.candidates_ref.config_map].data["document.json"]
    return list(documents.loads(document, PlannedTrials).trials)


def outcomes(world: World, names: Iterable[str]) -> list[GangOutcome]:
    base = next(iter(world.created)).rpartition("-")[0]
    return [documents.loads(world.stored[f"{base}-{name}-result"].data["outcome.json"], GangOutcome) for name in names]
