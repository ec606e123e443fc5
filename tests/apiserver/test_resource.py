"""Storage, `kubectl explain` and `kubectl get` of a TrainingPlan."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)

STATUS = {
    "observedGeneration": 1,
    "phase": "Succeeded",
    "conditions": [
        {
            "type": "Succeeded",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": NOW,
            "reason": "BestTrialSelected",
            "message": "candidate-2 is the fastest",
        }
    ],
    "progress": {"phase": "Trying", "what": "trials", "done": 5, "total": 5},
    "cluster": {
        "devices": 3,
        "emulated": True,
        "nodes": [{"name": "node-1", "accelerator": "emulated-v100", "devices": 3}],
        "accelerators": [{"name": "emulated-v100", "devices": 3, "memoryBytes": 17_179_869_184}],
        "excludedNodes": [{"name": "node-0", "reason": "it offers no nvidia.com/gpu"}],
    },
    "clusterRef": {"configMap": "tiny-cluster"},
    "linksRef": {"configMap": "tiny-links"},
    "profilesRef": {"configMap": "tiny-profiles"},
    "candidatesRef": {"configMap": "tiny-candidates"},
    "trials": [
        {
            "name": "tiny-candidate-2",
            "role": "Candidate",
            "summary": "pp3 dp1 tp1 mb4×1 [2 1 1]",
            "predictedRank": 2,
            "predictedSeconds": 0.81234567,
            "measuredSeconds": 0.8,
            "predictionError": 0.0154320875,
            "predictedPeakMemoryBytes": 12_000_000_000,
            "peakMemoryBytes": 12_345_678_901,
            "state": "Succeeded",
            "reason": "MeasurementTaken",
            "message": "measured",
            "startTime": NOW,
            "endTime": NOW,
        },
        {
            "name": "tiny-baseline-1",
            "role": "Baseline",
            "summary": "pp1 dp3 tp1 mb4×1 [4]",
            "predictedRank": 1,
            "predictedSeconds": 1.2,
            "state": "Skipped",
        },
    ],
    "winner": {
        "trial": "tiny-candidate-2",
        "summary": "pp3 dp1 tp1 mb4×1 [2 1 1]",
        "predictedRank": 2,
        "predictedSeconds": 0.81234567,
        "measuredSeconds": 0.8,
        "speedupOverBaseline": 1.5376,
        "pricePerSample": 1.25e-05,
        "emulated": True,
        "plan": {"document": "Plan", "pipelines": [{"stages": [{"devices": [{"node": "node-1", "slot": 0}]}]}]},
    },
}


def patch_status(api_server, name: str, namespace: str, status: dict[str, object]) -> None:
    api_server.kubectl(
        *("patch", "trainingplan", name, "--namespace", namespace, "--subresource=status", "--type=merge"),
        *("--patch-file", "/dev/stdin"),
        piped=json.dumps({"status": status}),
    )


def test_defaults_are_filled_in(api_server, training_plan) -> None:
    kept = api_server.create(training_plan())["spec"]
    devices = {"resourceName": "nvidia.com/gpu", "products": [], "nodeSelector": {}, "pricesPerHour": {}}
    assert kept["devices"] == devices
    search = {
        "planner": "Auto",
        "objective": "Time",
        "tolerance": 0.03,
        "effort": 3,
        "budgetSeconds": 600,
        "limits": {},
    }
    assert kept["search"] == search
    assert kept["training"] == {"globalBatchSize": 4, "dtype": "auto", "optimizer": "adam"}
    assert kept["links"] == {
        "deadlineSeconds": 300,
        "allPairsUpToNodes": 12,
        "topologyLabels": ["topology.kubernetes.io/zone", "topology.kubernetes.io/rack"],
        "collectives": True,
        "overlap": True,
    }
    assert kept["profiling"] == {"deadlineSeconds": 600, "warmupIterations": 3, "iterations": 10}
    assert kept["trials"] == {
        "topK": 3,
        "baseline": "Megatron",
        "perGang": 1,
        "timeline": False,
        "warmupIterations": 3,
        "iterations": 10,
        "maxFailed": 2,
        "maxDeviceHours": 8,
        "runDeadlineSeconds": 900,
        "pendingDeadlineSeconds": 300,
    }
    assert kept["suspend"] is False
    assert "ttlSecondsAfterFinished" not in kept


@pytest.mark.parametrize("changes", [{}, {"trials": {"topK": 1}, "devices": {"max": 2}, "worker": {"image": "w:1"}}])
def test_the_server_and_the_models_have_the_same_defaults(api_server, training_plan, changes) -> None:
    asked = training_plan(changes=changes)
    kept = api_server.create(asked)
    assert TrainingPlanSpec.model_validate(kept["spec"]) == TrainingPlanSpec.model_validate(asked["spec"])


def test_a_pod_template_is_kept_whole(api_server, training_plan) -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "priorityClassName": "low",
            "containers": [{"name": "pytorch", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
        },
    }
    kept = api_server.create(training_plan(changes={"worker.podTemplate": template}))["spec"]
    assert kept["worker"]["podTemplate"] == template
    parsed = TrainingPlanSpec.model_validate(kept).worker.pod_template
    assert parsed.spec == template["spec"]
    assert parsed.metadata.labels == {"team": "a"}


def test_status_round_trips(api_server, training_plan, namespace) -> None:
    api_server.create(training_plan())
    written = TrainingPlanStatus.model_validate(STATUS)
    patch_status(api_server, "tiny", namespace, written.dump())
    kept = api_server.get("trainingplan", "tiny", "--namespace", namespace)
    assert kept["status"] == written.dump(), "the schema drops a field of the model, or adds one"
    assert TrainingPlanStatus.model_validate(kept["status"]) == written
    assert kept["metadata"]["generation"] == 1


def test_figures_keep_five_digits() -> None:
    status = TrainingPlanStatus.model_validate(STATUS)
    assert status.winner is not None
    assert status.winner.predicted_seconds == 0.81235
    assert status.trials[0].prediction_error == 0.015432


def test_spec_and_status_have_separate_endpoints(api_server, training_plan, namespace) -> None:
    api_server.create(training_plan() | {"status": {"phase": "Failed"}})
    assert "status" not in api_server.get("trainingplan", "tiny", "--namespace", namespace)
    api_server.kubectl(
        *("patch", "trainingplan", "tiny", "--namespace", namespace, "--subresource=status", "--type=merge"),
        *("--patch", json.dumps({"spec": {"suspend": True}, "status": {"phase": "Planning"}})),
    )
    kept = api_server.get("trainingplan", "tiny", "--namespace", namespace)
    assert (kept["spec"]["suspend"], kept["status"]["phase"]) == (False, "Planning")


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"phase": "Dreaming"}, "Unsupported value"),
        ({"conditions": [STATUS["conditions"][0] | {"lastTransitionTime": "soon"}]}, "must be of type date-time"),
        ({"trials": [{"name": "a"}]}, "Required value"),
    ],
)
def test_a_status_that_does_not_fit_is_refused(api_server, training_plan, namespace, status, sentence) -> None:
    api_server.create(training_plan())
    patch = json.dumps({"status": status}, default=lambda time: time.isoformat())
    done = api_server.try_kubectl(
        *("patch", "trainingplan", "tiny", "--namespace", namespace, "--subresource=status", "--type=merge"),
        *("--patch", patch),
    )
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_list_of_plans_reads_well(api_server, training_plan, namespace) -> None:
    api_server.create(training_plan())
    patch_status(api_server, "tiny", namespace, TrainingPlanStatus.model_validate(STATUS).dump())
    api_server.create(training_plan("untouched"))
    head, tiny, untouched = api_server.kubectl("get", "tplan", "--namespace", namespace).splitlines()
    assert " ".join(head.split()) == "NAME PHASE PROGRESS BEST S/ITER SPEED-UP EMULATED JOB REASON AGE"
    assert " ".join(tiny.split()[:-1]) == "tiny Succeeded 5/5 trials 0.8 1.5376 true BestTrialSelected"
    assert untouched.split()[0] == "untouched"
    wide = api_server.kubectl("get", "trainingplans", "--namespace", namespace, "--output", "wide").splitlines()
    assert " ".join(wide[0].split()).endswith("AGE WINNER PREDICTED BASELINE PLANNER DEVICES")
    assert " ".join(wide[1].split()).endswith("pp3 dp1 tp1 mb4×1 [2 1 1] 0.81235 Auto 3")


def test_plans_are_in_the_categories_all_and_ml(api_server, training_plan, namespace) -> None:
    api_server.create(training_plan())
    for category in ("all", "ml"):
        assert "trainingplan.trainwright.dev/tiny" in api_server.kubectl(
            "get", category, "--namespace", namespace, "--output", "name"
        )


def test_explain_describes_fields(api_server) -> None:
    trials = " ".join(api_server.kubectl("explain", "trainingplan.spec.trials").split())
    assert "How many of the best candidates are tried. 0: plan only" in trials
    assert "Megatron: the heuristic's plan on all devices, or the one on the type of device" in trials
    error = api_server.kubectl("explain", "tplan.status.trials.predictionError")
    assert "(predicted − measured) / measured" in " ".join(error.split())


@pytest.mark.parametrize("file", sorted((ROOT / "deploy" / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_examples_are_accepted(api_server, namespace, file) -> None:
    done = api_server.try_kubectl("create", "--dry-run=server", "--namespace", namespace, "-f", str(file))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    spec = TrainingPlanSpec.model_validate(yaml.safe_load(file.read_text())["spec"])
    assert spec.model.family.layers >= 2


def test_the_largest_status_that_the_schema_allows_to_list_fits_into_the_store(
    api_server, training_plan, namespace
) -> None:
    trial = STATUS["trials"][0] | {"message": "m" * 1024, "summary": "s" * 512}
    node = {"accelerator": "emulated-v100", "devices": 8}
    large = STATUS | {
        "trials": [trial | {"name": f"{'t' * 60}-{i}"} for i in range(64)],
        "cluster": STATUS["cluster"] | {"nodes": [node | {"name": f"{'n' * 60}-{i}"} for i in range(1024)]},
    }
    api_server.create(training_plan())
    written = TrainingPlanStatus.model_validate(large)
    patch_status(api_server, "tiny", namespace, written.dump())
    kept = api_server.get("trainingplan", "tiny", "--namespace", namespace)
    assert TrainingPlanStatus.model_validate(kept["status"]) == written
