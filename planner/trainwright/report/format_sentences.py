"""Number format of an answer: why it was chosen, what a slow one costs, and which measured layers are slow and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainwright.accelerators import PREFERRED, best_format, is_native
from trainwright.answer import Answer, SlowFormat
from trainwright.cluster import Cluster
from trainwright.report.plan_summary import short_names
from trainwright.report.tables import seconds
from trainwright.search import Candidate, Problem


def format_sentences(answer: Answer, *, given: bool = False) -> list[str]:
    """Return a sentence on the number format of the first candidate, if it was chosen or is slow.

    `given`: the format alone was chosen, for a plan that the user gave.
    """
    first, cluster = answer.candidates[0], answer.problem.cluster
    if answer.slow is not None:
        return [slow_sentence(answer.slow, cluster, cluster.accelerators_of(first.plan.nodes))]
    if first.dtype is None:
        return []
    used = cluster.accelerators_of(first.plan.nodes)
    emulating = [name for name in answer.problem.accelerators if name not in used and not is_native(name, first.dtype)]
    left = f"; it leaves out {_named(emulating, cluster)}, which would emulate it" if emulating else ""
    allowed = answer.problem.limits.dtypes
    if (fastest := best_format(used, allowed)).num_bytes < first.dtype.num_bytes:
        why = (
            f"this plan does not fit into memory in {fastest}"
            if given
            else (f"no plan in {fastest} is as fast and fits into memory")
        )
        return [f"Number format: {first.dtype}, since {why}{left}."]
    verb = "computes" if len(used) == 1 else "all compute"
    lacking = [dtype for dtype in PREFERRED if dtype not in allowed]
    whose = f" of a trainer without {' and '.join(lacking)}" if lacking else ""
    return [f"Number format: {first.dtype}, the fastest{whose} that {_named(used, cluster)} {verb} natively{left}."]


def slow_sentence(slow: SlowFormat, cluster: Cluster, used: Collection[str] | None = None) -> str:
    """Return where a format is emulated, and the seconds of the best plan in it and in a native one.

    `used`: accelerators of the best plan, if known, which may leave out those that emulate.
    """
    emulating = [name for name in slow.emulated_on if used is None or name in used]
    left = "" if emulating else ", which the plan leaves out"
    where = f"{slow.dtype} is emulated on {_named(emulating or slow.emulated_on, cluster)}{left}"
    if slow.other is None:
        return f"{where}: {seconds(slow.seconds)}; {slow.native} is native there." if emulating else f"{where}."
    other, batch = slow.other.estimate.iteration_seconds, slow.other.plan.global_batch_size
    rows = f" (of {batch} rows)" if batch != slow.rows else ""
    return f"{where}: {seconds(slow.seconds)}; {slow.native} would take {seconds(other)}{rows}."


def profile_sentences(candidate: Candidate, problem: Problem) -> list[str]:
    """Return sentences on the accelerators of a candidate whose attention stores all scores, and whose host bounds layers."""
    stored = _kinds_of(problem.profiles.kinds_that_store_scores(), candidate, problem.cluster)
    bound = _kinds_of(problem.profiles.host_bound_kinds(), candidate, problem.cluster)
    return [
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
    ]


def format_fields(answer: Answer) -> dict[str, Any]:
    """Return the chosen number format, or the price of a slow one, for JSON output."""
    chosen = answer.candidates[0].dtype
    return {**slow_format_fields(answer.slow), **({} if chosen is None else {"dtype": chosen})}


def slow_format_fields(slow: SlowFormat | None) -> dict[str, Any]:
    """Return the price of a slow number format for JSON output; empty without one."""
    if slow is None:
        return {}
    other = None if slow.other is None else slow.other.estimate.iteration_seconds
    told = {"dtype": slow.dtype, "emulated_on": list(slow.emulated_on), "native": slow.native}
    return {"slow_format": {**told, "native_seconds": other}}


def _kinds_of(kinds: Mapping[str, tuple[str, ...]], candidate: Candidate, cluster: Cluster) -> dict[str, str]:
    """Return the kinds of layers on each accelerator that the candidate uses, by its short name."""
    names, used = short_names(cluster), cluster.accelerators_of(candidate.plan.nodes)
    return {names[name]: " and ".join(kinds[name]) for name in used if name in kinds}


def _named(names: Collection[str], cluster: Cluster) -> str:
    """Return the accelerators' short names: `V100, T4 and A100`."""
    short: Sequence[str] = [short_names(cluster)[name] for name in names]
    return " and ".join([", ".join(short[:-1]), short[-1]]) if len(short) > 1 else short[0]
