"""Export to a training script of one's own: torchrun starts its ranks where the plan has them."""

from __future__ import annotations

import json

from trainwright import documents
from trainwright.exports.capabilities import Capabilities
from trainwright.exports.launch import launch_script
from trainwright.exports.target import ExportFile, ExportRequest

PLAN_FILE = "plan.json"


class Torchrun:
    """torchrun; the script reads the plan and forms its process groups from it."""

    software = "torchrun (torch ≥ 2.8)"
    preset: str | None = None
    capabilities = Capabilities(every_plan=True)
    remark = "Rank r of your script is the r-th device of plan.json, counted through pipelines and stages; name the script in SCRIPT."

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        program = f'"${{SCRIPT:-train.py}}" --plan {PLAN_FILE} "${{own[@]}}"'
        before = 'own=("$@")  # yours: bash launch.sh --model model.yaml …, which follow the plan\n'
        return (
            ExportFile("launch.sh", launch_script(request.plan.devices, program, request.remarks, before=before)),
            plan_file(request),
        )


def plan_file(request: ExportRequest) -> ExportFile:
    return ExportFile(PLAN_FILE, json.dumps(documents.dump(request.plan), indent=2) + "\n")
