"""Metadata of a gang's objects and pods: what they say of their plan, and names that other controllers limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flow_world import START, World, spec_of

from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.actions import CreateJob
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.job_creation import create_missing
from trainwright_operator.flow.gangs.kueue import MAX_POD_SETS
from trainwright_operator.flow.gangs.launchers.job_set import JobSetLauncher
from trainwright_operator.flow.gangs.launchers.launcher import HandedOver
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import Names
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import StoredConfigMap

MAX_REPLICATED_JOB_NAME = 20
"""Characters of a replicatedJob's name that Kubeflow Trainer 2.4 takes."""
LONG = "a" * 62 + ".nightly-run"
UNEQUAL = Gang(nodes=(GangNode("n1", (0,), "t4"), GangNode("n2", (0, 1), "v100")))


def context_of(name: str) -> ReconcileContext:
    """Return a plan of that name in an installation with the default rules."""
    snapshot = replace(World(spec=spec_of()).snapshot(), rules=InstallationRules())
    return ReconcileContext(replace(snapshot, plan=replace(snapshot.plan, name=name, namespace="team-a")), START)


@pytest.mark.parametrize("name", ["gpt2", LONG])
@pytest.mark.parametrize("kind", LauncherKind)
def test_every_object_and_pod_of_a_gang_names_its_plan(kind: LauncherKind, name: str) -> None:
    context = context_of(name)
    launcher, spec = LAUNCHERS[kind], GangSpec("links", LinkTask(gang=UNEQUAL), 60, 60)
    found = create_missing(context, spec, StoredConfigMap("t", "links", "order", START, {}, uid="u"), launcher, ())
    assert isinstance(found, tuple), found
    manifests = [one.manifest for one in found]
    assert manifests[0]["kind"] == "NetworkPolicy"
    pods = [pod for one in manifests[1:] for pod in launcher.pods(one)]
    assert len(pods) == 2
    for one in (*manifests, *pods):
        label = one["metadata"]["labels"]["trainwright.dev/plan"]
        assert name.startswith(label)
        assert len(label) <= 63
        assert label[-1].isalnum()
        assert one["metadata"]["annotations"]["trainwright.dev/plan"] == f"team-a/{name}"


def test_annotation_of_the_plan_cannot_be_taken_by_a_template() -> None:
    template = {"metadata": {"annotations": {"trainwright.dev/plan": "other/plan"}}}
    snapshot = World(spec=spec_of(worker={"podTemplate": template})).snapshot()
    context = ReconcileContext(snapshot, START)
    for launcher in LAUNCHERS.values():
        made = launcher.manifests(context, GangSpec("links", LinkTask(gang=UNEQUAL), 60, 60))
        for pod in (pod for one in made for pod in launcher.pods(one)):
            assert pod["metadata"]["annotations"]["trainwright.dev/plan"] == "default/demo"


LOW = InstallationRules(priority_class="batch-low")


@pytest.mark.parametrize(
    ("template", "rules", "expected"),
    [
        ({}, InstallationRules(), None),
        ({}, LOW, "batch-low"),
        ({"priorityClassName": ""}, LOW, "batch-low"),
        ({"priorityClassName": "high"}, replace(LOW, pod_template=PodTemplateRule.NAMESPACE), "high"),
    ],
)
def test_pods_have_the_installations_priority_class_unless_their_template_names_one(
    template: dict[str, Any], rules: InstallationRules, expected: str | None
) -> None:
    snapshot = replace(World(spec=spec_of(worker={"podTemplate": {"spec": template}})).snapshot(), rules=rules)
    spec, task = GangSpec("links", LinkTask(gang=UNEQUAL), 60, 60), StoredConfigMap("t", "links", "order", START, {})
    for launcher in LAUNCHERS.values():
        found = create_missing(ReconcileContext(snapshot, START), spec, task, launcher, ())
        assert isinstance(found, tuple), found
        pods = [pod for one in found if isinstance(one, CreateJob) for pod in launcher.pods(one.manifest)]
        assert {pod["spec"].get("priorityClassName") for pod in pods} == {expected}


@pytest.mark.parametrize("name", ["high", "batch-low"])
def test_restricted_plan_names_no_priority_class_of_its_own(name: str) -> None:
    template = {"spec": {"priorityClassName": name}}
    world = World(spec=spec_of(worker={"podTemplate": template}), rules=LOW)
    world.step()
    condition = world.condition("Accepted")
    assert condition.reason == "PodTemplateNotAllowed"
    assert "spec.priorityClassName" in condition.message


def test_names_of_replicated_jobs_are_as_short_as_trainer_asks() -> None:
    nodes = tuple(GangNode(f"node-with-a-long-name-{number}", (0,), "x") for number in range(MAX_POD_SETS))
    launcher = JobSetLauncher(named_nodes=frozenset(node.name for node in nodes))
    snapshot = World(spec=spec_of(queueName="research")).snapshot()
    spec = GangSpec("candidate-32s", LinkTask(gang=Gang(nodes=nodes)), 60, 60)
    (gang,) = launcher.manifests(ReconcileContext(snapshot, START), spec)
    many = tuple(GangNode(f"n{number}", (0,), "x") for number in range(4096))
    job = HandedOver("job", "default", {}, {}, many, lambda *_: {}, suspended=True)
    (handed_over,) = launcher.handed_over(job)
    names = [one["name"] for made in (gang, handed_over) for one in made["spec"]["replicatedJobs"]]
    assert len(names) == MAX_POD_SETS + len(many)
    assert max(map(len, names)) <= MAX_REPLICATED_JOB_NAME
    # With the longest name of a gang, also the host names of pods and the labels that JobSet makes of both.
    longest = Names.of("p" * 60, "uid", spec_of()).job("candidate-32s", 0)
    assert max(len(f"{longest}-{one}-0-00000") for one in names[:MAX_POD_SETS]) <= 63
