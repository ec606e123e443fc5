"""Diagnosis of slow runs: each cause is named by what it adds, in made and in published cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import trainwright as tw
from trainwright.accelerators import cluster_of
from trainwright.answer import diagnosis
from trainwright.answer.diagnosis import Diagnosis, diagnose
from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.estimate import iteration_seconds
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.families import Bert, Family, Gpt, Llama, Moe
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime_presets import runtime_preset
from trainwright.search import Problem
from trainwright.strategy import Sharding, Strategy
from trainwright.training import RequestedDtype, training_of

LLAMA_7B = Llama(32, 4096, 32, 4096, 32000, intermediate_size=11008)
LLAMA_70B = Llama(80, 8192, 64, 4096, 128256, intermediate_size=28672, key_value_heads=8)
SMALL = Gpt(24, 1024, 16, 1024, 50304)


def problem_of(
    family: Family,
    machines: dict[str, int] | Cluster,
    batch: int,
    *,
    runtime: str = "megatron",
    dtype: str = "bfloat16",
) -> Problem:
    cluster = machines if isinstance(machines, Cluster) else cluster_of(machines)
    training = training_of(family, {"global_batch_size": batch, "dtype": RequestedDtype(dtype)})
    return tw.problem(
        cluster, training, runtime=runtime_preset(runtime).runtime, limits=tw.Limits(memory_headroom_ratio=0.0)
    )


def plan_of(problem: Problem, words: str) -> Plan:
    stack = problem.model
    return plan_of_shorthand(
        words, problem.cluster.devices, len(stack.layers), problem.global_batch_size, stack.max_tensor_degree
    )


def seconds_of(problem: Problem, plan: Plan) -> float:
    return iteration_seconds(plan, problem.cost_context)


def names(found: Diagnosis) -> list[str]:
    return [cause.name for cause in found.circumstances]


def choices(found: Diagnosis) -> dict[str, str]:
    return {choice.name: choice.what for choice in found.choices}


@pytest.mark.parametrize(
    ("cause", "words", "runtime"),
    [
        (diagnosis.FLOAT32, "pp1 dp2 tp8 mb8", "megatron"),
        (diagnosis.TCP, "pp1 dp16 tp1 mb1 zero3", "torchtitan"),
        (diagnosis.NO_NVLINK, "pp1 dp2 tp8 mb8", "megatron"),
        (diagnosis.EVERY_MICRO_BATCH, "pp1 dp16 tp1 mb1 zero2", "accelerate"),
        (diagnosis.NOT_OVERLAPPED, "pp1 dp16 tp1 mb16", "torchtitan"),
    ],
)
def test_a_run_as_slow_as_with_a_cause_names_the_cause(cause: str, words: str, runtime: str) -> None:
    problem = problem_of(Gpt(24, 2048, 16, 1024, 50304), {"p4d.24xlarge": 2}, 256, runtime=runtime)
    plan = plan_of(problem, words)
    switched = diagnosis.SWITCHES[cause](problem)
    assert switched is not None
    measured = seconds_of(switched, plan)
    sure = replace(diagnose(problem, plan, measured), expected=(0.0, 0.0))  # an estimate without error
    sure = replace(sure, circumstances=tuple(diagnosis.circumstances(sure)))
    named = {found.name: found.explained for found in sure.likely}
    assert named[cause] == pytest.approx(1.0)


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.05])
def test_a_run_that_is_as_fast_as_expected_has_no_cause(ratio: float) -> None:
    problem = problem_of(SMALL, {"p4d.24xlarge": 1}, 64)
    plan = plan_of(problem, "pp1 dp8 tp1 mb8")
    found = diagnose(problem, plan, ratio * seconds_of(problem, plan))
    assert not found.is_slow
    assert (found.circumstances, found.links_bytes_per_second) == ((), None)


def test_a_cause_that_would_be_slower_than_the_run_is_left_out() -> None:
    problem = problem_of(SMALL, {"p4d.24xlarge": 1}, 64)
    plan = plan_of(problem, "pp1 dp8 tp1 mb8")
    predicted = seconds_of(problem, plan)
    switched = diagnosis.SWITCHES[diagnosis.FLOAT32](problem)
    assert switched is not None
    assert seconds_of(switched, plan) > 3 * predicted
    assert diagnosis.FLOAT32 not in names(diagnose(problem, plan, 1.6 * predicted))


def test_bandwidth_that_explains_a_run_is_the_one_with_which_it_was_made() -> None:
    problem = problem_of(LLAMA_7B, {"p5.48xlarge": 4}, 64, runtime="torchtitan")
    plan = plan_of(problem, "pp1 dp32 tp1 mb2 zero3")
    slow = diagnosis.with_links(problem.cluster, 0.05)
    found = diagnose(problem, plan, seconds_of(replace(problem, cluster=slow), plan))
    stated = problem.cluster.nodes[0].network
    assert stated is not None
    assert found.links_bytes_per_second == pytest.approx(0.05 * stated.bandwidth_bytes_per_second, rel=0.02)


def test_70b_in_float32_is_told_from_its_step_time() -> None:
    """20 TFLOP/s a GPU on 16 A100: the log said params_dtype torch.float32."""
    problem = problem_of(LLAMA_70B, {"p4de.24xlarge": 2}, 256)
    plan = plan_of(problem, "pp2 dp1 tp8 mb1 recompute")
    switched = diagnosis.SWITCHES[diagnosis.FLOAT32](problem)
    assert switched is not None
    found = diagnose(problem, plan, 1.05 * seconds_of(switched, plan))
    assert names(found)[0] == diagnosis.FLOAT32
    assert found.circumstances[0].explained > 0.8


def test_recompute_that_memory_does_not_ask_for_is_a_choice() -> None:
    problem = problem_of(SMALL, {"p4d.24xlarge": 1}, 64)
    plan = plan_of(problem, "pp1 dp8 tp1 mb4 recompute")
    found = diagnose(problem, plan, seconds_of(problem, plan))
    assert diagnosis.NEEDLESS_RECOMPUTE in choices(found)
    needed = problem_of(LLAMA_7B, {"p4d.24xlarge": 1}, 64)
    tight = plan_of(needed, "pp1 dp8 tp1 mb4 zero3 recompute")
    assert diagnosis.NEEDLESS_RECOMPUTE not in choices(diagnose(needed, tight, seconds_of(needed, tight)))


def test_too_few_micro_batches_are_a_choice() -> None:
    problem = problem_of(SMALL, {"p4d.24xlarge": 1}, 64)
    plan = plan_of(problem, "pp8 dp1 tp1 mb32")
    found = choices(diagnose(problem, plan, seconds_of(problem, plan)))
    assert diagnosis.FEW_MICRO_BATCHES in found
    assert int(found[diagnosis.FEW_MICRO_BATCHES].split()[0]) > 2


def test_tensor_groups_between_nodes_are_a_choice() -> None:
    problem = problem_of(LLAMA_7B, {"p4d.24xlarge": 2}, 64)
    plan = plan_of(problem, "pp1 dp1 tp16 mb4")
    assert diagnosis.TENSOR_BETWEEN_NODES in choices(diagnose(problem, plan, seconds_of(problem, plan)))


def nodes(count: int, devices: int, accelerator: str, memory: float, *, inside: float, between: float) -> Cluster:
    """Return equal nodes by their bandwidths in bytes a second."""
    network, link = Port(2e-5, between), Port(1e-5, inside) if devices > 1 else None
    machines = tuple(Node(f"n{number}", accelerator, devices, network, link) for number in range(count))
    return Cluster((Accelerator(accelerator, int(memory * 2**30)),), machines)


def test_a_deeper_plan_divides_its_layers_as_exports_do() -> None:
    cluster = nodes(1, 8, "NVIDIA-A100-SXM4-80GB", 79, inside=1e10, between=1e10)
    odd = problem_of(replace(LLAMA_7B, layers=24), cluster, 63)  # rows that replicas do not divide
    plan = plan_of(odd, "pp2 dp1 tp4 mb1")
    found = diagnose(odd, plan, seconds_of(odd, plan))
    (choice,) = (choice for choice in found.choices if choice.name == diagnosis.TENSOR_DEGREE)
    assert choice.what == "tp1 pp8"
    assert choice.plan.pipelines[0].layer_counts == (4, 4, 3, 3, 3, 3, 3, 3)


def test_b2_mixtral_at_half_its_rate_is_slow_and_tensor_groups_of_eight_are_a_choice() -> None:
    """Megatron-LM#756: Mixtral on 16 H100, 130 TFLOP/s a GPU; with EP8 and TP2, grouped GEMM and the alltoall dispatcher 236 to 241.

    128 rows of 2,048 tokens have 2.09e16 FLOPs by Megatron's formula: 10.0 s and 5.45 s. Plans have no expert parallelism, so stages
    take its place.
    """
    mixtral = Moe(32, 4096, 32, 2048, 32000, experts=8, intermediate_size=14336, key_value_heads=8)
    problem = problem_of(mixtral, {"p5.48xlarge": 2}, 128)
    plan = plan_of(problem, "pp8 dp1 tp2 mb1")
    assert not diagnose(problem, plan, 5.45).is_slow
    assert diagnose(problem, plan, 10.0).is_slow
    wide = diagnose(problem, plan_of(problem, "pp2 dp1 tp8 mb1"), 10.0)
    assert choices(wide)[diagnosis.TENSOR_DEGREE] == "tp2 pp8"


def test_b4_zero3_over_ten_gigabit_is_slower_on_two_nodes_and_sharding_less_helps() -> None:
    """QwenLM/Qwen3#773: Qwen2-1.5B with ZeRO-3: 2.46 s on a node of 2 A10, 8.68 s on two nodes."""
    qwen = Llama(28, 1536, 12, 1024, 151936, intermediate_size=8960, key_value_heads=2, tied_embeddings=True)
    one = problem_of(qwen, nodes(1, 2, "NVIDIA-A10G", 22.5, inside=1.2e10, between=1.25e9), 4, runtime="deepspeed")
    two = problem_of(qwen, nodes(2, 2, "NVIDIA-A10G", 22.5, inside=1.2e10, between=1.25e9), 8, runtime="deepspeed")
    plan = plan_of(two, "pp1 dp4 tp1 mb2 zero3")
    seconds = seconds_of(one, plan_of(one, "pp1 dp2 tp1 mb2 zero3"))
    assert seconds_of(two, plan) >= 2 * seconds
    found = diagnose(two, plan, seconds_of(two, plan))
    assert diagnosis.SHARDED_OVER_SLOW_LINKS in choices(found)


def test_b5_a_seventh_of_the_speed_is_tcp_between_nodes() -> None:
    """foundation-model-stack/fms-fsdp#78: Llama-7B, HSDP on 64 H100: 1,000 tokens a second and GPU in place of 7,500."""
    problem = problem_of(LLAMA_7B, {"p5.48xlarge": 8}, 128, runtime="torchtitan")
    problem = replace(problem, runtime=replace(problem.runtime, gradient_dtype=None))  # bfloat16, as in that repository
    plan = hybrid_sharded(problem, rows=2)
    predicted = seconds_of(problem, plan)
    assert 6000 <= 2 * LLAMA_7B.sequence_length / predicted <= 12000
    found = diagnose(problem, plan, 2 * LLAMA_7B.sequence_length / 1000)
    assert diagnosis.TCP in [cause.name for cause in found.likely]
    assert found.links_bytes_per_second is not None
    assert 1.25e9 <= found.links_bytes_per_second <= 4e9  # 10 to 32 Gbit/s


def hybrid_sharded(problem: Problem, rows: int) -> Plan:
    """Return replicas on each node that share their weights there alone: a pipeline for each node."""
    layers, pipelines = len(problem.model.layers), []
    for node in problem.cluster.nodes:
        devices = tuple(Device(node.name, slot) for slot in range(node.devices))
        strategy = Strategy(1, node.devices, sharding=Sharding.ZERO3)
        stage = Stage(devices, (LayerRun(0, layers, strategy, (rows,) * node.devices),))
        pipelines.append(Pipeline(1, rows * node.devices, (stage,)))
    return Plan(layers, problem.global_batch_size, tuple(pipelines))


def test_b6_70b_gains_by_a_smaller_tensor_degree() -> None:
    """Megatron-LM#1059: 32 nodes of 8 A800, tp8 pp2 at 20 % of the peak; maintainers: smaller tp, larger pp."""
    cluster = nodes(32, 8, "NVIDIA-A100-SXM4-80GB", 79, inside=1.5e11, between=1e11)
    problem = problem_of(LLAMA_70B, cluster, 512)
    plan = plan_of(problem, "pp2 dp16 tp8 mb1 zero1 recompute")
    found = diagnose(problem, plan, seconds_of(problem, plan))
    choice = next(choice for choice in found.choices if choice.name == diagnosis.TENSOR_DEGREE)
    assert choice.saved_seconds > 0
    assert choice.what.startswith(("tp4", "tp2", "tp1"))


def test_b7_stages_beat_tensor_groups_with_many_micro_batches() -> None:
    """Megatron-LM#258: BERT on a DGX A100: PP8 is more than 30 % faster than TP8 with many micro-batches."""
    bert = Bert(48, 2560, 40, 512, 30592, intermediate_size=10240)
    problem = problem_of(bert, {"p4d.24xlarge": 1}, 256)
    tensor, staged = (seconds_of(problem, plan_of(problem, words)) for words in ("pp1 dp1 tp8 mb4", "pp8 dp1 tp1 mb4"))
    assert tensor > staged
    found = diagnose(problem, plan_of(problem, "pp1 dp1 tp8 mb4"), tensor)
    assert diagnosis.TENSOR_DEGREE in choices(found)


@pytest.mark.parametrize("gigabits", [140, 340])
def test_b8_three_degrees_beat_zero3_at_80b_on_slow_links(gigabits: int) -> None:
    """DeepSpeed#2928: IDEFICS-80B with ZeRO-3 at 90 TFLOP/s on 340 Gbit/s, BLOOM in 3D at 150 on 140 Gbit/s."""
    llama = replace(LLAMA_70B, layers=92, sequence_length=2048)
    problem = problem_of(
        llama, nodes(16, 8, "NVIDIA-A100-SXM4-80GB", 79, inside=2.5e11, between=gigabits * 1.25e8), 512
    )
    zero3, staged = (
        seconds_of(problem, plan_of(problem, words))
        for words in ("pp1 dp128 tp1 mb1 zero3 recompute", "pp4 dp8 tp4 mb1 zero1 recompute")
    )
    assert staged < zero3


@pytest.mark.parametrize(("accelerator", "memory"), [("NVIDIA-TITAN-RTX", 24)])
def test_b9_two_gpus_without_nvlink_are_slower_and_it_is_named(accelerator: str, memory: float) -> None:
    """transformers#9371: GPT-2 by DDP on 2 Titan RTX: 101 s with NVLink, 131 s without, 102 s on one."""
    gpt = Gpt(12, 768, 12, 1024, 50257)
    with_bridge = problem_of(
        gpt, nodes(1, 2, accelerator, memory, inside=5e10, between=1e9), 8, runtime="accelerate", dtype="float16"
    )
    without = problem_of(
        gpt, nodes(1, 2, accelerator, memory, inside=6e9, between=1e9), 8, runtime="accelerate", dtype="float16"
    )
    plan = plan_of(with_bridge, "pp1 dp2 tp1 mb4")
    assert seconds_of(without, plan) > 1.05 * seconds_of(with_bridge, plan)
    found = diagnose(with_bridge, plan, 3 * seconds_of(with_bridge, plan))
    assert any(diagnosis.NO_NVLINK in name for name in names(found))


def test_choices_are_faster_by_what_they_say() -> None:
    problem = problem_of(LLAMA_7B, {"p4d.24xlarge": 2}, 64)
    for words in ("pp2 dp1 tp8 mb8 recompute", "pp4 dp4 tp1 mb4 recompute", "pp1 dp16 tp1 mb1 zero3"):
        plan = plan_of(problem, words)
        found = diagnose(problem, plan, seconds_of(problem, plan))
        saved: Sequence[float] = [choice.saved_seconds for choice in found.choices]
        assert saved == sorted(saved, reverse=True)
        for choice in found.choices:
            assert seconds_of(problem, choice.plan) == pytest.approx(choice.seconds)
            assert choice.seconds < seconds_of(problem, plan)
