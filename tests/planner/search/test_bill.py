"""Price of plans: whole nodes unless the cluster says otherwise; price and days of a whole run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trainwright import documents, library
from trainwright.accelerators.machines import cluster_of
from trainwright.answer import answer_of_plan
from trainwright.cli import app
from trainwright.cluster import Cluster, Device, PricedBy, price_per_hour
from trainwright.families import Gpt
from trainwright.runtime import Runtime
from trainwright.search import Limits, NoFeasiblePlan, Objective, Problem, SearchControl, run
from trainwright.training import RequestedDtype, Training
from trainwright.training_run import SECONDS_PER_DAY, TrainingRun, days

P4D_PRICE = 21.957642
"""Price of a p4d.24xlarge for an hour, by its data sheet."""


@pytest.fixture(scope="module")
def rented() -> Problem:
    """GPT-2 XL on one p4d, two p3.8xlarge and two g4dn.12xlarge."""
    cluster = cluster_of({"p4d.24xlarge": 1, "p3.8xlarge": 2, "g4dn.12xlarge": 2})
    training = Training(
        gpt=Gpt(layers=48, hidden_size=1600, heads=25, sequence_length=1024, vocabulary_size=50304),
        global_batch_size=64,
        dtype=RequestedDtype.BFLOAT16,
    )
    runtime = Runtime(host_seconds_per_operator=30e-6)  # a host that bounds no layer
    problem = library.problem(cluster, training, runtime=runtime, limits=Limits(memory_headroom_ratio=0.08))
    a100 = replace(problem.limits, spare=("Tesla-V100-SXM2-16GB", "Tesla-T4"), objective=Objective.COST)
    return replace(problem, limits=a100)


def by_device(problem: Problem) -> Problem:
    return replace(problem, cluster=replace(problem.cluster, priced_by=PricedBy.DEVICE))


def test_the_cheapest_plan_uses_the_whole_machine_that_is_paid_for(rented: Problem) -> None:
    control = SearchControl(effort=0.1)
    (whole,) = run("auto", rented, top=1, control=control)
    (part,) = run("auto", by_device(rented), top=1, control=control)
    assert whole.price_per_hour == pytest.approx(P4D_PRICE)
    assert len(whole.plan.devices) == 8
    assert len(part.plan.devices) == 4  # half of a machine, which nobody rents
    assert part.price_per_hour == pytest.approx(P4D_PRICE / 2)
    bill = price_per_hour(rented.cluster, part.plan.devices)
    assert bill == pytest.approx(P4D_PRICE)
    assert whole.estimate.iteration_seconds < part.estimate.iteration_seconds


@pytest.mark.parametrize("planner", ["auto", "megatron", "amp"])
@pytest.mark.parametrize("priced_by", PricedBy)
def test_no_plan_of_a_front_is_dominated_by_the_bill(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], planner: str, priced_by: PricedBy
) -> None:
    cluster = make_cluster((("fast", 4), ("slow", 2), ("fast", 2)))
    prices = {"emulated-fast": 3.0, "emulated-slow": 0.5}
    problem = make_problem(replace(priced(cluster, prices), priced_by=priced_by), layers=4, batch=8)
    problem = replace(problem, limits=Limits(objective=Objective.PARETO))
    front = run(planner, problem, control=SearchControl(effort=0.1))
    points = []
    for candidate in front:
        devices = candidate.plan.devices
        if priced_by is PricedBy.NODE:
            devices = tuple(device for device in cluster.devices if device.node in candidate.plan.nodes)
        price = sum(prices[cluster.node(device.node).accelerator] for device in devices)
        seconds = candidate.estimate.iteration_seconds
        assert candidate.price_per_row == pytest.approx(price / 3600 * seconds / 8)
        points.append((seconds, price * seconds))
    assert not any(one[0] >= other[0] and one[1] >= other[1] for one, other in product(points, points) if one != other)


def test_nodes_of_one_accelerator_have_prices_of_their_own(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]
) -> None:
    cluster = priced(make_cluster((("fast", 2), ("fast", 2))), {"emulated-fast": 3.0})
    dear, cheap = cluster.nodes
    cluster = replace(cluster, nodes=(dear, replace(cheap, price_per_hour=1.0)))
    assert [price_per_hour(cluster, [Device(node.name, 0)]) for node in cluster.nodes] == [6.0, 1.0]
    by_devices = replace(cluster, priced_by=PricedBy.DEVICE)
    assert [price_per_hour(by_devices, [Device(node.name, 0)]) for node in cluster.nodes] == [3.0, 0.5]
    problem = replace(make_problem(cluster, layers=4, batch=8), limits=Limits(objective=Objective.COST))
    (best,) = run("auto", problem, top=1, control=SearchControl(effort=0.1))
    assert best.plan.nodes == (cheap.name,)
    assert best.price_per_hour == 1.0


def test_a_node_may_have_the_only_price(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster((("fast", 2), ("fast", 2)))
    first, second = cluster.nodes
    cluster = replace(cluster, nodes=(replace(first, price_per_hour=0.0), second))
    assert price_per_hour(cluster, [Device(first.name, 1)]) == 0.0
    assert price_per_hour(cluster, [Device(second.name, 0)]) is None
    problem = replace(make_problem(cluster, layers=4, batch=8), limits=Limits(objective=Objective.COST))
    with pytest.raises(ValueError, match="planning for cost needs the price of every accelerator, and emulated-fast"):
        run("amp", problem)
    assert documents.loads(documents.dumps(cluster), Cluster) == cluster
    with pytest.raises(ValueError, match=f"node {first.name} has a negative price_per_hour: -1"):
        replace(first, price_per_hour=-1)


def test_machines_of_different_prices_keep_them() -> None:
    both = cluster_of({"p4d.24xlarge": 1, "a2-highgpu-8g": 1, "p3.8xlarge": 1})
    assert [node.price_per_hour for node in both.nodes] == [P4D_PRICE, 29.39, None]
    assert price_per_hour(both, both.devices) == pytest.approx(P4D_PRICE + 29.39 + 12.24)


def priced(cluster: Cluster, prices: Mapping[str, float]) -> Cluster:
    """Return the cluster with prices per hour of a device, by accelerator."""
    accelerators = tuple(
        replace(accelerator, price_per_hour=prices[accelerator.name]) for accelerator in cluster.accelerators
    )
    return replace(cluster, accelerators=accelerators)


def test_node_worth_has_the_price_of_whole_nodes(rented: Problem) -> None:
    mixed = replace(rented, limits=replace(rented.limits, spare=("Tesla-T4",), objective=Objective.TIME))
    answer = library.ask(mixed, "megatron", node_worth=True)
    assert {worth.accelerator: worth.price_per_hour for worth in answer.node_worths} == pytest.approx(
        {"NVIDIA-A100-SXM4-40GB": P4D_PRICE, "Tesla-V100-SXM2-16GB": 2 * 12.24}
    )


def test_price_by_devices_is_in_documents_only_where_it_is_chosen(rented: Problem) -> None:
    assert "priced_by" not in documents.dump(rented.cluster)
    assert documents.loads(documents.dumps(by_device(rented).cluster), Cluster).priced_by is PricedBy.DEVICE


def test_the_cheapest_plan_that_ends_in_time_uses_more_nodes_than_pay_for_themselves(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]
) -> None:
    cluster = priced(make_cluster((("fast", 2), ("slow", 2))), {"emulated-fast": 9.0, "emulated-slow": 0.5})
    problem = make_problem(cluster, layers=4, batch=8)
    cheapest, fastest = (
        run("auto", replace(problem, limits=Limits(objective=objective)), top=1, control=SearchControl(effort=0.1))[0]
        for objective in (Objective.COST, Objective.TIME)
    )
    slow, fast = cheapest.estimate.iteration_seconds, fastest.estimate.iteration_seconds
    assert fast < slow

    def within(iteration_seconds: float) -> Limits:
        return Limits(objective=Objective.COST, run=TrainingRun(8_000, 1000 * iteration_seconds))

    (in_time,) = run(
        "auto", replace(problem, limits=within((slow + fast) / 2)), top=1, control=SearchControl(effort=0.1)
    )
    assert in_time.estimate.iteration_seconds <= (slow + fast) / 2
    assert in_time.price_per_row > cheapest.price_per_row
    (unhurried,) = run("auto", replace(problem, limits=within(2 * slow)), top=1, control=SearchControl(effort=0.1))
    assert unhurried.price_per_row == pytest.approx(cheapest.price_per_row)
    with pytest.raises(NoFeasiblePlan, match=r"no plan that was found ends the run within .* hours; the fastest takes"):
        run("auto", replace(problem, limits=within(fast / 2)), top=1, control=SearchControl(effort=0.1))


def test_days_and_price_of_a_run(rented: Problem) -> None:
    plan = library.plan_in_words("dp8 mb1 zero2", rented)
    candidate = answer_of_plan(rented, plan).best
    whole = TrainingRun(1e6)
    seconds = 15_625 * candidate.estimate.iteration_seconds
    assert candidate.run_seconds(whole) == pytest.approx(seconds)
    assert candidate.run_price(whole) == pytest.approx(P4D_PRICE * seconds / 3600)
    assert [days(value * SECONDS_PER_DAY) for value in (0.5, 1, 41.26, 12_345)] == [
        "12 hours", "1 day", "41.3 days", "12,345 days",
    ]  # fmt: skip


MODEL = """
gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 50304}
global_batch_size: 32
"""


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    cluster, model = tmp_path / "cluster.yaml", tmp_path / "model.yaml"
    cluster.write_text(documents.dumps(cluster_of({"p3.8xlarge": 2, "g4dn.12xlarge": 1})))
    model.write_text(MODEL)
    return ["--planner", "megatron", "--cluster", str(cluster), "--model", str(model)]


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_the_answer_says_what_is_priced_and_what_the_run_takes(inputs: list[str]) -> None:
    shown = plan(*inputs, "--objective", "cost", "--tokens", "1e9", "--output", "json")
    answer = json.loads(shown.stdout)
    best = answer["candidates"][0]
    assert answer["priced_by"] == "node"
    iterations = -(-1e9 // (32 * 1024))
    assert best["run_seconds"] == pytest.approx(iterations * best["predicted_seconds"])
    assert best["run_price"] == pytest.approx(best["price_per_row"] * 32 * iterations)
    table = plan(*inputs, "--objective", "cost", "--tokens", "1e9").stdout.replace("\n", " ")
    assert "by the price of whole nodes" in " ".join(table.split())
    assert "The run of 30,518 iterations takes" in " ".join(table.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--within", "3"], "--within needs --tokens"),
        *((["--tokens", odd], f"--tokens must be finite and above 0, got {odd}") for odd in ("-1", "inf", "nan")),
        *(
            (["--tokens", "1e9", "--within", odd], f"--within must be finite and above 0 days, got {odd}")
            for odd in ("0", "inf", "nan")
        ),
        (["--tokens", "1e9", "--within", "1", "--node-worth"], "leave out --objective, --within and"),
        (["--tokens", "1e12", "--within", "1"], "no plan that was found ends the run within 1 day"),
    ],
)
def test_a_run_that_cannot_be_is_refused(inputs: list[str], options: list[str], sentence: str) -> None:
    shown = plan(*inputs, *options)
    assert shown.exit_code != 0
    assert sentence in shown.stderr
