"""Processor architectures of nodes and of the worker's image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flow_harm import lost_attempt, running
from flow_world import World, node, spec_of

from trainwright_operator.api.installation import InstallationRules
from trainwright_operator.flow.nodes.node_platform import image_mismatch
from trainwright_operator.flow.phases.discovery import find_late_nodes, find_lost_nodes, inspect_nodes
from trainwright_operator.flow.snapshot import ContainerFacts, NodeFacts, PodFacts
from trainwright_operator.settings import Settings


def machine(name: str, architecture: str = "", system: str = "", **labels: str) -> NodeFacts:
    own = {"kubernetes.io/arch": architecture, "kubernetes.io/os": system}
    facts = node(name)
    return replace(facts, labels=facts.labels | {key: value for key, value in own.items() if value} | labels)


AMD, ARM, BARE = machine("amd", "amd64", "linux"), machine("arm", "arm64", "linux"), machine("bare")


def found(
    *nodes: NodeFacts, chart: tuple[str, ...] = (), worker: dict[str, Any] | None = None, **devices: Any
) -> tuple[list[str], dict[str, str]]:
    """Return the nodes that are used, and why others are not."""
    snapshot = replace(World().snapshot(), nodes=nodes, rules=InstallationRules(architectures=chart))
    seen = inspect_nodes(snapshot, spec_of(worker=worker or {}, devices=devices))
    return [one.name for one in seen.nodes], {one.name: one.reason for one in seen.excluded}


def test_one_architecture_of_all_nodes_is_used_whatever_it_is() -> None:
    assert found(ARM, BARE) == (["arm", "bare"], {})
    assert found(AMD, BARE) == (["amd", "bare"], {})


def test_only_amd64_is_used_where_nodes_differ_and_nobody_says_what_the_image_is_built_for() -> None:
    used, left_out = found(AMD, ARM, BARE)
    assert used == ["amd", "bare"]
    assert left_out["arm"] == (
        "its architecture is arm64, and the worker's image is taken to be built for amd64; where it is built for more, say "
        "so in worker.architectures"
    )


def test_nodes_without_devices_or_that_the_plan_does_not_select_do_not_count() -> None:
    idle = replace(machine("idle", "amd64"), allocatable={})
    assert found(ARM, idle)[0] == ["arm"]
    assert "no nvidia.com/gpu" in found(AMD, replace(ARM, allocatable={}))[1]["arm"]
    pools = (replace(AMD, labels=AMD.labels | {"pool": "a"}), replace(ARM, labels=ARM.labels | {"pool": "b"}))
    assert found(*pools, nodeSelector={"pool": "b"})[0] == ["arm"]


def test_nodes_whose_devices_the_plan_does_not_take_do_not_count() -> None:
    told = {"nvidia.com/gpu.product": "NVIDIA-GH200-480GB", "nvidia.com/gpu.memory": "97871"}
    hopper = replace(ARM, labels=ARM.labels | told)
    assert found(AMD, hopper)[0] == ["amd"]
    assert found(AMD, hopper, products=["NVIDIA-GH200-480GB"])[0] == ["arm"]
    shared = replace(AMD, labels=AMD.labels | {"nvidia.com/gpu.replicas": "4"})
    assert found(shared, hopper)[0] == ["arm"]
    unknown = replace(AMD, labels={"kubernetes.io/arch": "amd64"})
    assert found(unknown, hopper, products=["NVIDIA-GH200-480GB"])[0] == [], "its labels may come later"


@pytest.mark.parametrize(
    ("chart", "worker", "used"),
    [
        (("arm64",), {}, ["arm", "bare"]),
        (("amd64", "arm64"), {}, ["amd", "arm", "bare"]),
        (("arm64",), {"architectures": ["amd64"]}, ["amd", "bare"]),
        ((), {"architectures": ["amd64", "arm64"]}, ["amd", "arm", "bare"]),
        (("arm64",), {"image": "own:1"}, ["amd", "bare"]),  # the chart speaks of its own image
        (("amd64",), {"image": "own:1", "architectures": ["arm64"]}, ["arm", "bare"]),
    ],
)
def test_plan_and_chart_say_what_the_image_is_built_for(
    chart: tuple[str, ...], worker: dict[str, Any], used: list[str]
) -> None:
    assert found(AMD, ARM, BARE, chart=chart, worker=worker)[0] == used


def test_windows_nodes_are_always_left_out() -> None:
    windows = machine("windows", "amd64", "windows")
    used, left_out = found(ARM, windows, worker={"architectures": ["amd64", "arm64"]})
    assert (used, left_out["windows"]) == (["arm"], "it runs windows, and workers need Linux")
    assert found(ARM, windows)[0] == ["arm"]


def test_node_of_another_architecture_is_not_waited_for() -> None:
    snapshot = replace(World().snapshot(), nodes=(AMD, ARM, replace(machine("late", "arm64"), ready=False)))
    assert find_late_nodes(snapshot, spec_of(), unready_since=World().now) == []


def test_plan_under_way_keeps_its_nodes() -> None:
    """A former version took nodes of any architecture."""
    mixed = replace(World().snapshot(), nodes=(AMD, ARM))
    before = inspect_nodes(mixed, spec_of(worker={"architectures": ["amd64", "arm64"]}))
    assert find_lost_nodes(mixed, spec_of(), before) == {}
    after = replace(mixed, nodes=(AMD, ARM, machine("more", "arm64"), machine("power", "ppc64le")))
    assert [one.name for one in inspect_nodes(after, spec_of(), {"amd", "arm"}).nodes] == ["amd", "arm", "more"]
    only_arm = replace(mixed, nodes=(AMD, ARM))
    assert [one.name for one in inspect_nodes(only_arm, spec_of(), {"arm"}).nodes] == ["arm"]


def test_architectures_of_the_chart_come_by_the_environment() -> None:
    read = Settings.from_environment({"TRAINWRIGHT_WORKER_ARCHITECTURES": "amd64, arm64"})
    assert read.rules.architectures == ("amd64", "arm64")
    assert Settings.from_environment({}).rules.architectures == ()
    with pytest.raises(ValueError, match="TRAINWRIGHT_WORKER_ARCHITECTURES must name some of amd64"):
        Settings.from_environment({"TRAINWRIGHT_WORKER_ARCHITECTURES": "x86_64"})


PULLED = 'Back-off pulling image "w:1": ErrImagePull: failed to pull and unpack image "w:1": no match for platform in manifest: not found'
EXEC = "exec /opt/trainwright/bin/python: exec format error"


@pytest.mark.parametrize(
    ("container", "log", "words"),
    [
        (ContainerFacts("pytorch", waiting_reason="ImagePullBackOff", waiting_message=PULLED), None, "no match for"),
        (ContainerFacts("pytorch", exit_code=255, termination_message=EXEC), None, EXEC),
        (ContainerFacts("pytorch", exit_code=1), f"first\n{EXEC}\n", EXEC),
        (
            ContainerFacts(
                "pytorch",
                exit_code=128,
                termination_reason="StartError",
                termination_message='failed to create containerd task: runc create failed: exec: "python": exec format error',
            ),
            None,
            "runc create failed",
        ),
        (
            ContainerFacts(
                "pytorch", exit_code=1, termination_message="exec container process `/a`: Exec format error"
            ),
            None,
            "exec container process",
        ),
        (ContainerFacts("pytorch", exit_code=1), "OSError: [Errno 8] Exec format error: './train.sh'", ""),
        (ContainerFacts("pytorch", exit_code=0), EXEC, ""),
        (ContainerFacts("pytorch", waiting_reason="ImagePullBackOff", waiting_message="not found"), None, ""),
    ],
)
def test_words_about_an_image_of_another_architecture_are_found(
    container: ContainerFacts, log: str | None, words: str
) -> None:
    pod = PodFacts("p", "links", "j", "master", 0, World().now, containers=(container,), log=log)
    said = image_mismatch(pod)
    assert words in said
    assert bool(said) is bool(words)


@pytest.mark.parametrize("how", ["pull", "start"])
def test_image_of_another_architecture_is_told_with_node_and_architecture_and_tried_again(how: str) -> None:
    world = World(nodes=(machine("n1", "arm64"), machine("n2", "arm64"), machine("n3", "arm64")))
    if how == "pull":
        world.run(until=lambda: any(not pod.gates for pod in world.pods.values()))
        stuck = ContainerFacts("pytorch", waiting_reason="ErrImagePull", waiting_message=PULLED)
        world.pods = {name: replace(pod, phase="Pending", node="n2" if not pod.node else pod.node, containers=(stuck,))
                      if pod.node == "n2" else pod for name, pod in world.pods.items()}  # fmt: skip
    else:
        world.run(until=lambda: running(world, "links"))
        ended = ContainerFacts("pytorch", exit_code=255, termination_message=EXEC, finished_at=world.now)
        world.pods = {name: replace(pod, phase="Failed", containers=(ended,)) if pod.node == "n2" else pod
                      for name, pod in world.pods.items()}  # fmt: skip
    world.apply(world.decide())
    lost = lost_attempt(world, "links")
    assert lost.reason == "ImageNotForArchitecture"
    assert "its image is not built for arm64 of node n2; name one that is in spec.worker.image" in lost.message
    world.run()
    assert world.succeeded == "True"
