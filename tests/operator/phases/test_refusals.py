"""Plans that cannot begin: they say so at once, in the words of whoever refuses them."""

from __future__ import annotations

from flow_world import World, node, spec_of

from trainwright_operator.api.spec import LauncherKind


def test_plan_fails_with_the_search_message_when_no_plan_is_feasible() -> None:
    gpt = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
    tiny = {"nvidia.com/gpu.product": "emulated-v100", "nvidia.com/gpu.memory": "1"}
    world = World(nodes=(node("n1", labels=tiny), node("n2", labels=tiny)), spec=spec_of(model={"gpt": gpt}))
    world.run()
    assert world.condition("Planned").reason == "NoFeasiblePlan"
    assert "memory" in world.condition("Succeeded").message


def test_plan_fails_with_the_api_servers_message_when_the_pod_template_is_rejected() -> None:
    world = World(template_error=("PodTemplateInvalid", "spec.tolerations: expected list"))
    world.run()
    assert world.condition("Accepted").reason == "PodTemplateInvalid"
    assert "spec.tolerations: expected list" in world.condition("Succeeded").message
    assert world.created == []


def test_plan_names_what_to_install_when_the_pytorchjob_crd_is_missing() -> None:
    world = World(missing=frozenset(LauncherKind))
    world.run(until=lambda: world.status.waiting is not None)
    assert "training operator" in world.condition("Succeeded").message


def test_plan_fails_when_no_worker_image_is_set() -> None:
    world = World(image="")
    world.run()
    assert world.condition("Accepted").reason == "WorkerImageMissing"
