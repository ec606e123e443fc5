"""Training by the public surface: equal to a plain loop of torch under every plan, resumed under another, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from gang_answers import answers_of
from one_process import OneProcess
from own_training import CLIP_NORM, ITERATIONS, OPTIMIZERS, SEED, held_out_tokens, options, schedule
from source_files import ROOT
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from two_device_plans import DEVICES, replicas, stages

from trainwright import documents
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright.training import RequestedDtype, Training
from trainwright_worker import training
from trainwright_worker.checkpoint_conversion import to_torch
from trainwright_worker.executor.optimizer import LossScale
from trainwright_worker.executor.torch_optimizer import OptimizerChoice, TorchOptimizer
from trainwright_worker.model_description.description import describe
from trainwright_worker.training import Trainer
from trainwright_worker.validation import plan_problems

pytestmark = [
    pytest.mark.torch_processes,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

GANG = Path(__file__).with_name("training_gang.py")
ROWS, MICRO_BATCHES = 4, 2


def tensor_group(layers: int) -> Plan:
    run = LayerRun(0, layers, Strategy(2, 1), (ROWS,))
    return Plan(layers, MICRO_BATCHES * ROWS, (Pipeline(MICRO_BATCHES, ROWS, (Stage(DEVICES, (run,)),)),))


def plans(layers: int) -> dict[str, Plan]:
    return {
        "uneven": replicas(layers, (1, 3), MICRO_BATCHES),
        "zero1": replicas(layers, (3, 1), MICRO_BATCHES, sharding=Sharding.ZERO1),
        "zero3": replicas(layers, (1, 3), MICRO_BATCHES, sharding=Sharding.ZERO3, recompute=True),
        "stages": stages(layers, 2, ROWS, MICRO_BATCHES, recompute=True),
        "tensor": tensor_group(layers),
    }


FAMILIES = {
    "own": lambda: {"custom": describe("buffered_models:plain", check_seconds=0, dtypes=[torch.float32])},
    "gpt": lambda: {"gpt": Gpt(layers=2, hidden_size=16, heads=2, sequence_length=8, vocabulary_size=32)},
}
TRAINED = [
    ("own", "uneven", "stages", "AdamW"),
    ("own", "stages", "zero3", "AdamW"),
    ("own", "zero3", "uneven", "AdamW"),
    ("own", "zero1", "stages", "SGD"),
    ("own", "stages", "zero3", "Lion"),
    ("own", "zero3", "uneven", "Averaged"),
    ("own", "zero3", "stages", "NAdam"),
    ("own", "uneven", "stages", "Adafactor"),
    ("own", "stages", "uneven", "LayerScaled"),
    ("gpt", "zero3", "stages", "fused AdamW"),
    ("gpt", "tensor", "zero1", "NAdam"),
]
REFUSED = [
    ("own", "zero3", "stages", "Adafactor"),
    ("own", "zero1", "stages", "LayerScaled"),
    ("own", "zero3", "stages", "Muon"),
    ("own", "stages", "uneven", "AllScaled"),
]


@dataclass(frozen=True)
class Run:
    """Answer of a case, and the trained state by kind and name."""

    losses: list[float]
    evaluated: list[float | None]
    state: dict[str, Tensor]
    refused: str
    checkpoint: Path


def case_name(model: str, first: str, second: str, optimizer: str) -> str:
    return f"{model}, {first}, then {second}, {optimizer}"


@pytest.fixture(scope="module")
def trainings() -> dict[str, Training]:
    return {name: Training(1, dtype=RequestedDtype.FLOAT32, **family()) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, trainings: dict[str, Training]) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("training")
    cases = []
    for number, (model, *names, optimizer) in enumerate([*TRAINED, *REFUSED]):
        (folder / f"{model}.json").write_text(documents.dumps(trainings[model]), encoding="utf-8")
        made = plans(len(trainings[model].model.layers))
        for name in names:
            (folder / f"{model}-{name}.json").write_text(documents.dumps(made[name]), encoding="utf-8")
        cases.append(
            {
                "name": case_name(model, *names, optimizer),
                "model": str(folder / f"{model}.json"),
                "plans": [str(folder / f"{model}-{name}.json") for name in names],
                "optimizer": optimizer,
                "folder": str(folder / f"checkpoints-{number}"),
            }
        )
    answers = answers_of(GANG, folder, cases, processes=2)
    return {case["name"]: run_of(answers[case["name"]], Path(case["folder"])) for case in cases}


def run_of(answer: dict, folder: Path) -> Run:
    state, checkpoint = {}, folder / f"iteration-{ITERATIONS:08}"
    if "refused" not in answer:
        dcp_to_torch_save(checkpoint, folder / "state.pt")
        state = torch.load(folder / "state.pt")
    return Run(answer.get("losses", []), answer.get("evaluated", []), state, answer.get("refused", ""), checkpoint)


@dataclass(frozen=True)
class Plain:
    """Training of a plain loop of torch, with the losses of other rows by the number of iterations."""

    one: OneProcess
    optimizer: torch.optim.Optimizer
    losses: list[float]
    evaluated: dict[int, float]


def plain_loop(training: Training, optimizer: str) -> Plain:
    """Train as users of torch do."""
    one = OneProcess(training.model, SEED)
    groups: dict[float, list] = {}
    for name, parameter in one.named().items():
        groups.setdefault(options(name, tuple(parameter.shape))["weight_decay"], []).append(parameter)
    trained = OPTIMIZERS[optimizer]([{"params": own, "weight_decay": decay} for decay, own in groups.items()])
    rates = torch.optim.lr_scheduler.LambdaLR(trained, schedule)
    losses, evaluated = [], {}
    for iteration in range(ITERATIONS):
        loss = one.loss(iteration, MICRO_BATCHES * ROWS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(one.named().values(), CLIP_NORM)
        with torch.no_grad():
            trained.step()
        rates.step()
        trained.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            evaluated[iteration + 1] = one.loss(1, MICRO_BATCHES * ROWS, seed=SEED + 1).item()
    return Plain(one, trained, losses, evaluated)


def test_the_surface_is_what_the_page_lists() -> None:
    members = {name for name in vars(Trainer) if not name.startswith("_")}
    assert training.__all__ == ["CheckpointError", "Rows", "Trainer"]
    assert members == {
        *("close", "empty_batches", "evaluate", "is_first_rank", "load", "resume", "save", "skipped_updates", "step")
    }
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    arguments = list(inspect.signature(Trainer).parameters)
    assert arguments[:2] == ["plan", "model"]
    for name in (*members, *training.__all__, "rank", "device", *(f"{name}=" for name in arguments[2:])):
        assert f"`{name}" in page


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case_name(*case))
def test_a_training_that_changes_its_plan_equals_a_plain_loop(
    case: tuple[str, str, str, str], runs: dict[str, Run], trainings: dict[str, Training]
) -> None:
    model, *_, optimizer = case
    run = runs[case_name(*case)]
    assert not run.refused
    plain = plain_loop(trainings[model], optimizer)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    half = ITERATIONS // 2
    assert run.evaluated == [None, *(pytest.approx(plain.evaluated[n], rel=1e-5) for n in (half, half, ITERATIONS))]
    # Gradients of the keys' biases of attention are rounding errors, which Adam follows.
    weights = {name: parameter.detach() for name, parameter in plain.one.named().items() if "qkv_bias" not in name}
    for name, weight in weights.items():
        assert (run.state[f"weights/{name}"] - weight).norm() < 1e-5 * weight.norm(), name


@pytest.mark.parametrize("case", TRAINED[1:8], ids=lambda case: case_name(*case))
def test_a_checkpoint_becomes_the_state_of_torchs_own_optimizer(
    case: tuple[str, str, str, str], runs: dict[str, Run], trainings: dict[str, Training], tmp_path: Path
) -> None:
    model, *_, optimizer = case
    to_torch(runs[case_name(*case)].checkpoint, tmp_path / "torch")
    dcp_to_torch_save(tmp_path / "torch", tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt")["optim"]["state"]
    plain = plain_loop(trainings[model], optimizer)
    for name, parameter in plain.one.named().items():
        expected = plain.optimizer.state[parameter]
        assert states[f"layers.{name}"].keys() - {"step"} == expected.keys() - {"step"}
        for kind, value in expected.items():
            torch.testing.assert_close(states[f"layers.{name}"][kind], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case_name(*case))
def test_optimizers_that_need_the_values_of_other_ranks_are_refused(case: tuple, runs: dict[str, Run]) -> None:
    run = runs[case_name(*case)]
    assert run.refused.startswith(case[3])
    assert "as each rank does" in run.refused
    assert "AdamW" in run.refused


def test_an_average_of_the_weights_is_a_state_of_the_optimizer(runs: dict[str, Run], trainings: dict) -> None:
    run = runs[case_name("own", "stages", "zero3", "Lion")]
    assert {name.partition("/")[0] for name in run.state} == {"weights", "direction", "average"}


@pytest.fixture
def alone(tmp_path: Path, trainings: dict[str, Training]) -> Callable[..., Trainer]:
    """Return a factory of trainers of a GPT on one device."""
    training = trainings["gpt"]
    layers = len(training.model.layers)
    run = LayerRun(0, layers, Strategy(1, 1), (ROWS,))
    plan = Plan(layers, 2 * ROWS, (Pipeline(2, ROWS, (Stage(DEVICES[:1], (run,)),)),))
    (tmp_path / "plan.json").write_text(documents.dumps(plan), encoding="utf-8")
    (tmp_path / "gpt.json").write_text(documents.dumps(replace(training, dtype=RequestedDtype.AUTO)), encoding="utf-8")

    def make(**fields) -> Trainer:
        chosen = {"optimizer": OPTIMIZERS["AdamW"], "seed": SEED, "dtype": "float32", **fields}
        return Trainer(tmp_path / "plan.json", tmp_path / "gpt.json", **chosen)

    return make


def test_a_family_trains_on_rows_of_ones_own(alone: Callable[..., Trainer]) -> None:
    with alone() as trainer:
        held_out, loss = trainer.evaluate(0, held_out_tokens), trainer.step(0)
    with alone(rows=held_out_tokens) as trainer:
        assert trainer.evaluate() == held_out
        assert trainer.step(0) == pytest.approx(held_out, rel=1e-6) != loss
        with pytest.raises(
            ValueError, match=r"^rows: the model's layers read tokens, but rows\(\) returns words; add it$"
        ):
            trainer.evaluate(rows=lambda *, seed, iteration, first, count: {"words": torch.zeros(count, 8)})


def test_overflows_of_float16_update_nothing(alone: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScale, "INITIAL_FACTOR", 2.0**31)
    with alone(dtype="float16") as trainer:
        optimizer = trainer._optimizer
        losses = []
        while not optimizer.updates:
            losses.append(trainer.step(0))
        assert trainer.skipped_updates == len(losses) - 1 > 0
        assert len(set(losses)) == 1
        assert {float(state["step"]) for state in optimizer._states} == {1.0}
        assert trainer.step(0) < losses[0]


def test_an_average_of_the_weights_can_be_evaluated(alone: Callable[..., Trainer]) -> None:
    with alone(optimizer=OPTIMIZERS["Lion"]) as trainer:
        for iteration in range(3):
            trainer.step(iteration)
        with_weights, with_average = trainer.evaluate(), trainer.evaluate(weights="average")
        assert with_weights != with_average
        assert trainer.evaluate() == with_weights
        with pytest.raises(
            ValueError, match=r"^Lion has no state mean of the shape of the weights; it has direction, average$"
        ):
            trainer.evaluate(weights="mean")


def test_a_training_is_in_the_number_format_that_its_plan_states(alone: Callable[..., Trainer], tmp_path: Path) -> None:
    with alone() as trainer:
        loss = trainer.step(0)
    plan: Plan = documents.loads((tmp_path / "plan.json").read_bytes(), Plan)
    (tmp_path / "plan.json").write_text(documents.dumps(replace(plan, dtype=Dtype.FLOAT32)), encoding="utf-8")
    with alone(dtype=None) as trainer:
        assert trainer.step(0) == loss
    with pytest.raises(ValueError, match="the plan is in float32, but the model is in float16"):
        alone(dtype="float16")


def test_a_training_that_cannot_begin_is_refused_in_a_sentence(alone: Callable[..., Trainer], tmp_path: Path) -> None:
    made = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(TypeError, match=r"such as partial\(SGD, lr=…\), got a SGD$"):
        alone(optimizer=made)
    with pytest.raises(ValueError, match="dtype is auto; state that of the plan there or as dtype: float32"):
        alone(dtype=None)
    plan = documents.loads((tmp_path / "plan.json").read_text(encoding="utf-8"), Plan)
    two = plans(plan.model_layers)["uneven"]
    (tmp_path / "plan.json").write_text(documents.dumps(two), encoding="utf-8")
    with pytest.raises(ValueError, match="the plan has 2 devices, but 1 processes were started; start them with"):
        alone()
    (tmp_path / "plan.json").write_text(documents.dumps(plans(plan.model_layers + 1)["uneven"]), encoding="utf-8")
    with pytest.raises(ValueError, match="the plan is for 5 layers, but the model has 4"):
        alone()


def test_a_plan_of_fewer_rows_than_the_model_needs_at_once_is_refused(trainings: dict[str, Training]) -> None:
    family = replace(trainings["own"].custom, min_rows=2)
    plan = plans(len(family.layers))["uneven"]
    (problem,) = plan_problems(plan, Model.of(family))
    assert problem.endswith(
        "a replica computes 1 at once, but custom.min_rows asks every replica to compute 2 rows or more at once"
    )


def test_a_rank_without_weights_has_an_optimizer_that_does_nothing(trainings: dict[str, Training]) -> None:
    plan = plans(len(trainings["own"].model.layers))["stages"]
    optimizer = TorchOptimizer([], OptimizerChoice(OPTIMIZERS["AdamW"], options), plan, torch.device("cpu"))
    assert optimizer.name == "adam"
    optimizer.scale_rates(0.5)
    optimizer.step(None)
    optimizer.begin_resuming(has_states=True)
    optimizer.resume(3)
    assert (optimizer.updates, optimizer.state_tensors) == (3, [])
