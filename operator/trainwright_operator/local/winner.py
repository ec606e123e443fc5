"""Files of the winner: the plan, what starts it with the trainer that was asked for, and the place of its page."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainwright import documents
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.worker_api import GangNode
from trainwright_operator.api.status import Winner
from trainwright_operator.flow.answer_page import PAGE_KEY
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.gangs.exported_plan import export_files
from trainwright_operator.local.manifest import Manifest
from trainwright_operator.local.store import write_whole


def winner_folder(folder: Path) -> Path:
    """Return where a state directory has the winner's files."""
    return folder / "winner"


def page_file(folder: Path) -> Path:
    """Return where a state directory has the page of the answer."""
    return winner_folder(folder) / PAGE_KEY


def write_winner(manifest: Manifest, winner: Winner, folder: Path) -> None:
    """Write the winner's files in the place of those of a winner before."""
    plan: Plan = documents.parse(winner.plan, Plan, source="winner")
    slots: dict[str, list[int]] = {}
    for device in plan.devices:
        slots.setdefault(device.node, []).append(device.slot)
    nodes = [GangNode(node, tuple(sorted(used)), "") for node, used in slots.items()]
    model = model_from_spec(manifest.spec, Dtype(winner.dtype) if winner.dtype is not None else None)
    target = winner_folder(folder)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in export_files(manifest.spec, model, plan, nodes):
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, file.text)
