"""Smallest numbers of accelerators as a table, sentences and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group

from trainwright import documents
from trainwright.answer.sizing import Decider, Size
from trainwright.quantity import format_bytes
from trainwright.report import plan_summary
from trainwright.report.assumptions import assumed_network, assumed_runtime
from trainwright.report.cost import whole_run
from trainwright.report.error_range import expected_range
from trainwright.report.memory_fit import fit
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns, figure_fields
from trainwright.report.remark import Remark
from trainwright.report.tables import add_row, new_table, origin_fields, origin_words, titled
from trainwright.report.units import rate
from trainwright.search import Candidate, Problem
from trainwright.training_run import days


def size_table(sizes: Sequence[Size]) -> Group:
    """Return the smallest number of each accelerator with its plan, in the order of the question; needs one answer."""
    answered = [size for size in sizes if size.answer is not None]
    problem = _problem(answered[0])
    run, figures = problem.limits.run, figure_columns(problem)
    is_priced = any(_best(size).price_per_hour is not None for size in answered)
    headings = [("accelerator", "whole"), ("needed", "right"), *((heading, "right") for heading, _ in figures)]
    headings += [("an hour", "right")] if is_priced else []
    headings += [("run", "right"), ("cost", "right")] if run is not None else []
    table = new_table([*headings, ("plan", "whole")])
    for size in sizes:
        if size.answer is None:
            add_row(table, size.accelerator, "–", *["–"] * (len(headings) - 2), "–")
            continue
        best = _best(size)
        shown = PlanFigures.of(best, _problem(size))
        cells = [size.accelerator, f"{size.devices:,}", *(cell(shown) for _, cell in figures)]
        cells += [_money(best.price_per_hour)] if is_priced else []
        cells += [days(best.run_seconds(run)), _money(best.run_price(run))] if run is not None else []
        add_row(table, *cells, plan_summary.degrees(best.plan))
    legend = f"needed: smallest number that holds the model{' and ends the run in time' if _has_time(problem) else ''}; {FIGURES}"
    return titled(f"Accelerators that the model needs{origin_words(problem)}", table, legend)


def size_sentences(size: Size) -> list[str]:
    """Return where the number is counted, what decides it, and what other savings would change."""
    if size.answer is None:
        return [f"{size.refusal[0].upper()}{size.refusal[1:]}."]
    sentences = [f"{size.devices:,} {size.accelerator}, {_machines(size)}: {_decided(size)}"]
    changes = [
        f"without {name} {'no number is enough' if count is None else f'it takes {count:,}'}"
        for name, count in (("recompute", size.without_recompute), ("sharding", size.without_sharding))
        if count != size.devices and size.decider is not Decider.TIME
    ]
    if changes:
        both = ", ".join(changes)
        sentences.append(f"{both[0].upper()}{both[1:]}.")
    problem, best = _problem(size), _best(size)
    for remark in _remarks(best, problem):
        sentences += remark.sentences
    if problem.limits.run is not None and best.price_per_hour is None:
        sentences.append(f"{size.accelerator} has no price, so what the run costs is not known.")
    return sentences


def size_fields(size: Size) -> dict[str, Any]:
    """Return one accelerator's answer for JSON output."""
    fields = {
        "accelerator": size.accelerator,
        "devices": size.devices,
        "machine": size.machine or None,
        "machine_devices": size.machine_devices,
    }
    if size.answer is None:
        return {**fields, "refusal": size.refusal}
    problem, best = _problem(size), _best(size)
    return {
        **fields,
        "decider": size.decider,
        "fewer": size.fewer,
        "state_bytes": size.state_bytes,
        "fewer_bytes": size.fewer_bytes,
        "without_recompute": size.without_recompute,
        "without_sharding": size.without_sharding,
        "predicted_seconds": best.estimate.iteration_seconds,
        "peak_memory_bytes": best.estimate.peak_memory_bytes,
        **figure_fields(best, problem),
        **{name: value for remark in _remarks(best, problem) for name, value in remark.fields.items()},
        **assumed_runtime(best, problem).fields,
        "price_per_hour": best.price_per_hour,
        "dtype": best.dtype or problem.model.dtype,
        "plan": documents.dump(best.plan),
        **origin_fields(problem),
    }


def runtime_sentences(size: Size) -> Sequence[str]:
    """Return what the answer assumes of the runtime."""
    return assumed_runtime(_best(size), _problem(size)).sentences


def _remarks(best: Candidate, problem: Problem) -> tuple[Remark, ...]:
    return (
        fit(best, problem),
        expected_range(best, problem),
        assumed_network(best, problem),
        whole_run(best, problem),
    )


def _decided(size: Size) -> str:
    if size.decider is None:
        return "one holds the model."
    fewer = f"{size.fewer:,}"
    if size.decider is Decider.TIME:
        return f"{fewer} hold it, but do not end the run in time."
    state, memory = format_bytes(size.state_bytes), format_bytes(size.fewer_bytes)
    if size.decider is Decider.ACTIVATIONS:
        return (
            f"{fewer} do not hold it: weights, gradients and optimizer take {state} of {memory}, and the rest is too small for the "
            "activations."
        )
    return f"{fewer} do not hold it: weights, gradients and optimizer take {state}, most of it {_PARTS[size.decider]}, and they have {memory}."


_PARTS = {
    Decider.WEIGHTS: "the weights",
    Decider.GRADIENTS: "the gradients",
    Decider.OPTIMIZER: "the optimizer's state",
}


def _machines(size: Size) -> str:
    machine = size.machine or f"machines of {size.machine_devices}"
    devices = size.devices or 0
    if devices <= size.machine_devices:
        return f"of one {size.machine or f'machine of {size.machine_devices}'}"
    return f"{devices // size.machine_devices:,} {machine}"


def _has_time(problem: Problem) -> bool:
    run = problem.limits.run
    return run is not None and run.within_seconds < float("inf")


def _problem(size: Size) -> Problem:
    assert size.answer is not None
    return size.answer.problem


def _best(size: Size) -> Candidate:
    assert size.answer is not None
    return size.answer.best


def _money(value: float | None) -> str:
    return "–" if value is None else rate(value)
