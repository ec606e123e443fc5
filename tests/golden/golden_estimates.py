"""Estimates of 400 stored plans under every cost model, with each float as `float.hex`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import subjects as s

FOLDER = Path(__file__).parent
INPUTS, FILE = FOLDER / "estimate_inputs.json", FOLDER / "estimates.json"
Row = dict[str, Any]


def record() -> list[Row]:
    """Return one row per stored plan."""
    inputs = json.loads(INPUTS.read_text())
    return [
        {"problem": number, "plan": index, **row}
        for number, problem in enumerate(inputs["problems"])
        for index, row in enumerate(_rows(problem, inputs["profile_fields"]))
    ]


def _rows(problem: dict[str, Any], profile_fields: list[str]) -> list[Row]:
    training = s.documents.parse(problem["model"], s.Training)
    layers = [dict(zip(profile_fields, row, strict=True)) for row in problem["profiles"]]
    subject = s.CostSubject(
        training.model,
        s.documents.parse(problem["cluster"], s.Cluster),
        s.documents.parse({"layers": layers}, s.Profiles),
        training.optimizer,
        s.documents.parse(problem["runtime"], s.Runtime),
    )
    return [_row(s.documents.parse(plan, s.Plan), subject) for plan in problem["plans"]]


def _row(plan: Any, subject: Any) -> Row:
    found = s.estimate(plan, subject)
    try:
        amp = s.amp_seconds(plan, subject).hex()
    except ValueError:
        amp = None  # a plan outside AMP's cost model
    return {
        "seconds": found.iteration_seconds.hex(),
        "breakdown": {name: float(value).hex() for name, value in asdict(found.breakdown).items()},
        "bytes": [held for _, held in found.memory_by_device],
        "feasible": found.feasible,
        "critical": str(found.critical_device),
        "amp": amp,
        "galvatron": s.galvatron_seconds(plan, subject).hex(),
    }


def text(rows: list[Row]) -> str:
    """Return the file's text: the names of the breakdown's parts, then a line for each plan."""
    names = list(rows[0]["breakdown"])
    lines = [
        json.dumps({**row, "breakdown": [row["breakdown"][name] for name in names]}, separators=(",", ":"))
        for row in rows
    ]
    return f'{{"breakdown": {json.dumps(names)},\n"plans": [\n' + ",\n".join(lines) + "\n]}\n"


def stored() -> list[Row]:
    """Return the rows of the file."""
    found = json.loads(FILE.read_text())
    return [
        {**row, "breakdown": dict(zip(found["breakdown"], row["breakdown"], strict=True))} for row in found["plans"]
    ]
