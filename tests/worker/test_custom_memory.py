"""Memory of user models: what layers take for a moment, and buffers, as described, as profiled and as the executor takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainwright.cluster import Accelerator, Cluster, Device, Node
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.stage_tables import StageSpans, StageTables
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime
from trainwright.strategy import Strategy
from trainwright.worker_api import ProfilingTask
from trainwright_worker.live_bytes import measure_peak_bytes
from trainwright_worker.measure.layer_under_test import LayerUnderTest
from trainwright_worker.model_description.description import describe

ROWS = 4
CPU = torch.device("cpu")
CLUSTER = Cluster(accelerators=(Accelerator("cpu", 10**12),), nodes=(Node("node", "cpu", 1),), links=())


@pytest.fixture(scope="module")
def own_gpt() -> Model:
    """Return a GPT whose logits are its largest tensors."""
    return Model.of(describe("own_gpt:small", check_seconds=0))


def profiles(make, model: Model, *, rows: tuple[int, ...] = (2, ROWS)) -> Profiles:
    def profile(kind, count: int) -> LayerProfile:
        task = ProfilingTask(make.gang(1), model, 1, rows, optimizer="sgd")
        layer = LayerUnderTest.of(task, kind, count, CPU, lambda _doing: None)
        sizes = layer.activation_bytes, layer.parameter_bytes
        return LayerProfile("cpu", kind.name, 1, count, 1e-3, 2e-3, 1e-4, *sizes, peak_bytes=layer.peak_bytes())

    return Profiles(tuple(profile(kind, count) for kind in model.kinds for count in rows))


def context(model: Model, measured: Profiles) -> CostContext:
    return CostContext(model, CLUSTER, measured, "sgd", Runtime(gradient_dtype=Dtype.FLOAT32))


def predicted(model: Model, measured: Profiles, *, recompute: bool = False, **fields) -> int:
    """Return the peak bytes of one stage of two micro-batches."""
    run = LayerRun(0, len(model.layers), Strategy(1, 1, recompute=recompute), (ROWS,))
    plan = Plan(len(model.layers), 2 * ROWS, (Pipeline(2, ROWS, (Stage((Device("node", 0),), (run,)),)),), **fields)
    return estimate_with_context(plan, context(model, measured)).peak_memory_bytes


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("recompute", [False, True])
def test_prediction_with_a_large_loss_head_is_what_the_executor_takes(
    make, executor, own_gpt: Model, dtype: Dtype, recompute: bool
) -> None:
    model = replace(own_gpt, dtype=dtype)
    one = executor(model, recompute=recompute)
    one.run_iteration(one.make_batch(0))
    batch = one.make_batch(1)
    peak = measure_peak_bytes(lambda: one.run_iteration(batch), [*one.optimizer.resident_tensors, *batch.tensors], CPU)
    measured = profiles(make, model)
    assert predicted(model, measured, recompute=recompute) == pytest.approx(peak, rel=0.005)
    unmeasured = Profiles(tuple(replace(layer, peak_bytes=None) for layer in measured.layers))
    assert predicted(model, unmeasured, recompute=recompute) == pytest.approx(peak, rel=0.01)


def test_searches_count_the_workspace_of_the_exact_estimate(make, own_gpt: Model) -> None:
    cost = context(own_gpt, profiles(make, own_gpt))
    tables = StageTables(cost, StageSpans(own_gpt, tuple(range(len(own_gpt.layers) + 1))))
    by_span = tables.workspace_bytes(1, ROWS)
    for number, (first, end) in enumerate(zip(*tables.spans.layers, strict=True)):
        layers = [own_gpt.kind_of(layer) for layer in range(first, end)]
        kept = [cost.profiles.cost("cpu", kind.name, 1, ROWS).activation_bytes for kind in layers]
        taken = [cost.workspace_bytes(kind, ROWS) - sum(kept[place + 1 :]) for place, kind in enumerate(layers)]
        assert by_span[number] == pytest.approx(max(*taken, 0.0)), (first, end)


def test_described_buffers_count_for_every_layer() -> None:
    model = Model.of(describe("buffered_models:moving_codes", check_seconds=0, dtypes=[torch.float32]))
    assert [kind.buffer_bytes for kind in model.kinds] == [0, 4 * (6 * 8 + 6 * 8 + 6 + 8), 0]
    layers = [LayerProfile("cpu", kind.name, 1, ROWS, 1e-3, 2e-3, 1e-4, 1000, 1000) for kind in model.kinds]
    without = replace(model.family, kinds=tuple(replace(kind, buffer_bytes=0) for kind in model.family.kinds))
    more = predicted(model, Profiles(tuple(layers))) - predicted(Model.of(without), Profiles(tuple(layers)))
    assert more == 3 * model.kinds[1].buffer_bytes


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("recompute", [False, True])
def test_buffers_that_forwards_change_are_kept_for_recompute(
    make, executor, recompute: bool, schedule: Schedule
) -> None:
    """Each of three layers keeps the values of one per micro-batch in flight, two under GPipe, and one layer those of now."""
    model = Model.of(describe("buffered_models:banks", check_seconds=0, dtypes=[torch.float32]))
    assert [kind.changed_buffer_bytes for kind in model.kinds] == [0, 4 * 4096 * 8, 0]
    one = executor(model, recompute=recompute, schedule=schedule)
    one.run_iteration(one.make_batch(0))
    batch = one.make_batch(1)
    buffers = [buffer for layer in one.stage.layers for buffer in layer.module.buffers()]
    resident = [*one.optimizer.resident_tensors, *buffers, *batch.tensors]
    peak = measure_peak_bytes(lambda: one.run_iteration(batch), resident, CPU)
    assert predicted(model, profiles(make, model), recompute=recompute, schedule=schedule) == pytest.approx(
        peak, rel=0.03
    )


def test_searches_count_the_buffers_that_the_exact_estimate_keeps(make) -> None:
    model = Model.of(describe("buffered_models:banks", check_seconds=0, dtypes=[torch.float32]))
    tables = StageTables(context(model, profiles(make, model)), StageSpans(model, tuple(range(len(model.layers) + 1))))
    inputs, bank = 4 * 8 * ROWS, 4 * 4096 * 8
    for kept, first, end in zip(tables.recomputed_bytes(1, ROWS), *tables.spans.layers, strict=True):
        blocks = sum(1 <= layer < 4 for layer in range(first, end))
        assert kept == (end - max(first, 1)) * inputs + blocks * bank, (first, end)


def test_attention_is_described_as_fused_kernels_compute_it(own_gpt: Model) -> None:
    """No scores are kept: what a block keeps per row grows with its sequence, not with the square of it."""
    (block,) = (kind for kind in own_gpt.kinds if kind.name == "Block")
    tokens, width, heads = 32, 64, 4
    values, statistics, scores = tokens * width, 2 * 2 * tokens, heads * tokens
    # Inputs of both norms and of the four products, one of which has 4 times as many values, as GELU's; queries, keys, values.
    assert block.saved_bytes_per_row(Dtype.FLOAT32) == 4 * ((5 + 2 * 4 + 3) * values + statistics + scores)


def described_profiles(model: Model) -> Profiles:
    """Return profiles as estimates from data sheets have them: layers keep what their description counted."""
    return Profiles(
        tuple(
            LayerProfile("cpu", kind.name, 1, ROWS, 1e-3, 2e-3, 1e-4, round(kind.saved_bytes(model.dtype, 1, ROWS)), 0)
            for kind in model.kinds
        )
    )


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("name", ["own_gpt:small", "upcasting_models:upcasting"])
def test_what_stays_float32_in_half_formats_is_described_and_predicted(executor, name: str, schedule: Schedule) -> None:
    """A loss keeps log-probabilities in float32; norms, a stream and products with a buffer their inputs."""
    model = Model.of(describe(name, check_seconds=0), Dtype.BFLOAT16)
    one = executor(model, schedule=schedule)
    one.run_iteration(one.make_batch(0))
    batch = one.make_batch(1)
    buffers = [buffer for layer in one.stage.layers for buffer in layer.module.buffers()]
    resident = [*one.optimizer.resident_tensors, *buffers, *batch.tensors]
    peak = measure_peak_bytes(lambda: one.run_iteration(batch), resident, CPU)
    assert predicted(model, described_profiles(model), schedule=schedule) == pytest.approx(peak, rel=0.03)
    kinds = tuple(replace(kind, half_saved_bytes_per_row=0.0) for kind in model.family.kinds)
    halved = Model.of(replace(model.family, kinds=kinds), Dtype.BFLOAT16)
    assert predicted(halved, described_profiles(halved), schedule=schedule) < 0.94 * peak


def test_layers_whose_values_all_have_the_format_of_the_plan_are_described_without_a_word() -> None:
    kinds = describe("buffered_models:plain", check_seconds=0).kinds
    assert [kind.half_saved_bytes_per_row for kind in kinds] == [0.0] * len(kinds)


def test_multi_head_attention_is_described_as_fused_kernels_compute_it() -> None:
    """Scores in float32 would take a quarter more than all that is kept."""
    kinds = {kind.name: kind for kind in describe("own_models:convolution_attention_scan", check_seconds=0).kinds}
    tokens, width = 8, 16
    assert kinds["TransformerEncoderLayer"].saved_bytes_per_row == 0.0
    assert kinds["TransformerEncoderLayer"].saved_elements_per_row < 20 * tokens * width


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_weights_are_predicted_without_gradients_and_state(
    make, executor, dtype: Dtype, recompute: bool
) -> None:
    model = Model.of(describe("frozen_models:wide", check_seconds=0), dtype)
    one = executor(model, recompute=recompute)
    one.run_iteration(one.make_batch(0))
    batch = one.make_batch(1)
    resident = [*one.optimizer.resident_tensors, *one.stage.frozen_tensors, *batch.tensors]
    peak = measure_peak_bytes(lambda: one.run_iteration(batch), resident, CPU)
    measured = profiles(make, model)
    assert predicted(model, measured, recompute=recompute) == pytest.approx(peak, rel=0.02)
    trained = replace(model.family, kinds=tuple(replace(kind, frozen_parameters=0) for kind in model.family.kinds))
    assert predicted(Model.of(trained, dtype), measured, recompute=recompute) > 1.9 * peak


@pytest.mark.parametrize("recompute", [False, True])
def test_skips_that_layers_hand_on_are_counted_once(make, executor, recompute: bool) -> None:
    model = Model.of(describe("own_models:unet", check_seconds=0))
    one = executor(model, recompute=recompute)
    one.run_iteration(one.make_batch(0))
    batch = one.make_batch(1)
    peak = measure_peak_bytes(lambda: one.run_iteration(batch), [*one.optimizer.resident_tensors, *batch.tensors], CPU)
    waiting = sum(tensor.nbytes for tensor in batch.tensors) / 2  # rows of the micro-batch that is not computed
    measured = profiles(make, model)
    assert predicted(model, measured, recompute=recompute) + waiting == pytest.approx(peak, rel=0.02)
    unmeasured = Profiles(tuple(replace(layer, peak_bytes=None) for layer in measured.layers))
    assert predicted(model, unmeasured, recompute=recompute) + waiting == pytest.approx(peak, rel=0.02)
