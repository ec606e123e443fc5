"""Equivalence of every kind of plan with one process on the whole batch, for every family."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from gang_answers import answers_of
from nightly import covering, quick_first
from plan_cases import GPT, OTHERS, case, combinations_of, model_of, plan_of, runs_of
from random_plans import in_sequence_parallel

from trainwright import documents
from trainwright.cluster import Device
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.rank_layout import divides_boundary
from trainwright.strategy import Sharding, Strategy

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(600)]

GANG = Path(__file__).with_name("equivalence_gang.py")
GPT_PLANS = 120
PLANS_OF_EACH = 11
STEPS = 20


GRADIENTS = [
    *(case(f"gpt-{seed}", GPT, seed) for seed in range(GPT_PLANS)),
    *(
        case(f"{family}-{seed}", model, 1000 + 100 * number + seed, by_piece=family == "wide_resnet")
        for number, (family, model) in enumerate(OTHERS.items())
        for seed in range(PLANS_OF_EACH)
    ),
]
# T5 trains under one plan in which no ReLU input is within rounding of 0: where one's sign differs, Adam's states differ by
# 1e-4 to 1e-2 from that step on, as they do in one process when one weight is changed by 1e-7 (with GELU: by 1e-5 at most).
TRAININGS = [
    case(f"{optimizer}-{family}-{seed}", model, 2000 + seed, steps=STEPS, optimizer=optimizer, learning_rate=rate)
    for optimizer, rate in (("sgd", 0.02), ("adam", 1e-3))
    for family, model, seeds in (("gpt", GPT, range(4)), ("moe", OTHERS["moe"], (1,)), ("t5", OTHERS["t5"], (10,)))
    for seed in seeds
]


def sharing_out(shardings: tuple[Sharding, ...], tensor: int) -> dict:
    """Return pipelines of one stage whose two replicas shard all weights, the tied one included."""
    layers, size = GPT["gpt"]["layers"] + 2, 2 * tensor
    pipelines = tuple(
        Pipeline(1, 3, (Stage(devices, (LayerRun(0, layers, Strategy(tensor, 2, sharding=sharding), (2, 1)),)),))
        for number, sharding in enumerate(shardings)
        for devices in [tuple(Device("node", size * number + slot) for slot in range(size))]
    )
    plan = json.loads(documents.dumps(Plan(layers, 3 * len(pipelines), pipelines)))
    return {"name": f"tied-{'-'.join(shardings)}-tp{tensor}", "plan": plan, "model": GPT, "steps": 3, "clip_norm": 0.05}


CLIPPED = [
    *(
        case(f"clipped-{family}-{seed}", model, 3000 + seed, steps=3, clip_norm=0.05)
        for family, model in (("gpt", GPT), ("t5", OTHERS["t5"]))
        for seed in range(5)
    ),
    *(
        sharing_out(shardings, tensor)
        for shardings in (
            (Sharding.ZERO1,),
            (Sharding.ZERO2,),
            (Sharding.ZERO3,),
            (Sharding.ZERO1, Sharding.ZERO3),
            (Sharding.ZERO2, Sharding.NONE),
        )
        for tensor in (1, 2)
    ),
]
HALF = [
    case(f"{dtype}-{seed}", {**GPT, "dtype": dtype}, 4000 + seed, steps=3)
    for dtype in ("bfloat16", "float16")
    for seed in range(4)
]
VIT = {"vit": {"layers": 3, "hidden_size": 32, "heads": 4, "image_size": 12, "patch_size": 4, "classes": 8}}
"""ViT whose sequence length, a token and nine patches, is even; the other one's, a token and sixteen, is odd."""


NEOX = {
    "gpt": {
        "layers": 3, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 37, "rotary_size": 4,
        "parallel_residual": True, "key_value_heads": 2, "tied_embeddings": False,
    }
}  # fmt: skip
"""GPT whose branches are parallel: one all-reduce sums both, and a backward's reduces two gradients at once."""


OLMO = {
    "llama": {
        "layers": 3, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 37, "intermediate_size": 24,
        "key_value_heads": 2, "tied_embeddings": True, "query_key_norm": True, "query_key_norm_over": "width",
        "block_norms": "after", "attention_window": 3, "full_attention_every": 2, "activation": "gelu",
        "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_multiplier": 0.5, "logits_soft_cap": 3.0,
    }
}  # fmt: skip
"""Llama whose tensor groups exchange statistics within a segment, too, of the fields that OLMo, Gemma and Granite have."""


def parted_layers(model: Model, plan: Plan) -> int:
    """Return the number of layers that the plan runs sequence parallel, over all ranks."""
    return sum(
        run.strategy.tensor * run.strategy.data
        for stage in plan.stages
        for run in stage.layers
        for layer in range(run.first, run.first + run.count)
        if model.allows_sequence_parallel(model.kind_of(layer), run.strategy.tensor)
    )


def has_divided_boundary(model: Model, plan: Plan) -> bool:
    """Return whether stages of unequal rows exchange slices of the sequence."""
    return any(
        divides_boundary(model, above.layers[-1], below.layers[0]) and above.layers[-1].rows != below.layers[0].rows
        for pipeline in plan.pipelines
        for above, below in itertools.pairwise(pipeline.stages)
    )


def parted(name: str, given: dict, seed: int, count: int, *, has=parted_layers, **fields) -> list[dict]:
    """Return the first cases from that seed on in which a layer is sequence parallel."""
    model = model_of(given)
    seeds = (one for one in itertools.count(seed) if has(model, in_sequence_parallel(plan_of(model, one))))
    return [
        case(f"{name}-{one}", given, one, sequence_parallel=True, **fields) for one in itertools.islice(seeds, count)
    ]


DIVIDED = [
    *parted("divided-gpt", GPT, 9400, 3, has=has_divided_boundary),
    *parted("divided-t5", OTHERS["t5"], 9400, 1, has=has_divided_boundary),
    *parted("divided-llama", OTHERS["llama"], 9400, 1, has=has_divided_boundary),
]
NEOX_PARTED = parted("parted-neox", NEOX, 5700, 2)
OLMO_PARTED = parted("parted-olmo", OLMO, 5810, 2)
PARTED = [
    *DIVIDED,
    *NEOX_PARTED,
    *OLMO_PARTED,
    *(
        one
        for family, model, seed, count in (
            ("gpt", GPT, 5000, 12),
            ("llama", OTHERS["llama"], 5100, 8),
            ("bert", OTHERS["bert"], 5200, 8),
            ("vit", VIT, 5300, 8),
            ("t5", OTHERS["t5"], 5400, 6),
            ("moe", OTHERS["moe"], 5500, 4),
            ("trans_gan", OTHERS["trans_gan"], 5600, 4),
        )
        for one in parted(f"parted-{family}", model, seed, count)
    ),
]
INDIVISIBLE = [case(f"indivisible-vit-{seed}", OTHERS["vit"], 5300 + seed, sequence_parallel=True) for seed in (1, 5)]
PARTED_TRAININGS = [
    *parted("parted-sgd", GPT, 6000, 1, steps=STEPS, learning_rate=0.02),
    *parted("parted-clipped", GPT, 6100, 1, steps=3, clip_norm=0.05),
    *parted("parted-bfloat16", {**GPT, "dtype": "bfloat16"}, 6200, 1, steps=3),
]


EVERY_CASE = [*GRADIENTS, *TRAININGS, *CLIPPED, *HALF, *PARTED, *INDIVISIBLE, *PARTED_TRAININGS]


def names(cases: Sequence[dict]) -> list[str]:
    return [one["name"] for one in cases]


QUICK = {
    *names(covering(GRADIENTS, combinations_of)),
    *names(PARTED_TRAININGS),
    *names(INDIVISIBLE),
    *names(DIVIDED[1:4]),
    *names(NEOX_PARTED),
    *names(OLMO_PARTED),
    *("sgd-gpt-0", "sgd-moe-1", "sgd-t5-10", "adam-gpt-1", "adam-moe-1"),
    *("clipped-gpt-0", "clipped-gpt-1", "clipped-t5-0", "clipped-t5-1"),
    *("tied-zero1-tp1", "tied-zero2-tp2", "tied-zero3-tp2", "tied-zero1-zero3-tp1", "tied-zero2-none-tp2"),
    *("bfloat16-0", "bfloat16-1", "float16-0", "float16-1"),
    *(
        name
        for family in ("gpt", *OTHERS)
        for name in names([one for one in PARTED if family in one["model"] and one not in [*DIVIDED, *OLMO_PARTED]])[:2]
    ),
}
"""Cases that run outside the nightly run."""


class Answers:
    """Results of the cases, by name.

    One gang of eight processes runs all quick cases, a second one all others, since starting a gang is expensive. A gang
    starts when its first result is requested.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, dict] = {}

    def __getitem__(self, name: str) -> dict:
        if name not in self.found:
            asked = [one for one in EVERY_CASE if (one["name"] in QUICK) == (name in QUICK)]
            self.found |= answers_of(GANG, self.folder, asked)
        return self.found[name]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(tmp_path_factory.mktemp("equivalence"))


def test_at_least_two_hundred_plans_are_compared() -> None:
    assert len({json.dumps(one["plan"]) for one in GRADIENTS}) >= 200


def test_plans_cover_every_feature() -> None:
    plans = [one["plan"] for one in GRADIENTS if one["name"] in QUICK]
    stages = [stage for plan in plans for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    runs = [run for plan in plans for run in runs_of(plan)]
    assert {plan["schedule"] for plan in plans} == {"1f1b", "gpipe"}
    assert {run["sharding"] for run in runs if run["data"] > 1} == {"none", "zero1", "zero2", "zero3"}
    assert {run["order"] for run in runs if run["data"] > 1 < run["tensor"]} == {"tensor_inner", "data_inner"}
    assert any(len(plan["pipelines"]) > 2 for plan in plans)
    assert any(len({(run["tensor"], run["data"]) for run in stage["layers"]}) > 1 for stage in stages)
    assert any(len(set(run["rows"])) > 1 for run in runs)
    assert {run["recompute"] for run in runs} == {True, False}


def test_quick_plans_cover_every_pair_of_features() -> None:
    quick = [one for one in GRADIENTS if one["name"] in QUICK]
    assert set().union(*map(combinations_of, quick)) == set().union(*map(combinations_of, GRADIENTS))
    assert len(quick) <= 45


@pytest.mark.parametrize("name", quick_first(names(GRADIENTS), QUICK))
def test_loss_and_every_gradient_equal_those_of_one_process(answers: Answers, name: str) -> None:
    answer = answers[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    assert answer["parted"] == 0


@pytest.mark.parametrize("name", quick_first(names(TRAININGS), QUICK))
def test_after_twenty_steps_weights_and_optimizer_agree_with_torchs_optimizer(answers: Answers, name: str) -> None:
    """Adam's weights are not compared: where gradients are almost zero, its first steps follow the sign of rounding."""
    answer = answers[name]
    if name.startswith("sgd"):
        assert answer["weight_error"] < 1e-4
    assert answer["state_error"] < 1e-4
    assert answer["loss_error"] < 1e-4


@pytest.mark.parametrize("name", quick_first([name for name in names(TRAININGS) if "gpt" in name], QUICK))
def test_the_loss_goes_down(answers: Answers, name: str) -> None:
    losses = answers[name]["losses"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", quick_first(names(CLIPPED), QUICK))
def test_gradients_are_clipped_by_their_norm_over_all_devices(answers: Answers, name: str) -> None:
    assert answers[name]["weight_error"] < 1e-5


@pytest.mark.parametrize("name", quick_first(names(HALF), QUICK))
def test_half_precision_stays_near_float32(answers: Answers, name: str) -> None:
    """Compare with float32 in one process: the loss within 1 %, each gradient within 5 % of its weight's largest.

    bfloat16 has 8 bits, and errors of its products add up over the layers.
    """
    answer = answers[name]
    assert answer["loss_error"] < 0.01
    assert answer["gradient_error"] < 0.05


@pytest.mark.parametrize("name", quick_first(names(PARTED), QUICK))
def test_with_sequence_parallelism_loss_and_gradients_are_the_same(answers: Answers, name: str) -> None:
    """The sequence is split wherever the tensor degree divides it."""
    answer = answers[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    (case,) = (one for one in PARTED if one["name"] == name)
    assert answer["parted"] == parted_layers(model_of(case["model"]), documents.parse(case["plan"], Plan))


@pytest.mark.parametrize("name", names(INDIVISIBLE))
def test_sequence_stays_whole_when_indivisible(answers: Answers, name: str) -> None:
    answer = answers[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    assert answer["parted"] == 0


def test_the_indivisible_cases_are_tensor_parallel() -> None:
    assert any(run["tensor"] > 1 for one in INDIVISIBLE for run in runs_of(one["plan"]))


def test_sequence_parallel_training_equals_training_in_one_process(answers: Answers) -> None:
    sgd, clipped, half = (answers[name] for name in names(PARTED_TRAININGS))
    assert sgd["weight_error"] < 1e-4
    assert clipped["weight_error"] < 1e-5
    assert half["loss_error"] < 0.01
    assert half["gradient_error"] < 0.05
