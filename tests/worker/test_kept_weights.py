"""ZeRO-3 whose weights stay gathered from the first forward to the last backward of an iteration."""

from __future__ import annotations

import pytest

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright.worker_api import TrialSeriesTask
from trainwright_worker.gang.rank_assignment import gang_devices

MODEL = Model.of(Gpt(layers=6, hidden_size=64, heads=4, sequence_length=16, vocabulary_size=64))
DEVICES, MICRO_BATCHES = 2, 3
LAYERS = len(MODEL.layers)
HALF = LAYERS // 2


def plan(make, *kept: bool) -> Plan:
    """Return a plan of one stage with as many layer runs, which keep their weights or do not."""
    size = LAYERS // len(kept)
    runs = (
        LayerRun(number * size, size, Strategy(1, DEVICES, sharding=Sharding.ZERO3, keep_gathered_weights=keep), (1, 1))
        for number, keep in enumerate(kept)
    )
    stage = Stage(gang_devices(make.gang(DEVICES)), tuple(runs))
    return Plan(LAYERS, DEVICES * MICRO_BATCHES, (Pipeline(MICRO_BATCHES, DEVICES, (stage,)),))


@pytest.mark.torch_processes
@pytest.mark.timeout(120)
def test_weights_that_stay_gathered_train_the_same_with_more_memory(worker, make) -> None:
    plans = plan(make, False), plan(make, False, True), plan(make, True)
    outcome = worker.local(TrialSeriesTask(make.gang(DEVICES), MODEL, plans, "sgd", warmup_iterations=1, iterations=3))
    assert outcome.code == 0, outcome.errors
    plain, half, whole = outcome.reports[0].trials
    assert half.losses == whole.losses == plain.losses
    peak = [max(one.peak_bytes for one in trial.memory) for trial in (plain, half, whole)]
    gathered = 4 * sum(MODEL.kind_of(layer).parameters for layer in range(HALF, LAYERS))
    assert peak[0] + gathered / 2 < peak[1] < peak[2]
