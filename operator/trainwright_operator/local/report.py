"""Page of an answer on this machine, in the state directory of its plan."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

import yaml

from trainwright.outside.plain_text import plain_line
from trainwright_operator.flow.answer_page import page_request
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.local.snapshot import observe
from trainwright_operator.local.store import write_whole
from trainwright_operator.local.tuned_plan import TunedPlan
from trainwright_operator.local.winner import page_file


def write_page(plan: TunedPlan) -> str:
    """Write the page beside the winner's files; return why it could not be drawn, or an empty text."""
    from trainwright_operator.page_process import draw_page  # noqa: PLC0415 - drawings, after everything is measured

    now = datetime.now(UTC)
    request = page_request(ReconcileContext(observe(plan, now), now), plan.manifest.name)
    if request is None:
        return "what was measured cannot be read any more"
    try:
        page = draw_page(request, (f"trainwright tune {shlex.quote(str(plan.manifest.source))}",))
    except Exception as error:  # noqa: BLE001 - the answer stays an answer, whatever it is
        return plain_line(f"{type(error).__name__}: {error}")
    write_whole(page_file(plan.folder), page)
    return ""


def page_of_state(path: Path) -> str:
    """Return the page in a state directory. Raise ValueError with why there is none."""
    if path.is_file():
        raise ValueError(f"{path}: {_explain_file(path)}")
    try:
        return page_file(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass  # deliberate: what else is there tells why
    except OSError as error:
        raise ValueError(f"{page_file(path)}: cannot be read: {error.strerror or error}") from None
    if not (path / "status.yaml").exists():
        raise ValueError(f"{path}: this is no state directory of `trainwright tune`, which would be .trainwright/NAME")
    raise ValueError(f"{path}: there is no page, since the plan has no winner yet; `trainwright tune` goes on with it")


def _explain_file(path: Path) -> str:
    """Return what to do with a file that is no state directory."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        document = None
    kind = document.get("document", document.get("kind")) if isinstance(document, dict) else None
    if kind == "Plan":
        return (
            f"a plan needs its cluster and model to be drawn: `trainwright explain --plan {shlex.quote(str(path))} --cluster FILE "
            "--model FILE --report FILE.html`"
        )
    return "give a state directory of `trainwright tune` (.trainwright/NAME), or the name of a plan of the cluster"
