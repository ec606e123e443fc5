"""Equivalence of plans with shardings of operators with one process on the whole batch, and their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from gang_answers import answers_of
from operator_layers import random_specs
from operator_plans import (
    BATCH,
    EXPERTS,
    FAST,
    FILTERS,
    MEGATRON,
    MIXED,
    QUERIES,
    SLOW,
    T5_MIXED,
    TRANSPOSED,
    chosen,
    devices,
    given,
    plan_of,
    plan_of_pipelines,
)
from plan_cases import model_of

from trainwright import documents
from trainwright.operator_shardings import SpanSpecs, WeightHeld
from trainwright.plan import LayerRun, Plan, Stage
from trainwright.strategy import Sharding, Strategy

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(600)]

EQUIVALENCE = Path(__file__).with_name("equivalence_gang.py")
CHECKPOINT = Path(__file__).with_name("checkpoint_gang.py")
GPT = {"gpt": {"layers": 2, "hidden_size": 32, "heads": 8, "sequence_length": 8, "vocabulary_size": 40}}
LLAMA = {
    "llama": {
        "layers": 2, "hidden_size": 32, "heads": 8, "key_value_heads": 4, "sequence_length": 8, "vocabulary_size": 40,
        "intermediate_size": 64,
    }
}  # fmt: skip
TIED_LLAMA = {"llama": {**LLAMA["llama"], "tied_embeddings": True}}
MOE = {
    "moe": {
        "layers": 2, "hidden_size": 32, "heads": 8, "key_value_heads": 4, "sequence_length": 8, "vocabulary_size": 40,
        "intermediate_size": 32, "experts": 4,
    }
}  # fmt: skip
SWITCH = {
    "moe": {
        "layers": 2, "hidden_size": 32, "heads": 8, "sequence_length": 8, "vocabulary_size": 40, "intermediate_size": 64,
        "experts": 8, "experts_per_token": 1, "expert_every": 2, "gated": False, "balance_loss_weight": 0.1,
    }
}  # fmt: skip
OPT = {"gpt": {**GPT["gpt"], "activation": "relu", "tied_embeddings": False}}
FALCON = {
    "gpt": {
        **GPT["gpt"], "rotary_size": 4, "parallel_residual": True, "shared_norm": True, "key_value_heads": 4, "biases": False,
    }
}  # fmt: skip
GEMMA = {
    "llama": {
        **TIED_LLAMA["llama"], "activation": "gelu", "attention_window": 3, "full_attention_every": 2, "block_norms": "both",
        "query_key_norm": True, "query_key_norm_over": "width", "embedding_multiplier": 2.0, "logits_soft_cap": 3.0,
    }
}  # fmt: skip
BERT = {"bert": GPT["gpt"]}
VIT = {"vit": {"layers": 2, "hidden_size": 32, "heads": 8, "image_size": 16, "patch_size": 4, "classes": 20}}
T5 = {
    "t5": {
        "layers": 1, "decoder_layers": 2, "hidden_size": 32, "heads": 8, "sequence_length": 8, "vocabulary_size": 40,
        "decoder_sequence_length": 4,
    }
}  # fmt: skip
T5_GATED = {"t5": {**T5["t5"], "gated": True, "tied_embeddings": False, "head_size": 8, "decoder_sequence_length": 12}}
SWIN = {
    "swin": {
        "layers": [2, 1], "hidden_size": 16, "heads": [4, 8], "image_size": 32, "window_size": 4, "classes": 8,
    }
}  # fmt: skip
TRANS_GAN = {
    "trans_gan": {
        "layers": [1, 0, 1, 0], "hidden_size": 32, "heads": 8, "bottom_width": 2, "latent_size": 8, "window_size": 4,
    }
}  # fmt: skip
RESNET = {"wide_resnet": {"base_channels": 4, "image_size": 64, "classes": 8}}
PIECES = {"by_piece": True, "steps": 2, "learning_rate": 1e-3}
ROWS = 4
GATHERED = {"weight_held": WeightHeld.GATHERED, "update_sharded": True}
WITH_DEGREES = Stage(devices(4), (LayerRun(0, 4, Strategy(2, 2, sharding=Sharding.ZERO2), (2, 2)),))


def document(plan: Plan) -> dict:
    return json.loads(documents.dumps(plan))


def case(stages: list[Stage] | Plan, model: dict, **fields) -> dict:
    plan = stages if isinstance(stages, Plan) else plan_of(stages, ROWS)
    return {"plan": document(plan), "model": model, "steps": 3, **fields}


def choice(model: dict, shape: tuple[int, int], links, price: int, *, sequences: bool, **fields) -> dict:
    """Return the case of what the integer program chooses at the lowest memory price (0) or the highest (-1)."""
    stages = chosen(model_of(model), shape, ROWS, links, divides_sequences=sequences)
    return case([stages[price]], model, **fields)


def mesh_of(model: dict, loops: dict[str, str], *, recompute: bool = False, **fields) -> Stage:
    stage = given(model_of(model), (2, 2), ROWS, loops, (0, 4), **fields)
    return replace(stage, layers=tuple(run.with_strategy(recompute=recompute) for run in stage.layers))


def random_mesh(model: dict, shape: tuple[int, int], **fields) -> Stage:
    """Return a stage of all layers whose operators shard random loops."""
    parsed = model_of(model)
    layers = [random_specs(parsed, layer, shape, layer) for layer in range(len(parsed.layers))]
    operators = [tuple(replace(one, **(fields if one.weight else {})) for one in layer.operators) for layer in layers]
    specs = tuple(replace(layer, operators=own) for layer, own in zip(layers, operators, strict=True))
    run = LayerRun(0, len(layers), Strategy(1, 4), (ROWS // 4,) * 4)
    return Stage(devices(4), (run,), SpanSpecs(shape, specs))


def in_reverse(stage: Stage) -> Stage:
    """Return the stage on the same devices in descending order."""
    return replace(stage, devices=stage.devices[::-1])


def mesh_before_degrees() -> dict:
    mesh = given(model_of(GPT), (1, 2), ROWS, MIXED, (0, 2))
    degrees = Stage(devices(2, 2), (LayerRun(2, 2, Strategy(2, 1), (ROWS,)),))
    return case([mesh, degrees], GPT, clip_norm=0.05)


def degrees_before_mesh() -> dict:
    degrees = Stage(devices(2), (LayerRun(0, 2, Strategy(1, 2, sharding=Sharding.ZERO3), (3, 1)),))
    mesh = replace(given(model_of(GPT), (1, 2), ROWS, TRANSPOSED, (2, 4)), devices=devices(2, 2))
    return case([degrees, mesh], GPT)


def pipelines_of(model: dict, loops: dict[str, str], **fields) -> Plan:
    """Return the plan of two pipelines with equal meshes, whose micro-batches have different rows."""
    end = len(model_of(model).layers)
    return plan_of_pipelines(*([given(model_of(model), (1, 2), rows, loops, (0, end), **fields)] for rows in (4, 2)))


def pipelines_with_degrees() -> Plan:
    """Return the plan of two pipelines, each a mesh of one device and a stage by degrees."""
    mesh = given(model_of(GPT), (1, 1), ROWS, MIXED, (0, 2))
    return plan_of_pipelines(*[[mesh, Stage(devices(1), (LayerRun(2, 2, Strategy(1, 1), (ROWS,)),))]] * 2)


def meshes_of_t5() -> dict:
    """Return the case of two meshes whose stages share the decoder's biases and the embedding."""
    first, second = (given(model_of(T5), (1, 2), ROWS, T5_MIXED, span) for span in ((0, 4), (4, 6)))
    return case([first, replace(second, devices=devices(2, 2))], T5)


CASES: dict[str, Callable[[], dict]] = {
    **{
        f"{name} {place}": partial(choice, model, shape, links, price, sequences=sequences, **fields)
        for name, model, shape, links, sequences, fields in (
            ("gpt 2×2", GPT, (2, 2), (SLOW, FAST), False, {}),
            ("gpt 1×4", GPT, (1, 4), (FAST, FAST), True, {"clip_norm": 0.05}),
            ("llama 2×2", LLAMA, (2, 2), (FAST, FAST), True, {}),
            ("llama 1×4", TIED_LLAMA, (1, 4), (FAST, FAST), False, {}),
            ("falcon 2×2", FALCON, (2, 2), (FAST, FAST), True, {}),
            ("gemma 1×4", GEMMA, (1, 4), (SLOW, FAST), False, {"clip_norm": 0.05}),
            ("bert 2×2", BERT, (2, 2), (SLOW, FAST), False, {"clip_norm": 0.05}),
            ("bert 1×4", BERT, (1, 4), (FAST, FAST), True, {}),
            ("vit 2×2", VIT, (2, 2), (FAST, FAST), False, {}),
            ("vit 1×4", VIT, (1, 4), (SLOW, FAST), False, {"clip_norm": 0.05}),
            ("t5 2×2", T5, (2, 2), (SLOW, FAST), True, {"clip_norm": 0.05}),
            ("t5 1×4", T5_GATED, (1, 4), (FAST, FAST), False, {}),
            ("swin 2×2", SWIN, (2, 2), (SLOW, FAST), True, {"clip_norm": 0.05}),
            ("swin 1×4", SWIN, (1, 4), (FAST, FAST), False, {}),
            ("trans_gan 2×2", TRANS_GAN, (2, 2), (SLOW, FAST), False, {"clip_norm": 0.05}),
            ("trans_gan 1×4", TRANS_GAN, (1, 4), (FAST, FAST), True, {}),
            ("moe 2×2", MOE, (2, 2), (FAST, FAST), True, {"clip_norm": 0.05}),
            ("moe 1×4", MOE, (1, 4), (FAST, FAST), False, {}),
            ("switch 2×2", SWITCH, (2, 2), (FAST, FAST), False, {}),
            ("switch 1×4", SWITCH, (1, 4), (FAST, FAST), True, {}),
        )
        for place, price in (("fastest", 0), ("smallest", -1))
    },
    "wide_resnet 2×2": lambda: choice(RESNET, (2, 2), (SLOW, SLOW), 0, sequences=False, **PIECES),
    "wide_resnet 1×4": lambda: choice(RESNET, (1, 4), (SLOW, SLOW), 0, sequences=False, **PIECES),
    "wide_resnet random": lambda: case([random_mesh(RESNET, (2, 2), **GATHERED)], RESNET, **PIECES),
    "megatron": lambda: case([mesh_of(GPT, MEGATRON)], GPT),
    "batch": lambda: case([mesh_of(GPT, BATCH, **GATHERED)], GPT, clip_norm=0.05),
    "mixed": lambda: case([mesh_of(OPT, MIXED, update_sharded=True)], OPT),
    "transposed": lambda: case([mesh_of(GPT, TRANSPOSED, recompute=True)], GPT),
    "queries": lambda: case([mesh_of(GPT, QUERIES, **GATHERED)], GPT, optimizer="adam", learning_rate=1e-3),
    "filters": lambda: case([mesh_of(VIT, FILTERS, update_sharded=True)], VIT),
    "t5": lambda: case([given(model_of(T5), (2, 2), ROWS, T5_MIXED, (0, 6), **GATHERED)], T5, clip_norm=0.05),
    "t5 meshes": meshes_of_t5,
    "experts": lambda: case([in_reverse(mesh_of(MOE, EXPERTS, recompute=True, update_sharded=True))], MOE),
    "pipelines": lambda: case(pipelines_of(GPT, MIXED, **GATHERED), GPT, clip_norm=0.05),
    "pipelines, all-reduced": lambda: case(pipelines_of(GPT, TRANSPOSED), GPT, clip_norm=0.05),
    "pipelines of t5": lambda: case(pipelines_of(T5, T5_MIXED, update_sharded=True), T5),
    "pipelines, degrees": lambda: case(pipelines_with_degrees(), GPT),
    "mesh, degrees": mesh_before_degrees,
    "degrees, mesh": degrees_before_mesh,
}
HALF: dict[str, Callable[[], dict]] = {
    "bfloat16": lambda: case([mesh_of(GPT, MIXED)], {**GPT, "dtype": "bfloat16"}),
    "float16": lambda: case([mesh_of(GPT, TRANSPOSED)], {**GPT, "dtype": "float16"}),
    "bfloat16 experts": lambda: case([mesh_of(MOE, EXPERTS)], {**MOE, "dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    asked = [{"name": name, **make()} for name, make in (CASES | HALF).items()]
    return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("plans"), asked, processes=4)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_equal_those_of_one_process(answers: dict[str, dict], name: str) -> None:
    answer = answers[name]
    assert answer["missing"] == []
    bounds = {"loss_error": 1e-5, "gradient_error": 1e-5, "weight_error": 1e-5, "state_error": 1e-5}
    if name == "queries":  # Adam's steps follow the sign of rounding where gradients are almost zero
        bounds |= {"weight_error": 1e-3, "state_error": 1e-4}
    elif "resnet" in name:  # batch normalisation amplifies rounding from layer to layer
        bounds = {**dict.fromkeys(bounds, 1e-4), "loss_error": 1e-5}
    assert {key: answer[key] for key, bound in bounds.items() if answer[key] > bound} == {}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_stays_close_to_one_process(answers: dict[str, dict], name: str) -> None:
    answer = answers[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 0.01
    assert answer["weight_error"] < 0.1


CHANGES: dict[str, Callable[[], tuple[Stage | Plan, Stage, dict]]] = {
    "mesh to degrees": lambda: (mesh_of(GPT, MIXED, update_sharded=True), WITH_DEGREES, GPT),
    "degrees to mesh": lambda: (WITH_DEGREES, mesh_of(GPT, QUERIES, **GATHERED), GPT),
    "pipelines to mesh": lambda: (
        pipelines_of(GPT, MIXED, update_sharded=True),
        mesh_of(GPT, QUERIES, **GATHERED),
        GPT,
    ),
    "experts to degrees": lambda: (mesh_of(MOE, EXPERTS, **GATHERED), WITH_DEGREES, MOE),
    "degrees to experts": lambda: (WITH_DEGREES, mesh_of(MOE, EXPERTS), MOE),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder, asked = tmp_path_factory.mktemp("checkpoints"), []
    for name, make in CHANGES.items():
        *plans, model = make()
        first, second = (case(of if isinstance(of, Plan) else [of], model)["plan"] for of in plans)
        asked.append({"name": name, "model": model, "first": first, "second": second, "folder": str(folder / name)})
    return answers_of(CHECKPOINT, folder, asked, processes=4)


@pytest.mark.parametrize("name", CHANGES)
def test_checkpoint_resumes_under_another_plan(resumed: dict[str, dict], name: str) -> None:
    answer = resumed[name]
    assert answer["missing"] == []
    assert answer["difference"] == 0.0
    assert answer["loss_error"] < 1e-5
    assert max(answer["errors"].values()) < 1e-5
