"""Diagnosis of a slow run, as sentences, as a table and as fields."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Group

from trainwright import documents
from trainwright.answer.diagnosis import (
    EVERY_MICRO_BATCH,
    FEW_MICRO_BATCHES,
    FLOAT32,
    LEAST_SHARE,
    NEEDLESS_RECOMPUTE,
    NO_NVLINK,
    NOT_OVERLAPPED,
    SHARDED_OVER_SLOW_LINKS,
    TCP,
    TCP_BYTES_PER_SECOND,
    TENSOR_BETWEEN_NODES,
    TENSOR_DEGREE,
    Choice,
    Circumstance,
    Diagnosis,
)
from trainwright.report import units
from trainwright.report.tables import add_row, new_table, titled

MAX_OTHERS: Final = 2
"""Other circumstances that sentences name; the table has all."""
CHECKS: Final = {
    FLOAT32: "look for the format of the weights in the log (params_dtype, torch_dtype), and give --bf16 or mixed_precision",
    TCP: "NCCL_DEBUG=INFO must say NET/IB or NET/OFI (aws-ofi-nccl), not NET/Socket; check rdma devices in the container",
    NO_NVLINK: "nvidia-smi topo -m must show NV between the GPUs, and NCCL_DEBUG=INFO P2P/CUMEM or P2P/IPC, not SHM",
    NOT_OVERLAPPED: "Megatron: --overlap-grad-reduce; DeepSpeed: overlap_comm; else DDP's or FSDP's hooks",
    EVERY_MICRO_BATCH: "sum once an iteration: no_sync(), set_requires_gradient_sync(False), accelerator.accumulate()",
}
"""How to see whether a circumstance is so, and what to do."""
REMEDIES: Final = {
    TENSOR_BETWEEN_NODES: "keep tensor groups inside nodes",
    TENSOR_DEGREE: "divide layers among fewer devices",
    FEW_MICRO_BATCHES: "cut the batch into more micro-batches, so that fewer stages wait",
    NEEDLESS_RECOMPUTE: "keep the activations",
    SHARDED_OVER_SLOW_LINKS: "shard less, or accumulate more micro-batches between gathers",
}


def diagnosis_sentences(diagnosis: Diagnosis) -> list[str]:
    """Return what was measured against what was predicted, the causes, and what no cause explains."""
    return [_whole(diagnosis), *_causes(diagnosis), *_links(diagnosis), *map(_choice, diagnosis.choices)]


def _whole(diagnosis: Diagnosis) -> str:
    measured, predicted = diagnosis.measured_seconds, diagnosis.candidate.estimate.iteration_seconds
    least, greatest = map(units.seconds, diagnosis.expected)
    took = f"An iteration took {units.seconds(measured)}, {measured / predicted:.2f} times the predicted {units.seconds(predicted)}"
    if diagnosis.is_slow:
        return f"{took} ({least} to {greatest} are expected): the run is slow."
    if measured < diagnosis.expected[0]:
        return (
            f"{took} ({least} to {greatest} are expected): the run is faster; check the unit, the batch and the model."
        )
    return f"{took}, within what is expected ({least} to {greatest}): what can be gained lies in the plan."


def _causes(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.is_slow:
        return []
    if not diagnosis.circumstances:
        return [
            (
                "No circumstance that is estimated explains it: look at the input pipeline, at other programs on the machines, and "
                "at clocks and temperatures (nvidia-smi -q -d PERFORMANCE)."
            )
        ]
    first, others = diagnosis.likely[0], [cause for cause in diagnosis.circumstances if cause not in diagnosis.likely]
    lines = [f"Most likely: {', or '.join(_circumstance(cause, diagnosis) for cause in diagnosis.likely)}."]
    if len(diagnosis.likely) > 1:
        lines.append("The seconds alone do not tell these apart.")
    lines.append(
        f"Check it: {'; '.join(dict.fromkeys(check for cause in diagnosis.likely for check in _checks(cause)))}."
    )
    if others:
        lines.append(f"Else: {'; '.join(_circumstance(cause, diagnosis) for cause in others[:MAX_OTHERS])}.")
    if first.explained < 1 - LEAST_SHARE:
        rest = (1 - first.explained) * diagnosis.gap_seconds
        lines.append(f"{units.seconds(rest)} of the gap stay unexplained by it.")
    return lines


def _circumstance(cause: Circumstance, diagnosis: Diagnosis) -> str:
    costs = cause.seconds - diagnosis.candidate.estimate.iteration_seconds
    return (
        f"{cause.name}, with which an iteration takes {units.seconds(cause.seconds)} (costs {units.seconds(costs)}, "
        f"{cause.explained:.0%} of the gap)"
    )


def _checks(cause: Circumstance) -> list[str]:
    return [CHECKS[name] for name in cause.names]


def _links(diagnosis: Diagnosis) -> list[str]:
    bandwidth = diagnosis.links_bytes_per_second
    if bandwidth is None:
        return []
    least, greatest = TCP_BYTES_PER_SECOND
    what = " That is TCP on one card." if 0.8 * least <= bandwidth <= greatest else ""
    return [f"{8e-9 * bandwidth:.3g} Gbit/s from each node to the others would explain all of it.{what}"]


def _choice(choice: Choice) -> str:
    return (
        f"The plan: {choice.name}; with {choice.what} an iteration is predicted to take {units.seconds(choice.seconds)}, "
        f"{units.seconds(choice.saved_seconds)} less: {REMEDIES[choice.name]}."
    )


def diagnosis_table(diagnosis: Diagnosis) -> Group:
    """Return the iteration as measured, as predicted, with each circumstance, and without each choice."""
    table = new_table([("iteration", "left"), ("time", "right"), ("over predicted", "right")])
    predicted = diagnosis.candidate.estimate.iteration_seconds

    def add(words: str, seconds: float, style: str = "") -> None:
        add_row(table, words, units.seconds(seconds), f"{seconds / predicted:.2f}", style=style)

    add("as measured", diagnosis.measured_seconds, "bold")
    add("as predicted", predicted, "bold")
    for cause in diagnosis.circumstances:
        add(f"with {cause.name}", cause.seconds)
    for choice in diagnosis.choices:
        add(f"with {choice.what}", choice.seconds)
    return titled("Diagnosis", table, "all but the first row are predicted")


def diagnosis_fields(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis for programs."""
    predicted = diagnosis.candidate.estimate.iteration_seconds
    return {
        "measured_seconds": diagnosis.measured_seconds,
        "predicted_seconds": predicted,
        "expected_seconds": [*diagnosis.expected],
        "gap_seconds": diagnosis.gap_seconds,
        "slow": diagnosis.is_slow,
        "causes": [
            {
                "name": cause.name,
                "seconds": cause.seconds,
                "costs_seconds": cause.seconds - predicted,
                "explained_share": cause.explained,
                "likely": cause in diagnosis.likely,
                "checks": _checks(cause),
            }
            for cause in diagnosis.circumstances
        ],
        "explaining_link_bytes_per_second": diagnosis.links_bytes_per_second,
        "choices": [
            {
                "name": choice.name,
                "instead": choice.what,
                "seconds": choice.seconds,
                "saved_seconds": choice.saved_seconds,
                "remedy": REMEDIES[choice.name],
                "plan": documents.dump(choice.plan),
            }
            for choice in diagnosis.choices
        ],
        "sentences": diagnosis_sentences(diagnosis),
    }
