"""Live view of a TrainingPlan's phases and trials."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trainwright_demo.kubectl import Kubectl
from trainwright_demo.show import trials_table

POLL_SECONDS = 1.5
PHASES = {
    "Accepted": "accept the plan",
    "NodesDiscovered": "discover devices",
    "LinksMeasured": "measure links",
    "Profiled": "profile layers",
    "Planned": "search for candidates",
    "TrialsCompleted": "try the candidates",
    "Succeeded": "answer",
}


class Follower:
    """Poller of one plan until its Succeeded condition is True or False."""

    def __init__(self, kubectl: Kubectl, name: str, console: Console) -> None:
        self.kubectl = kubectl
        self.name = name
        self.console = console
        self.started = time.monotonic()
        self.printed: set[str] = set()

    def until_finished(self, deadline_seconds: float) -> dict[str, Any]:
        """Return the finished resource. End the demo with a message after the deadline."""
        live = Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        if live:
            live.start()
        try:
            while time.monotonic() - self.started < deadline_seconds:
                resource = self.kubectl.get_plan(self.name)
                self.print_news(resource)
                if condition(resource, "Succeeded").get("status") in ("True", "False"):
                    return resource
                if live:
                    live.update(self.view(resource))
                time.sleep(POLL_SECONDS)
        finally:
            if live:
                live.stop()
        raise SystemExit(
            f"the plan {self.name} has no answer after {deadline_seconds:.0f} s; "
            f"see: kubectl describe trainingplan {self.name}"
        )

    def print_news(self, resource: dict[str, Any]) -> None:
        """Print each final condition and each ended trial once."""
        for kind, phrase in PHASES.items():
            found = condition(resource, kind)
            if found.get("status") in ("True", "False"):
                mark = "[green]✔[/green]" if found["status"] == "True" else "[red]✘[/red]"
                self.print_once(f"{kind}{found['status']}", f"{mark} {phrase}: {found.get('message', '')}")
        for trial in resource.get("status", {}).get("trials", []):
            if trial.get("state") not in (None, "Pending", "Running"):
                measured = (
                    f"{trial['measuredSeconds']:.3f} s" if trial.get("measuredSeconds") else trial.get("reason", "")
                )
                line = f"   {trial['name']} ({trial.get('summary', '')}): {trial['state']} {measured}"
                self.print_once(trial["name"], line)
        progress = resource.get("status", {}).get("progress") or {}
        if not self.console.is_terminal and progress:
            line = f"   … {progress.get('what', '')} {progress.get('done', 0)}/{progress.get('total', 0)}"
            self.print_once(line, line)

    def print_once(self, key: str, line: str) -> None:
        if key not in self.printed:
            self.printed.add(key)
            self.console.print(f"[dim]{time.monotonic() - self.started:5.0f} s[/dim] {line}", highlight=False)

    def view(self, resource: dict[str, Any]) -> Group:
        status = resource.get("status", {})
        progress = status.get("progress") or {}
        done, total = progress.get("done", 0), progress.get("total", 0)
        bar = (
            Text("█" * round(24 * done / total), style="green") + Text("░" * (24 - round(24 * done / total)))
            if total
            else Text()
        )
        line = Table.grid(padding=(0, 1))
        waited = f"{time.monotonic() - self.started:.0f} s"
        line.add_row(
            Spinner("dots"), status.get("phase", "Waiting for the operator"), bar, progress.get("what", ""), waited
        )
        parts: list[Any] = [line]
        if status.get("trials"):
            parts.append(trials_table(resource))
        return Group(*parts)


def condition(resource: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of that type, or an empty mapping."""
    conditions = resource.get("status", {}).get("conditions", [])
    return next((found for found in conditions if found["type"] == kind), {})
