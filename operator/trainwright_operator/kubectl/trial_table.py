"""Table of trials and winner of a finished TrainingPlan."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainwright_operator.kubectl.client import condition


def trials_table(resource: dict[str, Any]) -> Table:
    """Return a table of candidates and baselines with predicted and measured seconds per iteration."""
    status = resource["status"]
    emulated = status.get("cluster", {}).get("emulated")
    label = "device times emulated, links real" if emulated else "measured on real devices"
    table = Table(title=f"trials of {resource['metadata']['name']} ({label})", title_justify="left")
    for heading in ("trial", "plan"):
        table.add_column(heading, no_wrap=True)
    for heading in ("predicted\ns/iteration", "measured\ns/iteration", "error", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    winner = status.get("winner", {}).get("trial")
    for trial in status.get("trials", []):
        error, memory = trial.get("predictionError"), trial.get("peakMemoryBytes")
        table.add_row(
            escape(trial["name"]),
            escape(trial.get("summary", "")),
            seconds(trial.get("predictedSeconds")),
            seconds(trial.get("measuredSeconds")),
            f"{error:+.1%}" if error is not None else "",
            f"{memory / 2**20:.1f} MiB" if memory else "",
            escape(outcome(trial)),
            style="bold green" if trial["name"] == winner else None,
        )
    return table


def final_report(resource: dict[str, Any], console: Console) -> bool:
    """Print the answer, and return whether there is a winner."""
    status = resource.get("status", {})
    if status.get("trials"):
        console.print(trials_table(resource))
    # What a void trial measured does not count.
    counted = [trial for trial in status.get("trials", []) if trial.get("state") == "Succeeded"]
    errors = [abs(trial["predictionError"]) for trial in counted if "predictionError" in trial]
    if errors:
        console.print(f"mean prediction error over {len(errors)} trials: {statistics.fmean(errors):.1%}")
    winner = status.get("winner")
    if not winner:
        final = condition(resource, "Succeeded")
        console.print(f"no winner: {final.get('reason')}: {escape(final.get('message', ''))}")
        return False
    if "measuredSeconds" not in winner:
        predicted = seconds(winner.get("predictedSeconds"))
        console.print(
            f"planned without trials: {escape(winner.get('summary', ''))} is predicted to take {predicted} s per iteration"
        )
        return True
    emulated = " (emulated devices)" if winner.get("emulated") else ""
    console.print(
        f"[bold green]winner: {escape(winner['trial'])}[/bold green] {escape(winner.get('summary', ''))}: "
        f"{winner['measuredSeconds']:.3f} s per iteration{emulated}"
    )
    if winner.get("speedupOverBaseline"):
        console.print(f"{winner['speedupOverBaseline']:.2f} × the best measured plan of Megatron's heuristic")
    return True


def outcome(trial: dict[str, Any]) -> str:
    """Return the trial's state, with the reason if it was not measured."""
    state = str(trial.get("state", ""))
    if state == "Succeeded":
        return "✔"
    return state if state in ("Pending", "Running") else f"{state}: {trial.get('reason')}"


def seconds(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else ""
