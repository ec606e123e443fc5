"""Optimizer: torch's results, in float32 for half-precision weights, with scaled gradients and skipped updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright_worker.executor.executor import PlanExecutor
from trainwright_worker.executor.flat_parameter import FlatParameter, ShardGroup, Weight, publish_updates
from trainwright_worker.executor.optimizer import Adam, GradientScaling, LossScale, Sgd

EACH = pytest.mark.parametrize(
    ("ours", "theirs", "options"), [(Adam, torch.optim.Adam, {}), (Sgd, torch.optim.SGD, {"momentum": 0.9})]
)


@EACH
def test_optimizers_compute_what_torchs_compute(ours: type, theirs: type, options: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.randn(5, 3, generator=generator)), nn.Parameter(torch.randn(7, generator=generator))]
    their = [nn.Parameter(p.detach().clone()) for p in own]
    weights = [Weight(str(number), parameter) for number, parameter in enumerate(own)]
    unit = FlatParameter(weights, ShardGroup(), dtype=torch.float32, device=torch.device("cpu"))
    optimizer, reference = ours([unit], 0.01), theirs(their, lr=0.01, **options)
    for _ in range(5):
        unit.zero_gradients()
        unit.ensure_gradients()
        for parameter, copy in zip(own, their, strict=True):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad += gradient
            copy.grad = gradient
        unit.keep_gradient_shard()
        optimizer.step(None)
        reference.step()
    for parameter, copy in zip(own, their, strict=True):
        torch.testing.assert_close(parameter, copy)


def test_half_precision_weights_are_updated_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(4))
    unit = FlatParameter([Weight("w", parameter)], ShardGroup(), dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = Sgd([unit], 1e-4)
    for _ in range(10):
        unit.zero_gradients()
        unit.ensure_gradients()
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        unit.accumulate_gradients()
        unit.keep_gradient_shard()
        optimizer.step(None)
        publish_updates([unit])
    assert parameter.dtype is torch.bfloat16
    # Steps of 1e-4 are lost on a bfloat16 number near 1; the master weights keep them.
    assert unit.master_shard[0].item() == pytest.approx(
        1 - sum(1e-4 * sum(0.9**i for i in range(n + 1)) for n in range(10))
    )
    assert torch.equal(parameter, unit.master_shard[:4].bfloat16())


@EACH
@pytest.mark.parametrize("limit", [None, 0.5], ids=["unclipped", "clipped"])
def test_scaled_gradients_update_as_unscaled_ones_and_overflows_update_nothing(
    ours: type, theirs: type, options: dict, limit: float | None
) -> None:
    generator, loss_scale = torch.Generator().manual_seed(0), 2.0**10
    own = nn.Parameter(torch.randn(8, generator=generator))
    their = nn.Parameter(own.detach().clone())
    unit = FlatParameter([Weight("w", own)], ShardGroup(), dtype=torch.float32, device=torch.device("cpu"))
    optimizer, reference = ours([unit], 0.01), theirs([their], lr=0.01, **options)
    for step in range(4):
        gradient = torch.randn(8, generator=generator)
        if step == 1:
            gradient[3] = torch.inf
        unit.zero_gradients()
        unit.ensure_gradients()
        own.grad += gradient * loss_scale
        unit.keep_gradient_shard()
        scaling = GradientScaling.of(unit.gradient_shard.norm(), loss_scale, limit)
        optimizer.step(scaling)
        assert bool(scaling.overflow) is (step == 1)
        if step != 1:
            their.grad = gradient
            if limit is not None:
                torch.nn.utils.clip_grad_norm_([their], limit)
            reference.step()
            torch.testing.assert_close(unit.gradient_shard, their.grad)
        torch.testing.assert_close(own, their)


def test_an_iteration_whose_gradients_overflow_updates_nothing_and_halves_the_loss_scale(
    executor: Callable[..., PlanExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossScale, "INITIAL_FACTOR", 2.0**31)
    made = executor(Model.of(Gpt(1, 16, 2, 4, 8), Dtype.FLOAT16))
    while not made.optimizer.updates:
        weights = torch.cat([one.master_shard for one in made.stage.flat_parameters])
        assert made.loss_scale.factor == 2.0 ** (31 - made.skipped_updates)
        made.run_iteration(made.make_batch(0))
        updated = torch.cat([one.master_shard for one in made.stage.flat_parameters])
        assert torch.equal(weights, updated) is (made.optimizer.updates == 0)
        assert updated.isfinite().all()
    assert made.skipped_updates > 0
