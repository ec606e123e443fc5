"""`trainwright watch`: live view of a TrainingPlan's phases and trials."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trainwright_operator.kubectl.client import Kubectl, KubectlError, condition
from trainwright_operator.kubectl.trial_table import final_report, trials_table

SUCCEEDED, WITHOUT_WINNER = 0, 1
"""Exit codes of `watch`."""
POLL_SECONDS = 1.5
_PLAIN_WIDTH: Final = 140
"""Width without a terminal, where lines are as long as necessary."""
_BAR_WIDTH: Final = 24
_PHASES: Final = {
    "Accepted": "accept the plan",
    "NodesDiscovered": "discover devices",
    "LinksMeasured": "measure links",
    "Profiled": "profile layers",
    "Planned": "search for candidates",
    "TrialsCompleted": "try the candidates",
    "Succeeded": "answer",
}


def watch(name: str, *, namespace: str | None = None, context: str | None = None) -> int:
    """Show a plan until it has its answer, then that; return the exit code. Raise ValueError where it cannot be read."""
    console = new_console()
    resource = Follower(Kubectl(context, namespace), name, console).until_finished()
    return SUCCEEDED if final_report(resource, console) else WITHOUT_WINNER


def new_console() -> Console:
    """Return the console of a live view: the terminal, or else lines of plain text."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_PLAIN_WIDTH)


class Follower:
    """Poller of one plan until its Succeeded condition is True or False."""

    def __init__(self, kubectl: Kubectl, name: str, console: Console) -> None:
        self._kubectl, self._name, self._console = kubectl, name, console
        self._started = time.monotonic()
        self._printed: set[str] = set()

    def until_finished(self, deadline_seconds: float | None = None) -> dict[str, Any]:
        """Return the finished resource. Raise KubectlError after the deadline, or where the plan cannot be read."""
        live = Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        if live:
            live.start()
        try:
            while deadline_seconds is None or self._seconds < deadline_seconds:
                resource = self._kubectl.get_plan(self._name)
                self._print_news(resource)
                if condition(resource, "Succeeded").get("status") in ("True", "False"):
                    return resource
                if live:
                    live.update(self._view(resource))
                time.sleep(POLL_SECONDS)
        finally:
            if live:
                live.stop()
        raise KubectlError(
            f"the plan {self._name} has no answer after {deadline_seconds:.0f} s; "
            f"see: kubectl describe trainingplan {self._name}"
        )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _print_news(self, resource: Mapping[str, Any]) -> None:
        """Print each final condition and each ended trial once."""
        status = resource.get("status", {})
        for kind, phrase in _PHASES.items():
            reached = condition(resource, kind)
            if reached.get("status") in ("True", "False"):
                mark = "[green]✔[/green]" if reached["status"] == "True" else "[red]✘[/red]"
                text = f"{mark} {phrase}: {escape(reached.get('message', ''))}"
                self._print_once(f"{kind}{reached['status']}", text)
        for trial in status.get("trials", []):
            if trial.get("state") not in (None, "Pending", "Running"):
                measured = (
                    f"{trial['measuredSeconds']:.3f} s" if trial.get("measuredSeconds") else trial.get("reason", "")
                )
                line = f"   {trial['name']} ({trial.get('summary', '')}): {trial['state']} {measured}"
                self._print_once(trial["name"], escape(line))
        progress = status.get("progress") or {}
        if not self._console.is_terminal and progress:
            line = escape(f"   … {progress.get('what', '')} {progress.get('done', 0)}/{progress.get('total', 0)}")
            self._print_once(line, line)

    def _print_once(self, key: str, line: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            self._console.print(f"[dim]{self._seconds:5.0f} s[/dim] {line}", highlight=False)

    def _view(self, resource: dict[str, Any]) -> Group:
        status = resource.get("status", {})
        progress = status.get("progress") or {}
        done, total = progress.get("done", 0), progress.get("total", 0)
        filled = round(_BAR_WIDTH * done / total) if total else 0
        bar = Text("█" * filled, style="green") + Text("░" * (_BAR_WIDTH - filled)) if total else Text()
        line = Table.grid(padding=(0, 1))
        phase = Text(status.get("phase", "Waiting for the operator"))
        line.add_row(Spinner("dots"), phase, bar, Text(progress.get("what", "")), f"{self._seconds:.0f} s")
        parts: list[Any] = [line]
        waiting = condition(resource, "Succeeded").get("message", "")
        if (status.get("waiting") or {}).get("reason"):
            parts.append(Text(waiting, style="yellow"))
        if status.get("trials"):
            parts.append(trials_table(resource))
        return Group(*parts)
