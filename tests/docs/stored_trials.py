"""Stand-in for kubectl: a TrainingPlan whose trials are done, with the ConfigMaps that its status names.

`python stored_trials.py FILE get KIND NAME --output jsonpath=EXPRESSION` answers from the file that `stored` wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Problem, run
from trainwright.training import Training
from trainwright.worker_api import RankMemory, TrialReport

SLOWER = 1.2
"""Measured over predicted seconds."""


def stored(examples: Path) -> str:
    """Return status and ConfigMaps of a plan for the examples' model, measured slower than predicted, as JSON."""
    training = documents.loads((examples / "model.yaml").read_text(), Training)
    cluster = documents.loads((examples / "cluster.yaml").read_text(), Cluster)
    profiles = documents.loads((examples / "profiles.json").read_text(), Profiles)
    problem = Problem(cluster, training.model, profiles, training.global_batch_size)
    candidates = run("amp", problem, top=3)
    names = [f"gpt2-medium-{number}" for number, _ in enumerate(candidates)]
    maps = {
        "cluster": {"document.json": documents.dumps(cluster), "runtime.json": documents.dumps(Runtime())},
        "profiles": {"document.json": documents.dumps(profiles)},
    }
    plans = [documents.dump(candidate.plan) for candidate in candidates]
    trials = [{"name": name, "plan": plan} for name, plan in zip(names, plans, strict=True)]
    maps["candidates"] = {"document.json": json.dumps({"trials": trials})}
    for name, candidate in zip(names, candidates, strict=True):
        memory = tuple(RankMemory(device.node, device.slot, 10**7) for device in candidate.plan.devices)
        seconds = SLOWER * candidate.estimate.iteration_seconds
        maps[name] = {"report.json": documents.dumps(TrialReport((seconds,) * 3, (3.0,), memory, 1000, 1))}
    status = {
        "winner": {"plan": plans[0], "trial": names[0]},
        **{f"{name}Ref": {"configMap": name} for name in ("cluster", "profiles", "candidates")},
        "trials": [{"name": name, "state": "Succeeded", "resultRef": {"configMap": name}} for name in names],
    }
    return json.dumps({"status": status, "maps": maps})


def answer(file: dict[str, Any], kind: str, name: str, expression: str) -> str:
    """Return what `kubectl get KIND NAME --output jsonpath=EXPRESSION` prints."""
    objects = [file if kind == "trainingplan" else {"data": file["maps"][name]}]
    path = expression.removeprefix("jsonpath={").removesuffix("}")
    for key, wanted_key, wanted in re.findall(r"\.((?:\\.|\w)+)(?:\[\?\(@\.(\w+)==\"([^\"]*)\"\)\])?", path):
        objects = [one[key.replace("\\.", ".")] for one in objects]
        if wanted_key:
            objects = [one for several in objects for one in several if one[wanted_key] == wanted]
    return " ".join(one if isinstance(one, str) else json.dumps(one) for one in objects)


if __name__ == "__main__":
    path, _, kind, name, _, expression = sys.argv[1:]
    sys.stdout.write(answer(json.loads(Path(path).read_text()), kind, name, expression))
