"""Invalid plans are refused by the API server itself, with a message that says what to change."""

from __future__ import annotations

import pytest

from trainwright_operator.api import crd
from trainwright_operator.api.base import VALIDATIONS

CUSTOM = {
    "entrypoint": "models.resnet:resnet18",
    "kinds": [
        {
            "name": "Stem",
            "parameters": 9536,
            "forwardFlopsPerRow": 2e6,
            "outputElementsPerRow": 64,
            "savedElementsPerRow": 0.5,
        }
    ],
    "layers": ["Stem", "Stem"],
}
REFUSALS = {
    "heads do not divide the width": (
        {"model.gpt.hiddenSize": 9},
        "hiddenSize must be a multiple of heads, since every head takes an equal part; change one of the two",
    ),
    "no family": ({"model": {}}, "model needs exactly one family; set one of model.gpt, model.llama"),
    "two families": (
        {"model.vit": {"layers": 2, "hiddenSize": 8, "heads": 2}},
        "model needs exactly one family; set one of model.gpt, model.llama",
    ),
    "heads that share no keys equally": (
        {"model": {"llama": {"layers": 2, "hiddenSize": 8, "heads": 4, "sequenceLength": 8, "keyValueHeads": 3}}},
        "heads must be a multiple of keyValueHeads, since each of these serves equally many heads; change one of the two",
    ),
    "patches that do not tile": (
        {"model": {"vit": {"layers": 2, "hiddenSize": 8, "heads": 2, "imageSize": 30}}},
        "imageSize must be a multiple of patchSize, since patches tile the image; change one of the two",
    ),
    "heads for too few stages": (
        {"model": {"swin": {"layers": [1, 1], "hiddenSize": 32, "heads": [1]}}},
        "heads must give one number for each stage, as many as layers does; make the two lists equally long",
    ),
    "more stages' layers than are planned": (
        {"model": {"swin": {"layers": [1000, 1000], "hiddenSize": 32}}},
        "layers must sum to 1024 at most; leave some out",
    ),
    "a decoder that is too deep": (
        {"model": {"t5": {"layers": 512, "decoderLayers": 513, "hiddenSize": 8, "heads": 2}}},
        "layers and decoderLayers must sum to 1024 at most; lower one of the two",
    ),
    "more experts a token than there are": (
        {"model": {"moe": {"layers": 2, "hiddenSize": 8, "heads": 2, "sequenceLength": 8, "experts": 1}}},
        "expertsPerToken cannot be more than experts; lower it, or raise experts",
    ),
    "no block with experts": (
        {"model": {"moe": {"layers": 2, "hiddenSize": 8, "heads": 2, "sequenceLength": 8, "expertEvery": 3}}},
        "expertEvery leaves no block with experts; lower it to layers at most",
    ),
    "a depth that no ResNet has": ({"model": {"wideResNet": {"depth": 51}}}, 'supported values: "50", "101", "152"'),
    "an image that cannot be halved five times": (
        {"model": {"wideResNet": {"imageSize": 40}}},
        "imageSize must be a multiple of 32, since it is halved five times; change it",
    ),
    "a generator without layers": (
        {"model": {"transGan": {"layers": [0, 0]}}},
        "layers must sum to 1 … 1024; change some of them",
    ),
    "an entry point that is none": (
        {"model": {"custom": CUSTOM | {"entrypoint": "resnet18"}}},
        "entrypoint must be written package.module:function, for example models.resnet:resnet18",
    ),
    "a model of one's own without its layers": ({"model": {"custom": {"entrypoint": "m:f"}}}, "custom.kinds: Required"),
    "a job without the place of its step time": (
        {"trials": {"framework": {"image": "i", "command": ["c"]}}},
        "framework needs exactly one of stepTimeRegex and stepTimeJsonPath",
    ),
    "a job whose expression is none": (
        {"trials": {"framework": {"image": "i", "command": ["c"], "stepTimeRegex": "("}}},
        "this is no regular expression of RE2",
    ),
    "a winner to hand over without a job": ({"apply": "Run"}, "apply needs the job that trains by the winner"),
    "a job in a series": (
        {"trials": {"perGang": 2, "framework": {"image": "i", "command": ["c"], "stepTimeJsonPath": ".t"}}},
        "trials.framework runs each trial in pods of its own",
    ),
    "no model": ({"model": ...}, "spec.model: Required value"),
    "no batch": ({"training": {}}, "spec.training.globalBatchSize: Required value"),
    "no layers": ({"model.gpt.layers": 0}, "should be greater than or equal to 1"),
    "no heads": ({"model.gpt.heads": 0}, "should be greater than or equal to 1"),
    "too many layers": ({"model.gpt.layers": 1025}, "should be less than or equal to 1024"),
    "an empty batch": ({"training.globalBatchSize": 0}, "should be greater than or equal to 1"),
    "a batch that is a slip of the pen": (
        {"training.globalBatchSize": 1_000_001},
        "should be less than or equal to 1000000",
    ),
    "another number format": (
        {"training.dtype": "float8"},
        'supported values: "auto", "float32", "bfloat16", "float16"',
    ),
    "another optimizer": ({"training.optimizer": "lion"}, 'supported values: "adam", "sgd"'),
    "another planner": (
        {"search.planner": "Magic"},
        'supported values: "Auto", "Amp", "AmpAnnealing", "GalvatronBase", "GalvatronBmw", "Alpa", "Megatron", "Random"',
    ),
    "another objective": ({"search.objective": "Glory"}, 'supported values: "Time", "Cost"'),
    "cost without prices": (
        {"search.objective": "Cost", "devices.max": 2},
        "search.objective Cost needs the price of every accelerator; set devices.pricesPerHour, or choose Time",
    ),
    "cost and regret": (
        {
            "search.objective": "Cost",
            "devices.pricesPerHour": {"Tesla-T4": 0.35},
            "trials.stopWhenRegretBelow": 0.01,
        },
        "trials.stopWhenRegretBelow weighs seconds, not cost; leave it out, or choose search.objective Time",
    ),
    "a gang of several objects in a queue": (
        {"queueName": "research", "launcher": "PyTorchJob"},
        "Kueue would admit a part of a gang of several PyTorchJobs; with queueName leave launcher out, or set JobSet",
    ),
    "a priority in no queue": (
        {"queuePriorityClass": "high"},
        "queuePriorityClass orders the gangs of a queue; set queueName, or leave it out",
    ),
    "a queue whose name no label holds": ({"queueName": "Research"}, "spec.queueName"),
    "a tolerance that is no share": ({"search.tolerance": 0.6}, "tolerance is a share, 0.5 at most"),
    "no effort": ({"search.effort": 0}, "effort is at least 0.1; 1 is what"),
    "no time to search": ({"search.budgetSeconds": 0}, "should be greater than or equal to 1"),
    "no device": ({"devices.max": 0}, "should be greater than or equal to 1"),
    "the processor as device": (
        {"devices.resourceName": "cpu"},
        "resourceName must be an extended resource as nodes list it, domain/name, for example nvidia.com/gpu",
    ),
    "a product twice": ({"devices.products": ["Tesla-T4", "Tesla-T4"]}, "Duplicate value"),
    "an empty product": ({"devices.products": [""]}, "should be at least 1 chars long"),
    "too many products": ({"devices.products": [f"p{i}" for i in range(33)]}, "must have at most 32 items"),
    "too many labels": (
        {"devices.nodeSelector": {f"l{i}": "x" for i in range(17)}},
        "must have at most 16 items",
    ),
    "a label's value that no label can have": ({"devices.nodeSelector": {"a": "x" * 64}}, "may not be more than 63"),
    "a tensor degree below one": ({"search.limits.maxTensorDegree": 0}, "should be greater than or equal to 1"),
    "more trials than are allowed": ({"trials.topK": 33}, "should be less than or equal to 32"),
    "a negative number of trials": ({"trials.topK": -1}, "should be greater than or equal to 0"),
    "another baseline": ({"trials.baseline": "Guess"}, 'supported values: "Megatron", "None"'),
    "nothing to measure": ({"trials.iterations": 0}, "should be greater than or equal to 1"),
    "no device-hours": ({"trials.maxDeviceHours": 0}, "should be greater than 0"),
    "device-hours for less than a run": (
        {"trials.maxDeviceHours": 0.1},
        (
            "maxDeviceHours is used up by a single run on one device that lasts runDeadlineSeconds; raise "
            "maxDeviceHours or lower runDeadlineSeconds"
        ),
    ),
    "no time for a run": ({"trials.runDeadlineSeconds": 0}, "should be greater than or equal to 1"),
    "no time to start": ({"trials.pendingDeadlineSeconds": 0}, "should be greater than or equal to 1"),
    "a deadline beyond a week": ({"profiling.deadlineSeconds": 604_801}, "should be less than or equal to 604800"),
    "no time for the links": ({"links.deadlineSeconds": 0}, "should be greater than or equal to 1"),
    "an empty image": ({"worker.image": ""}, "should be at least 1 chars long"),
    "an image that is no text": ({"worker.image": 3}, "must be of type string"),
    "a placement by node": (
        {"worker.podTemplate.spec": {"nodeName": "n1"}},
        (
            "podTemplate.spec cannot place the workers (nodeName, nodeSelector, affinity, schedulingGates), since the "
            "plan does; choose nodes by devices.nodeSelector"
        ),
    ),
    "a placement by labels": (
        {"worker.podTemplate.spec": {"nodeSelector": {"a": "b"}}},
        "choose nodes by devices.nodeSelector",
    ),
    "a placement by affinity": (
        {"worker.podTemplate.spec": {"affinity": {"nodeAffinity": {}}}},
        "choose nodes by devices.nodeSelector",
    ),
    "a gate of another's": (
        {"worker.podTemplate.spec": {"schedulingGates": [{"name": "example.com/gate"}]}},
        "choose nodes by devices.nodeSelector",
    ),
    "a worker that restarts": (
        {"worker.podTemplate.spec": {"restartPolicy": "Always"}},
        (
            "podTemplate.spec.restartPolicy cannot be set, since a worker that restarts would falsify the measurement; "
            "remove it"
        ),
    ),
    "a negative time to live": ({"ttlSecondsAfterFinished": -1}, "should be greater than or equal to 0"),
    "a suspension that is no yes or no": ({"suspend": "yes"}, "must be of type boolean"),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_invalid_spec_is_refused_with_a_sentence(api_server, training_plan, changes, sentence) -> None:
    assert sentence in api_server.refusal(training_plan(changes=changes))


JOB = {"image": "i", "command": ["c"]}
CONTROLS = {
    "worker.image": {"worker.image": "worker:1\x1b[8m"},
    "worker.podTemplate.metadata.labels": {"worker.podTemplate.metadata": {"labels": {"a": "b\u200b"}}},
    "worker.podTemplate.metadata.annotations": {"worker.podTemplate.metadata": {"annotations": {"a": "b\u202e"}}},
    "devices.products": {"devices.products": ["Tesla-T4\u2066"]},
    "devices.nodeSelector": {"devices.nodeSelector": {"a": "b\n"}},
    "links.topologyLabels": {"links.topologyLabels": ["zone\a"]},
    "job.image": {"job": JOB | {"image": "i\u2028"}},
    "job.command": {"job": JOB | {"command": ["c\x1b]0;x\x07"]}},
    "trials.framework.command": {"trials": {"framework": JOB | {"command": ["\x9b2J"], "stepTimeJsonPath": ".t"}}},
    "trials.framework.stepTimeRegex": {"trials": {"framework": JOB | {"stepTimeRegex": "took\ufeff"}}},
    "model.custom.kinds": {"model": {"custom": CUSTOM | {"kinds": [CUSTOM["kinds"][0] | {"name": "Stem\u00ad"}]}}},
}
INVISIBLE = "holds a control or invisible character, which can hide or falsify what the text says; remove it"


@pytest.mark.parametrize(("place", "changes"), CONTROLS.items(), ids=CONTROLS)
def test_control_character_is_refused_with_its_field(api_server, training_plan, place, changes) -> None:
    refusal = api_server.refusal(training_plan(changes=changes))
    assert INVISIBLE in refusal
    assert f"spec.{place}" in refusal


def test_letters_of_every_script_and_lines_of_scripts_are_accepted(api_server, training_plan) -> None:
    command = ["bash", "-c", "set -e\n\techo 'Grüße 日本語 🚀'\r\n"]
    template = {"metadata": {"annotations": {"note": "Zeile 1\nZeile 2 – ñ"}}}
    changes = {"job": JOB | {"command": command, "podTemplate": template}, "devices.products": ["加速器-é"]}
    api_server.kubectl("create", document=training_plan(changes=changes))


def test_plan_of_before_with_a_control_character_can_still_be_edited(bare_api_server, training_plan_of) -> None:
    def without_rule(value):
        if isinstance(value, dict):
            own = {key: without_rule(one) for key, one in value.items()}
            left = [one for one in own.get(VALIDATIONS, ()) if one["message"] != INVISIBLE]
            return {key: one for key, one in own.items() if key != VALIDATIONS} | ({VALIDATIONS: left} if left else {})
        return [without_rule(one) for one in value] if isinstance(value, list) else value

    api, plan = bare_api_server, training_plan_of("default", "old", {"worker.image": "worker:1\u200b"})
    for definition in (without_rule(crd.crd_manifest()), crd.crd_manifest()):
        api.kubectl("apply", "--server-side", "--force-conflicts", document=definition)
        api.establish("crd/trainingplans.trainwright.dev")
        api.kubectl("apply", document=plan)
    edit = ("patch", "trainingplan", "old", "--type=merge", "--patch")
    api.kubectl(*edit, '{"spec":{"trials":{"topK":1}}}')
    api.kubectl(
        "patch",
        "trainingplan",
        "old",
        "--subresource=status",
        "--type=merge",
        "--patch",
        '{"status":{"phase":"Failed"}}',
    )
    done = api.try_kubectl(*edit, '{"spec":{"worker":{"image":"worker:2\\u200b"}}}')
    assert INVISIBLE in done.stderr


def test_rule_names_the_offending_field(api_server, training_plan) -> None:
    assert "spec.model.gpt.hiddenSize: " in api_server.refusal(training_plan(changes={"model.gpt.hiddenSize": 9}))
    assert "spec.devices.resourceName: " in api_server.refusal(training_plan(changes={"devices.resourceName": "cpu"}))
    assert "spec.trials.maxDeviceHours: " in api_server.refusal(training_plan(changes={"trials.maxDeviceHours": 0.1}))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a" * 41, "metadata.name may have 40 characters at most, since jobs and pods are named after it; shorten it"),
        ("7b", "metadata.name must start with a lower-case letter and hold lower-case letters, digits and hyphens"),
        ("gpt2.medium", "since jobs and services are named after it; rename it"),
    ],
)
def test_name_too_long_for_child_objects_is_refused(api_server, training_plan, name, sentence) -> None:
    assert sentence in api_server.refusal(training_plan(name))


@pytest.mark.parametrize(
    ("path", "value"),
    [("trials.topk", 3), ("worker.nodeSelector", {}), ("model.gpt.depth", 2), ("devices.count", 8), ("tune", True)],
)
def test_a_field_that_does_not_exist_is_refused(api_server, training_plan, path, value) -> None:
    assert f'unknown field "spec.{path}"' in api_server.refusal(training_plan(changes={path: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"trials.topK": 0},
        {"trials.topK": 0, "trials.maxDeviceHours": 0.1},
        {"trials.maxDeviceHours": 0.25, "trials.runDeadlineSeconds": 900},
        {"devices.max": 1},
        {"devices.resourceName": "habana.ai/gaudi"},
        {"model.gpt": {"layers": 1, "hiddenSize": 1, "heads": 1, "sequenceLength": 1, "vocabularySize": 1}},
        {"model": {"llama": {"layers": 2, "hiddenSize": 8, "heads": 4, "sequenceLength": 8, "keyValueHeads": 2}}},
        {"model": {"bert": {"layers": 2, "hiddenSize": 8, "heads": 2}}},
        {"model": {"vit": {"layers": 2, "hiddenSize": 8, "heads": 2}}},
        {"model": {"swin": {"layers": [2, 2, 6, 2], "hiddenSize": 96}}},
        {"model": {"t5": {"layers": 512, "hiddenSize": 8, "heads": 2}}},
        {"model": {"moe": {"layers": 2, "hiddenSize": 8, "heads": 2, "sequenceLength": 8}}},
        {"model": {"wideResNet": {}}},
        {"model": {"transGan": {}}},
        {"model": {"custom": CUSTOM}},
        {"search.objective": "Cost", "devices.pricesPerHour": {"Tesla-T4": 0.35}},
        {"queueName": "research", "queuePriorityClass": "high", "launcher": "JobSet"},
        {"search.planner": "GalvatronBmw", "search.tolerance": 0, "training.dtype": "float16"},
    ],
)
def test_values_at_the_limits_are_accepted(api_server, training_plan, changes) -> None:
    api_server.kubectl("create", "--dry-run=server", document=training_plan("a" * 40, changes))


@pytest.mark.parametrize(
    ("field", "path", "value"),
    [
        ("model", "model.gpt.layers", 3),
        ("training", "training.optimizer", "sgd"),
        ("devices", "devices.max", 1),
        ("search", "search.limits.maxTensorDegree", 1),
        ("queueName", "queueName", "research"),
    ],
)
def test_immutable_fields_cannot_be_changed(api_server, training_plan, field, path, value) -> None:
    api_server.create(training_plan())
    done = api_server.try_kubectl("replace", document=training_plan(changes={path: value}))
    assert done.returncode != 0
    assert f"{field} is immutable; create another TrainingPlan" in done.stderr


def test_effort_and_deadlines_can_be_changed(api_server, training_plan) -> None:
    first = api_server.create(training_plan())
    changes = {"trials.topK": 5, "trials.runDeadlineSeconds": 60, "worker.image": "other", "suspend": True}
    api_server.kubectl("replace", document=training_plan(changes=changes))
    changed = api_server.get("trainingplan", "tiny", "--namespace", first["metadata"]["namespace"])
    assert changed["spec"]["trials"]["topK"] == 5
    assert changed["metadata"]["generation"] == 2
