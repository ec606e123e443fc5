"""Number format of an answer: why it was chosen, what a slow one costs, and which measured layers are slow and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from trainwright.accelerators import PREFERRED, best_format, data_sheet, has_data_sheet, is_native
from trainwright.answer import Answer, SlowFormat
from trainwright.cluster import Cluster
from trainwright.layer import Attention, Dtype, OperatorKind
from trainwright.report.plan_summary import short_names
from trainwright.report.remark import Remark
from trainwright.report.units import seconds
from trainwright.runtime import AttentionLibrary
from trainwright.search import Candidate, Problem

_LIBRARIES: Final = {
    AttentionLibrary.PYTORCH: "PyTorch",
    AttentionLibrary.FLASH_ATTENTION_1: "FlashAttention",
    AttentionLibrary.CUDNN: "Transformer Engine",
}


def number_format(answer: Answer, *, given: bool = False) -> Remark:
    """Return the number format of the first candidate, if it was chosen, or its price if it is slow.

    `given`: the format alone was chosen, for a plan that the user gave.
    """
    used = answer.problem.cluster.accelerators_of(answer.best.plan.nodes)
    slow = slow_format(answer.slow, answer.problem.cluster, used)
    dtype, stated = answer.best.dtype, answer.best.plan.dtype
    if dtype is None and answer.problem.chooses_format:
        said = slow.sentences or (f"Number format: {stated}, which the plan states.",)
        return Remark(said, {**slow.fields, "dtype": stated})
    if dtype is None:
        return slow
    reason = () if slow.sentences else (_reason(dtype, used, answer.problem, given=given),)
    return Remark((*slow.sentences, *reason), {**slow.fields, "dtype": dtype})


def _reason(dtype: Dtype, used: Sequence[str], problem: Problem, *, given: bool) -> str:
    """Say why a number format was chosen for a plan on the accelerators `used`."""
    cluster, allowed = problem.cluster, problem.limits.dtypes
    emulating = [name for name in problem.accelerators if name not in used and not is_native(name, dtype)]
    left = f"; it leaves out {_named(emulating, cluster)}, which would emulate it" if emulating else ""
    if (fastest := best_format(used, allowed)).num_bytes < dtype.num_bytes:
        why = (
            f"this plan does not fit into memory in {fastest}"
            if given
            else (f"no plan in {fastest} is as fast and fits into memory")
        )
        return f"Number format: {dtype}, since {why}{left}."
    verb = "computes" if len(used) == 1 else "all compute"
    lacking = [other for other in PREFERRED if other not in allowed]
    whose = f" of a trainer without {' and '.join(lacking)}" if lacking else ""
    return f"Number format: {dtype}, the fastest{whose} that {_named(used, cluster)} {verb} natively{left}."


def slow_format(slow: SlowFormat | None, cluster: Cluster, used: Collection[str] | None = None) -> Remark:
    """Return where a format is emulated, and the seconds of the best plan in it and in the fastest native one.

    `used`: accelerators of the best plan, if known, which may leave out those that emulate.
    """
    if slow is None:
        return Remark()
    other = None if slow.other is None else slow.other.estimate.iteration_seconds
    fields = {
        "dtype": slow.dtype,
        "emulated_on": list(slow.emulated_on),
        "native": slow.native,
        "native_seconds": other,
    }
    emulating = [name for name in slow.emulated_on if used is None or name in used]
    left = "" if emulating else ", which the plan leaves out"
    sentence = f"{slow.dtype}"
    if slow.emulated_on:
        sentence += f" is emulated on {_named(emulating or slow.emulated_on, cluster)}{left}"
    if slow.other is not None and other is not None:
        batch = slow.other.plan.global_batch_size
        rows = f" (of {batch} rows)" if batch != slow.rows else ""
        sentence += f": {seconds(slow.seconds)}; {slow.native} would take {seconds(other)}{rows}"
    elif emulating:
        sentence += f": {seconds(slow.seconds)}; {slow.native} is native there"
    return Remark((f"{sentence}.",), {"slow_format": fields})


def slow_layers(candidate: Candidate, problem: Problem) -> Remark:
    """Return the accelerators of a candidate whose attention stores all scores, and whose host bounds layers."""
    if problem.profiles.origin == "estimated":
        return _without_fused_attention(candidate, problem)
    stored = _kinds_of(problem.profiles.kinds_that_store_scores(), candidate, problem.cluster)
    bound = _kinds_of(problem.profiles.host_bound_kinds(), candidate, problem.cluster)
    return Remark(
        (
            *(
                f"Attention of {kinds} stores all scores on {name}: PyTorch has no faster kernel there for this number format "
                "or width of a head."
                for name, kinds in stored.items()
            ),
            *(
                f"The host bounds {kinds} on {name}: a process submits their operators no faster than the GPU computes them, so "
                "a faster GPU gains nothing; larger layers, or more rows if memory allows, do."
                for name, kinds in bound.items()
            ),
        )
    )


def _without_fused_attention(candidate: Candidate, problem: Problem) -> Remark:
    """Return the accelerators on which the runtime's attention is estimated with stored scores, though the model's is fused."""
    library, dtype = problem.runtime.attention_library, candidate.dtype or problem.model.dtype
    fuses = any(operator.kind is OperatorKind.ATTENTION for kind in problem.model.kinds for operator in kind.operators)
    names = [
        name
        for name in problem.cluster.accelerators_of(candidate.plan.nodes)
        if has_data_sheet(name) and data_sheet(name).attention(library, dtype) is Attention.STORED
    ]
    if not fuses or not names:
        return Remark()
    software = _LIBRARIES.get(library)
    why = f"{software} has no fused kernel there for {dtype}" if software else "so the runtime states"
    return Remark((f"Attention stores all scores on {_named(names, problem.cluster)}: {why}.",))


def _kinds_of(kinds: Mapping[str, tuple[str, ...]], candidate: Candidate, cluster: Cluster) -> dict[str, str]:
    """Return the kinds of layers on each accelerator that the candidate uses, by its short name."""
    names, used = short_names(cluster), cluster.accelerators_of(candidate.plan.nodes)
    return {names[name]: " and ".join(kinds[name]) for name in used if name in kinds}


def _named(names: Collection[str], cluster: Cluster) -> str:
    """Return the accelerators' short names: `V100, T4 and A100`."""
    short: Sequence[str] = [short_names(cluster)[name] for name in names]
    return " and ".join([", ".join(short[:-1]), short[-1]]) if len(short) > 1 else short[0]
