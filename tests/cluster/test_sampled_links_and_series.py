"""Sampled links, several trials in a gang, and their timelines, on the whole local cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import yaml


@pytest.mark.slow
def test_links_are_sampled_and_series_trials_record_timelines(workbench: Any, small_plan: Any, tmp_path: Any) -> None:
    model = {"gpt": {"layers": 6, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}}
    plan = small_plan(
        model=model,
        training={"globalBatchSize": 16},
        devices={},
        links={"allPairsUpToNodes": 2},
        trials={
            "topK": 3, "perGang": 4, "timeline": True, "baseline": "Megatron", "warmupIterations": 1, "iterations": 3,
        },
    )  # fmt: skip
    status = workbench.wait_measured(workbench.apply(plan))["status"]
    assert "winner" in status, status

    links = status["links"]
    assert links["measured"] + links["inferred"] == 4 * 3 + 4, links
    assert links["inferred"] > 0
    message = next(one["message"] for one in status["conditions"] if one["type"] == "LinksMeasured")
    assert "inferred from links of the same kind" in message

    trials = [trial for trial in status["trials"] if trial["state"] == "Succeeded"]
    assert len(trials) >= 2, status["trials"]
    maps = json.loads(workbench.run("get", "configmaps", "--output", "json"))["items"]
    data = {one["metadata"]["name"]: one["data"] for one in maps if "data" in one}
    # On a busy machine a late trial is repeated alone.
    starts = Counter(
        json.loads(data[trial["resultRef"]["configMap"]]["outcome.json"])["started_at"] for trial in trials
    )
    assert max(starts.values()) >= 2, "no two trials shared a gang"

    sizes = {"layers": 6, "hidden_size": 64, "heads": 4, "sequence_length": 64, "vocabulary_size": 512}
    winner = next(trial for trial in trials if trial["name"] == status["winner"]["trial"])
    files = {
        "cluster": data[status["clusterRef"]["configMap"]]["document.json"],
        "runtime": data[status["clusterRef"]["configMap"]]["runtime.json"],
        "profiles": data[status["profilesRef"]["configMap"]]["document.json"],
        "plan": json.dumps(status["winner"]["plan"]),
        "report": data[winner["resultRef"]["configMap"]]["report.json"],
        "model": yaml.safe_dump({"gpt": sizes, "global_batch_size": 16}),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = [part for name in files for part in (f"--{name}", str(tmp_path / name))]
    trace = tmp_path / "trace.json"
    shown = subprocess.run(
        [sys.executable, "-m", "trainwright", "trial", *arguments, "--trace", str(trace)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "As measured, device by device" in shown.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert len({(event["pid"], event["tid"]) for event in events}) >= 2
