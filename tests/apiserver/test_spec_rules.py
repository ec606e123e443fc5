"""Rules of the spec: their CEL on the API server and their twins in Python refuse the same specs."""

from __future__ import annotations

import random
from typing import Any

from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.spec_rules import RULES

DRAWS = 200
JOB = {"image": "i", "command": ["c"]}
FRAMEWORK: dict[str, Any] = {"image": "i", "command": ["c"], "stepTimeRegex": "s"}
FIELDS: dict[str, list[Any]] = {
    "search": [{}, {"tolerance": 0.5}, {"tolerance": 0.51}, {"effort": 0.1}, {"effort": 0.01}, {"objective": "Cost"}, {"objective": "Cost"}],
    "devices": [
        {}, {"pricesPerHour": {"a": 1.0}}, {"pricesPerHour": {}}, {"resourceName": "amd.com/gpu"},
        {"resourceName": "gpu"}, {"resourceName": "Nvidia.com/gpu"}, {"resourceName": "a/b\n"},
    ],
    "trials": [
        {}, {"stopWhenRegretBelow": 0.1}, {"stopWhenRegretBelow": 0.2}, {"maxDeviceHours": 0.25}, {"maxDeviceHours": 0.2}, {"topK": 0, "maxDeviceHours": 0.1},
        {"framework": FRAMEWORK}, {"framework": FRAMEWORK, "perGang": 2}, {"framework": FRAMEWORK, "timeline": True},
        {"framework": FRAMEWORK | {"stepTimeJsonPath": ".a"}},
        {"framework": FRAMEWORK | {"memoryRegex": "m", "memoryJsonPath": ".m"}},
    ],
    "apply": [None, "Never", "Run", "Suspended"],
    "job": [None, JOB],
    "queueName": [None, None, "q"],
    "queuePriorityClass": [None, None, "p"],
    "launcher": [None, "JobSet", "PyTorchJob"],
    "worker": [{}, {}, {"podTemplate": {"spec": {"nodeName": "n"}}}, {"podTemplate": {"spec": {"restartPolicy": "Never"}}}],
}  # fmt: skip


def test_the_api_server_and_the_twins_refuse_the_same_specs(api_server, training_plan) -> None:
    generator = random.Random(1)
    plans, expected = [], []
    for number in range(DRAWS):
        drawn = {name: generator.choice(values) for name, values in FIELDS.items() if generator.random() < 0.6}
        spec = {name: value for name, value in drawn.items() if value is not None}
        plans.append(training_plan(f"plan-{number}", spec))
        parsed = TrainingPlanSpec.model_validate(plans[-1]["spec"])
        expected.append({rule.stated.message for rule in RULES if not rule.holds(parsed)})
    answer = api_server.try_kubectl("create", "--dry-run=server", document=plans).stderr
    refusals = {text.partition('"')[0]: text for text in answer.split('TrainingPlan.trainwright.dev "')[1:]}
    messages = {rule.stated.message for rule in RULES}
    for number, broken in enumerate(expected):
        refusal = refusals.get(f"plan-{number}", "")
        assert {message for message in messages if message in refusal} == broken, (plans[number]["spec"], refusal)
        assert bool(refusal) == bool(broken), (plans[number]["spec"], refusal)
    for message in messages:
        assert 0 < sum(message in broken for broken in expected) < DRAWS, f"no draw tells: {message}"
