"""Trials that run a job of the user's: the same gangs, deadlines and status, measured by what it logs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from flow_harm import fail_pods, lost_attempt, pass_with_kills, running
from flow_jobs import pods_of_job
from flow_world import RESOURCE, World, node, spec_of
from typer.testing import CliRunner

from trainwright import documents
from trainwright.calibration import DeviceMemory, Trials
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.plan import Plan
from trainwright.runtime import Runtime
from trainwright.worker_api import TrialReport, TrialTask, WorkerTask
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.actions import Action, DryRunJob, StoredRole
from trainwright_operator.flow.gangs.scheduling import first_untolerated_taint
from trainwright_operator.flow.names import Names
from trainwright_operator.flow.snapshot import DryRun, Taint

JOB = {
    "image": "lab/train:7",
    "command": ["bash", "/etc/trainwright/launch.sh"],
    "stepTimeRegex": "step time",
    "memoryRegex": "peak",
    "podTemplate": {"spec": {"tolerations": [{"key": "lab"}]}},
}
SEARCH = {"planner": "Megatron", "limits": {"maxTensorDegree": 2}}
MESSAGE = "torch.OutOfMemoryError: CUDA out of memory."


def log_of_job(order: WorkerTask, seconds: float = 0.25) -> str | None:
    if not isinstance(order, TrialTask):
        return None
    return "step time 9.0 s\n" * order.warmup_iterations + f"step time {seconds} s, peak 5000\n" * order.iterations


def world_of(
    job: dict[str, Any] | None = JOB, log: Callable[[WorkerTask], str | None] = log_of_job, **spec: Any
) -> World:
    trials = {"topK": 1, "warmupIterations": 2, "iterations": 3, "maxFailed": 9}
    trials |= {} if job is None else {"framework": job}
    nodes = (node("n1", devices=2), node("n2", devices=1))
    return World(nodes=nodes, log=log, spec=spec_of(**{"search": SEARCH, "trials": trials, **spec}))


def task_of(world: World, gang: str) -> dict[str, str]:
    return dict(next(one.data for one in world.stored.values() if one.gang == gang and one.role == StoredRole.TASK))


def test_jobs_pods_tolerate_the_taints_of_the_nodes_that_the_workers_tolerate() -> None:
    taint, given = Taint("team", "a", "NoSchedule"), {"key": "team", "operator": "Exists"}
    template = {"podTemplate": {"spec": {"tolerations": [given]}}}
    world = world_of(worker=template)
    own = {"image": JOB["image"], "command": JOB["command"]}
    world.spec = spec_of(**world.spec.model_dump(by_alias=True, exclude_unset=True), apply="Run", job=own)
    world.nodes = tuple(replace(one, taints=(taint,)) for one in world.nodes)
    world.run(until=lambda: running(world, "candidate-1"))
    trial = [world.templates[name] for name, pod in world.pods.items() if pod.gang == "candidate-1"]
    world.run()
    winner = [pod["spec"] for one in world.handed_over.values() for _, pod in pods_of_job(one)]
    assert trial
    assert winner
    pods = [*trial, *winner]
    assert all(first_untolerated_taint(one, pod, RESOURCE) is None for pod in pods for one in world.nodes)


@dataclass
class RefusingWorld(World):
    """Cluster whose API server refuses the template of the trials' job in a dry run."""

    refusal: tuple[str, str] = ("PodTemplateInvalid", "spec.volumes: expected list")
    asked: int = 0

    def _apply(self, action: Action) -> None:
        super()._apply(action)
        if isinstance(action, DryRunJob):
            self.asked += 1
            if "launch.sh" in str(action.manifest):
                self.dry_run = DryRun(action.key, *self.refusal)


def refusing(**spec: Any) -> RefusingWorld:
    return RefusingWorld(spec=spec_of(trials={"topK": 1, "framework": JOB}, **spec))


@pytest.mark.usefixtures("each_launcher")
def test_invalid_template_of_the_job_fails_the_plan_before_anything_is_measured() -> None:
    world = refusing()
    world.run()
    found = world.condition("Accepted")
    assert (found.status, found.reason) == ("False", "PodTemplateInvalid")
    assert found.message.startswith("spec.trials.framework.podTemplate: ")
    assert "spec.volumes: expected list" in found.message
    assert world.created == []


@pytest.mark.parametrize("missing", [frozenset[LauncherKind](), frozenset({LauncherKind.PYTORCH_JOB})])
def test_refused_job_of_the_trials_is_asked_for_again_every_half_minute(missing: frozenset[LauncherKind]) -> None:
    world = refusing()
    world.missing, world.refusal = missing, ("JobRefused", "denied request: images")
    for _ in range(150):
        world.step()
    assert world.condition("Accepted").reason == "JobRefused"
    told = [event for event in world.events if event.reason == "JobRefused"]
    assert len(told) == 1
    assert world.asked <= 14
    world.refusal = ("", "")
    world.run(until=lambda: world.condition("Accepted").status == "True")


def results(world: World, gang: str) -> dict[str, str]:
    return dict(next(one.data for one in world.stored.values() if one.gang == gang and one.role == StoredRole.RESULT))


@pytest.mark.usefixtures("each_launcher")
def test_job_of_the_user_is_measured_by_its_log() -> None:
    world = world_of()
    world.run()
    assert world.status.winner is not None
    assert world.status.winner.measured_seconds == 0.25
    trial = world.trial("candidate-1")
    assert (trial.measured_seconds, trial.peak_memory_bytes) == (0.25, 5000)
    assert trial.prediction_error == pytest.approx(trial.predicted_seconds / 0.25 - 1, rel=1e-3)
    report: TrialReport = documents.loads(results(world, "candidate-1")["report.json"], TrialReport)
    assert report.iteration_seconds == (0.25, 0.25, 0.25)
    assert not world.pods


def test_calibrate_fits_reports_of_jobs_that_state_one_peak_for_each_pod(tmp_path: Path) -> None:
    world = world_of(log=lambda order: (log_of_job(order) or "").replace("5000", "3,000,000") or None)
    winner = world.run().winner
    assert winner is not None
    assert winner.trial is not None
    gpt = "{layers: 4, hidden_size: 64, heads: 4, sequence_length: 64, vocabulary_size: 512}"
    files = {
        "model": f"gpt: {gpt}\nglobal_batch_size: 8\ndtype: float32\n",
        "plan": documents.dumps(documents.parse(winner.plan, Plan)),
        "report": results(world, winner.trial)["report.json"],
        **{
            name: next(one.data["document.json"] for key, one in world.stored.items() if key.endswith(f"-{name}"))
            for name in ("cluster", "profiles")
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    def call(command: str, *names: str) -> None:
        given = (f"--{name}={tmp_path / name}" for name in ("cluster", "profiles", "model", *names))
        ended = CliRunner().invoke(app, [command, *given])
        assert ended.exit_code == 0, ended.output

    call("trial", "plan", "report", "append")
    (tmp_path / "append").rename(tmp_path / "trials")
    call("calibrate", "trials", "write")
    (trial,) = documents.loads((tmp_path / "trials").read_text(), Trials).trials
    assert (trial.iteration_seconds, trial.peak_memory_bytes) == (0.25, 3_000_000)
    assert trial.memory_by_device == (DeviceMemory(Device("n2", 0), 3_000_000),)  # n1 has two devices
    assert documents.loads((tmp_path / "write").read_text(), Runtime).constant_bytes > 0


@pytest.mark.usefixtures("each_launcher")
def test_pods_get_the_plan_and_its_rank_layout() -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    data = task_of(world, "candidate-1")
    plan: Plan = documents.loads(data["plan.json"], Plan)
    task: TrialTask = documents.loads(data["order.json"], TrialTask)
    assert plan == replace(task.plan, dtype=task.model.dtype)
    assert "torchrun --nnodes" in data["launch.sh"]
    assert "\n  n1)\n    start " in data["launch.sh"]
    specs = [world.templates[name] for name, pod in world.pods.items() if pod.gang == "candidate-1"]
    master = {part for spec in specs for part in spec["containers"][0]["command"] if part.startswith("MASTER_ADDR=")}
    assert len(master) == 1
    for spec in specs:
        (container,) = spec["containers"]
        assert container["image"] == "lab/train:7"
        assert container["command"][:2] == ["env", "NODE=$(TRAINWRIGHT_NODE_NAME)"]
        assert "TRAINWRIGHT_ITERATIONS=5" in container["command"]
        assert container["command"][-2:] == JOB["command"]
        assert "args" not in container
        assert {"key": "lab"} in spec["tolerations"]
        assert container["resources"]["limits"][RESOURCE] in ("1", "2")
        assert {"name": "order", "configMap": {"name": world.snapshot().names().task("candidate-1")}} in spec["volumes"]


def test_measurements_of_links_and_layers_keep_our_worker() -> None:
    world = world_of()
    world.run(until=lambda: any(pod.gang.startswith("profile") for pod in world.pods.values()))
    assert {image for name, image in world.images.items() if name in world.pods} == {"worker:1"}
    (spec, *_) = (world.templates[name] for name in world.pods)
    assert spec["containers"][0]["command"] == ["python", "-m", "trainwright_worker"]


def test_job_that_trains_on_is_stopped_once_it_is_measured() -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    world.run_seconds = 1e9
    told = list[str | None]()
    while running(world, "candidate-1"):
        names = [name for name, pod in world.pods.items() if pod.gang == "candidate-1"]
        for name in names[-1:]:
            world.pods[name] = replace(world.pods[name], log=(world.pods[name].log or "") + "step time 0.5 s\n")
        world.step()
        told.append(world.trial("candidate-1").message)
    assert "4 of 5 iterations" in told
    world.step()
    assert world.trial("candidate-1").measured_seconds == 0.5


def test_edited_job_is_measured_anew_with_links_and_layers_kept() -> None:
    world = world_of(log=lambda order: "no number\n" if isinstance(order, TrialTask) else None)
    world.run()
    assert world.trial("candidate-1").reason == "MetricsUnavailable"
    assert "after 0 step times" in (world.trial("candidate-1").message or "")
    measured = [name for name in world.created if "candidate" not in name and "baseline" not in name]
    world.log = log_of_job
    world.change(
        search=SEARCH,
        trials={"topK": 1, "warmupIterations": 2, "iterations": 3, "framework": JOB | {"stepTimeRegex": "time"}},
    )
    world.run()
    assert world.trial("candidate-1").measured_seconds == 0.25
    assert [name for name in world.created if "candidate" not in name and "baseline" not in name] == measured


def test_job_that_runs_while_it_is_edited_is_started_anew() -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    first = {pod.created_at for pod in world.pods.values()}
    trials = {"topK": 1, "warmupIterations": 2, "iterations": 3}
    world.change(search=SEARCH, trials=trials | {"framework": JOB | {"command": ["python", "train.py"]}})
    world.run(until=lambda: running(world, "candidate-1") and {pod.created_at for pod in world.pods.values()} != first)
    world.change(search=SEARCH, trials=trials)
    world.run()
    assert world.trial("candidate-1").measured_seconds != 0.25


def test_job_without_memory_is_told_apart_and_lost_pods_are_tried_again() -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    fail_pods(world, "candidate-1", termination_message=MESSAGE)
    world.run(until=lambda: running(world, "baseline-2") or world.trial("candidate-1").state == "Failed")
    assert world.trial("candidate-1").reason == "OutOfMemory"
    world.run(until=lambda: any(running(world, f"baseline-{number}") for number in (1, 2)))
    gang = next(pod.gang for pod in world.pods.values())
    world.delete_job(next(iter(world.jobs)))
    world.run(until=lambda: not world.jobs)
    assert lost_attempt(world, gang).reason == "JobDeleted"
    world.run()
    assert world.trial(gang).measured_seconds == 0.25


def test_deadline_of_a_run_ends_a_job_that_says_nothing() -> None:
    world = world_of(trials={"topK": 1, "runDeadlineSeconds": 60, "framework": JOB})
    world.run(until=lambda: running(world, "candidate-1"))
    world.run_seconds = 1e9
    world.run()
    assert world.trial("candidate-1").reason == "DeadlineExceeded"


@pytest.mark.parametrize("seed", range(3))
def test_killed_operator_comes_to_the_same_answer(seed: int) -> None:
    world = world_of()
    pass_with_kills(world, random.Random(seed), likely=0.4, passes=400)
    assert world.status.winner is not None
    assert world.status.winner.measured_seconds == 0.25


@pytest.mark.parametrize(
    ("text", "reason"), [("{}", "OrderInvalid"), ("broken", "OrderInvalid"), ('{"image":"i"}', "OrderInvalid")]
)
def test_stored_job_that_was_modified_ends_its_trial_alone(text: str, reason: str) -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    name = world.snapshot().names().task("candidate-1")
    world.stored[name] = replace(world.stored[name], data={**world.stored[name].data, "framework.json": text})
    world.run(
        until=lambda: running(world, "baseline-1") or running(world, "baseline-2") or world.succeeded != "Unknown"
    )
    assert world.trial("candidate-1").reason == reason


def test_stored_job_of_a_newer_version_waits() -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    name = world.snapshot().names().task("candidate-1")
    text = world.stored[name].data["framework.json"].replace("{", '{"newField":1,', 1)
    world.stored[name] = replace(world.stored[name], data={**world.stored[name].data, "framework.json": text})
    world.step()
    assert world.condition("Accepted").reason == "NeedsNewerVersion"
    assert running(world, "candidate-1")


def test_expression_that_is_none_is_not_accepted() -> None:
    world = world_of(JOB | {"stepTimeRegex": "("})
    world.run()
    assert world.condition("Accepted").reason == "SpecInvalid"
    assert "stepTimeRegex: '(' is no regular expression" in world.condition("Accepted").message


def test_framework_is_no_part_of_the_names() -> None:
    names = {Names.of("demo", "uid-1", world_of(job).spec).base for job in (None, JOB)}
    assert len(names) == 1


def test_trainer_of_the_search_gets_its_own_files() -> None:
    world = world_of(search=SEARCH | {"expressibleBy": "Megatron"})
    world.run(until=lambda: running(world, "candidate-1"))
    assert "--tensor-model-parallel-size" in task_of(world, "candidate-1")["launch.sh"]
    assert "plan.json" in task_of(world, "candidate-1")
