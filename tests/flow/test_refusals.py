"""Plans that cannot begin: they say so at once, in the words of whoever refuses them."""

from __future__ import annotations

from flow_world import World, node, spec_of


def test_no_feasible_plan_ends_with_the_searchs_sentence() -> None:
    gpt = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
    tiny = {"nvidia.com/gpu.product": "emulated-v100", "nvidia.com/gpu.memory": "1"}
    world = World(nodes=(node("n1", labels=tiny), node("n2", labels=tiny)), spec=spec_of(model={"gpt": gpt}))
    world.run()
    assert world.condition("Planned").reason == "NoFeasiblePlan"
    assert "memory" in world.condition("Succeeded").message


def test_a_pod_template_that_the_api_server_refuses_is_told_in_its_words() -> None:
    world = World(template_error=("PodTemplateInvalid", "spec.tolerations: expected list"))
    world.run()
    assert world.condition("Accepted").reason == "PodTemplateInvalid"
    assert "spec.tolerations: expected list" in world.condition("Succeeded").message
    assert world.created == []


def test_a_cluster_without_pytorchjobs_is_told_what_to_install() -> None:
    world = World(template_error=("PyTorchJobCRDMissing", "the server could not find the requested resource"))
    world.run()
    assert "training operator" in world.condition("Succeeded").message


def test_no_worker_image_is_told() -> None:
    world = World(image="")
    world.run()
    assert world.condition("Accepted").reason == "WorkerImageMissing"


def test_a_job_that_the_api_server_refuses_is_told_in_its_words() -> None:
    world = World(refuse_jobs="exceeded quota: gpus")
    world.run()
    assert world.condition("LinksMeasured").reason == "JobRefused"
    assert "exceeded quota" in world.condition("Succeeded").message


def test_a_spec_that_cannot_be_read_is_refused() -> None:
    world = World(spec_error="spec.model: Field required")
    world.step()
    world.step()
    assert world.condition("Accepted").reason == "SpecInvalid"
    assert world.succeeded == "False"
    assert "spec.model: Field required" in world.condition("Succeeded").message
