"""Bars of a page: parts of the iteration, difference to another plan, memory, candidates, worth of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Final
from xml.etree.ElementTree import Element

from trainwright.answer import NodeWorth
from trainwright.cost.estimate import Estimate
from trainwright.cost.memory import MemoryParts
from trainwright.plan import Plan
from trainwright.quantity import format_bytes
from trainwright.report import plan_summary
from trainwright.report.breakdown import PART_WORDS, Difference, breakdown_fields
from trainwright.report.explanation import memory_words
from trainwright.report.page.content import PageCandidate
from trainwright.report.page.markup import Row, bar, element, figure, legend, missing_rows, percent, table, words
from trainwright.report.units import seconds, share
from trainwright.report.worth import price_words, slowdown_words
from trainwright.search import Candidate, Problem
from trainwright.search.candidates import band_of_estimates

MAX_ROWS: Final = 40
"""Maximum number of rows of a drawing; a note says how many more there are."""
PART_COLOURS: Final = {
    "compute_seconds": "forward",
    "tensor_sync_seconds": "c3",
    "sharding_seconds": "c5",
    "redistribution_seconds": "c6",
    "point_to_point_seconds": "message",
    "bubble_seconds": "c7",
    "gradient_sync_seconds": "gradients",
    "shared_weight_sync_seconds": "c4",
    "update_seconds": "update",
    "constant_seconds": "c8",
}
MEMORY_COLOURS: Final = {
    "weights_bytes": "forward",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "update",
    "activations_bytes": "c3",
    "workspace_bytes": "c5",
    "constant_bytes": "c7",
}


def rectangle(name: str, start: float, length: float, whole: float) -> Element:
    return element("rect", class_=name, x=percent(start, whole), width=percent(length, whole), y="0", height="100%")


def _line(name: str, at: float, whole: float) -> Element:
    return element("line", class_=name, x1=percent(at, whole), x2=percent(at, whole), y1="0", y2="100%")


def time_figure(estimate: Estimate) -> Element:
    """Draw the parts of the iteration of the device that ends last."""
    spent = {part: value for part, value in breakdown_fields(estimate).items() if value > 0}
    whole, start, shapes = estimate.iteration_seconds, 0.0, list[Element]()
    for part, value in spent.items():
        shapes.append(rectangle(PART_COLOURS[part], start, value, whole))
        start += value
    rows: list[Row] = [
        [
            PART_WORDS[part],
            bar(rectangle(PART_COLOURS[part], 0, value, whole), label=share(value, whole)),
            seconds(value),
            share(value, whole),
        ]
        for part, value in sorted(spent.items(), key=lambda item: -item[1])
    ]
    listed = table(["part", "", "time", "share"], rows, label="Time by part")
    caption = f"Time of {estimate.critical_device}, the device that ends last; its parts add up to the iteration."
    return figure(caption, bar(shapes, label="Parts of the iteration, side by side"), listed)


def difference_figure(difference: Difference) -> Element:
    """Draw the way from the other plan's iteration to this plan's, part by part."""
    own, other = (each.estimate.iteration_seconds for each in (difference.own, difference.other))
    steps, at, highest = list[tuple[str, float, float]](), other, max(own, other)
    for part in difference.parts:
        saved = difference.saved_seconds[part]
        steps.append((part, at, saved))
        at -= saved
        highest = max(highest, at)
    rows: list[Row] = [[difference.other_name, _step("c7", 0, other, highest), seconds(other), ""]]
    for part, start, saved in steps:
        name = "update" if saved > 0 else "message"
        drawing = _step(name, min(start, start - saved), abs(saved), highest)
        sign = "−" if saved > 0 else "+" if saved < 0 else ""
        both = f"{seconds(difference.own_seconds[part])} / {seconds(difference.other_seconds[part])}"
        rows.append([PART_WORDS[part], drawing, f"{sign}{seconds(abs(saved))}", both])
    rows.append(["this plan", _step("forward", 0, own, highest), seconds(own), ""])
    headings = ["", "", "time", "this plan / the other"]
    return figure(
        "Each step is what the part takes less (green) or more (red) than in the other plan; they add up to the difference.",
        table(headings, rows, label="Difference by part"),
    )


def _step(name: str, start: float, length: float, whole: float) -> Element:
    drawing = bar(rectangle(name, start, length, whole), label=seconds(length))
    drawing.set("class", "line plain")
    return drawing


def memory_figure(plan: Plan, parts_by_device: Sequence[MemoryParts], problem: Problem) -> Element:
    """Draw the memory of the devices of each stage and accelerator, by part, against the limit."""
    cluster, parts_of = problem.cluster, dict(zip(plan.devices, parts_by_device, strict=True))
    fullest: dict[tuple[int, str], tuple[MemoryParts, int, int]] = {}
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            accelerator, parts = cluster.accelerator_of(device), parts_of[device]
            key = number, accelerator.name
            largest, limit, count = fullest.get(key, (parts, accelerator.memory_bytes, 0))
            fullest[key] = (max(largest, parts, key=lambda each: each.total_bytes), limit, count + 1)
    whole = max(max(parts.total_bytes, limit) for parts, limit, _ in fullest.values())
    names = plan_summary.short_names(cluster)
    shown = sorted(fullest.items(), key=lambda item: -item[1][0].total_bytes / item[1][1])[:MAX_ROWS]
    rows: list[Row] = []
    for (number, name), (parts, limit, count) in sorted(shown, key=lambda item: item[0]):
        shapes, start = list[Element](), 0
        for part, colour in MEMORY_COLOURS.items():
            shapes.append(rectangle(colour, start, getattr(parts, part), whole))
            start += getattr(parts, part)
        shapes.append(_line("limit", limit, whole))
        label = f"{format_bytes(parts.total_bytes)} of {format_bytes(limit)}"
        rows.append(
            [
                f"stage {number}: {count} × {names[name]}",
                bar(shapes, label=label),
                label,
                share(parts.total_bytes, limit),
            ]
        )
    left_out = missing_rows(len(shown), len(fullest), "groups of devices", ", the emptiest")
    held_parts = [part for part in MEMORY_COLOURS if any(getattr(group[0], part) for group in fullest.values())]
    named = [(MEMORY_COLOURS[part], memory_words(part)) for part in held_parts]
    headroom = f"; plans leave {100 * problem.limits.headroom:.3g}% of it free" if problem.limits.headroom else ""
    return figure(
        f"The fullest device of each group; the line is its limit{headroom}.",
        legend(*named),
        table(["devices", "", "memory", "held"], rows, label="Memory by device", left_out=left_out),
    )


def candidate_figure(candidates: Sequence[PageCandidate], problem: Problem) -> Element:
    """Draw the predicted iteration of each candidate with its band, and the measured one where there is one."""
    shown = candidates[:MAX_ROWS]
    bands = [_band(each.candidate, problem) for each in shown]
    whole = max(
        max(
            each.candidate.estimate.iteration_seconds,
            each.measured_seconds or 0.0,
            *(band or (0.0,)),
            *(each.measured_range or (0.0,)),
        )
        for each, band in zip(shown, bands, strict=True)
    )
    is_measured = any(each.measured_seconds is not None for each in shown)
    has_remarks = any(each.remark for each in shown)
    rows: list[Row] = []
    for each, band in zip(shown, bands, strict=True):
        predicted, measured = each.candidate.estimate.iteration_seconds, each.measured_seconds
        shapes = [
            *([] if band is None else [_range(band, whole)]),
            dot("mark", predicted, whole),
            *([] if each.measured_range is None else [_range(each.measured_range, whole, "measured-band")]),
            *([] if measured is None else [dot("measured", measured, whole)]),
        ]
        error = (
            "" if measured is None or not measured else f"{(predicted - measured) / measured:+.1%}".replace("-", "−")
        )
        rows.append(
            [
                each.name,
                bar(shapes, label=seconds(predicted)),
                seconds(predicted),
                *([seconds(measured) if measured is not None else "", error] if is_measured else []),
                words(plan_summary.name(each.candidate.plan)),
                *([each.remark] if has_remarks else []),
            ]
        )
    headings = ["", f"0 to {seconds(whole)}", "predicted", *(["measured", "off by"] if is_measured else []), "plan"]
    left_out = (
        f"{len(candidates) - len(shown)} of {len(candidates)} are left out." if len(shown) < len(candidates) else ""
    )
    marks = [("mark", "predicted, and the band in which 8 of 10 runs are expected" if any(bands) else "predicted")]
    if is_measured:
        has_range = any(each.measured_range is not None for each in shown)
        marks.append(("measured", "measured, from the shortest iteration to the longest" if has_range else "measured"))
    return figure(
        "Shorter is better.",
        legend(*marks),
        table([*headings, *(["state"] if has_remarks else [])], rows, label="Candidates", left_out=left_out),
    )


def _band(candidate: Candidate, problem: Problem) -> tuple[float, float] | None:
    band = band_of_estimates(candidate, problem)
    return None if band is None else band.range_of(candidate.estimate.iteration_seconds)


def course_figure(course: Sequence[PageCandidate]) -> Element:
    """Draw the measured iteration of each trial, in the order in which they ended, beside the best one until then."""
    shown = course[:MAX_ROWS]
    measured = [each.measured_seconds or 0.0 for each in shown]
    whole, best = max(measured), list(accumulate(measured, min))
    rows: list[Row] = [
        [
            each.name,
            bar(rectangle("c7", 0, least, whole), dot("measured", own, whole), label=seconds(own)),
            seconds(own),
            f"{seconds(least)}{', new' if own < before else ''}",
        ]
        for each, own, least, before in zip(shown, measured, best, (inf, *best[:-1]), strict=True)
    ]
    left_out = missing_rows(len(shown), len(course), "trials")
    return figure(
        "One row a trial, the first one at the top; the bar is the best iteration measured until then.",
        table(
            ["trial", f"0 to {seconds(whole)}", "measured", "best until then"], rows, label="Trials", left_out=left_out
        ),
    )


def _range(band: tuple[float, float], whole: float, name: str = "band") -> Element:
    return element("line", class_=name, x1=percent(band[0], whole), x2=percent(band[1], whole), y1="50%", y2="50%")


def dot(name: str, at: float, whole: float) -> Element:
    return element("circle", class_=name, cx=percent(at, whole), cy="50%", r="5")


def worth_figure(worths: Sequence[NodeWorth], problem: Problem) -> Element:
    """Draw how much longer an iteration takes without each type of node, beside what its nodes cost."""
    names = plan_summary.short_names(problem.cluster)
    longest = max((worth.slowdown or 0.0 for worth in worths), default=0.0)
    rows: list[Row] = []
    for worth in worths:
        longer = slowdown_words(worth)
        length = longest if worth.slowdown is None else max(worth.slowdown, 0.0)
        drawing = bar(rectangle("forward", 0, length, longest or 1.0), label=longer)
        rows.append([f"{worth.devices} × {names[worth.accelerator]}", drawing, longer, price_words(worth)])
    return figure(
        "How much longer an iteration of the best plan takes without these nodes, and their price per hour.",
        table(["without", "", "longer by", "price/h"], rows, label="Worth of each type of node"),
    )
