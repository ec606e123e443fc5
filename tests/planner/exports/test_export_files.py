"""Files of every export, run and read as their users would."""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from exported_shapes import LLAMA, SHAPE, plans, shapes, started
from hypothesis import given
from property_tests import examples

from trainwright import documents
from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportRequest, UniformShape, nearest_plan
from trainwright.exports.deepspeed import config
from trainwright.exports.launch import agents
from trainwright.exports.megatron_arguments import layout, parallel_arguments
from trainwright.exports.torchtitan import module_names
from trainwright.families import FAMILIES, T5, Bert, Family, Gpt, Llama, Moe, Swin, Vit, WideResnet
from trainwright.families.fields import RotaryScaling
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.runtime import Runtime
from trainwright.strategy import Sharding

BERT = Model.of(
    Bert(layers=4, hidden_size=64, heads=4, sequence_length=32, intermediate_size=256, next_sentence=False),
    Dtype.FLOAT16,
)
T5_MODEL = Model.of(T5(layers=2, hidden_size=64, heads=4, sequence_length=32), Dtype.BFLOAT16)
MODELS = [
    None,
    LLAMA,
    Model.of(Gpt(layers=4, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=100), Dtype.FLOAT16),
    Model.of(Moe(layers=4, hidden_size=64, heads=4, sequence_length=32, experts=4, expert_every=2)),
]


def written(name: str, plan: Plan, model: Model | None = LLAMA) -> dict[str, str]:
    target = TARGETS[name]
    request = ExportRequest(nearest_plan(plan, target.capabilities), model, remarks=("What it costs.",))
    return {file.name: file.text for file in target.files(request)}


def test_launch_script_starts_every_rank_on_its_device(tmp_path: Path) -> None:
    script = written("megatron", SHAPE.plan())["launch.sh"]
    calls = [call for node in "ab" for call in started(script, node, tmp_path)]
    ranked = sorted(calls, key=lambda call: int(call[call.index("--node-rank") + 1]))
    assert [call[0] for call in ranked] == ["1,0", "0,1,2", "3"]
    assert [call[call.index("--nproc-per-node") + 1] for call in ranked] == ["2", "3", "1"]
    assert all(call[call.index("--nnodes") + 1] == "3" for call in ranked)
    assert all(call[call.index("--master-addr") + 1] == "a" for call in ranked)
    assert all(call[call.index("--micro-batch-size") + 1] == "2" for call in ranked)


@pytest.mark.parametrize(
    ("entries", "dtype", "is_slow"),
    [(50257, Dtype.BFLOAT16, True), (50257, Dtype.FLOAT32, False), (50304, Dtype.FLOAT16, False)],
)
@pytest.mark.parametrize("target", ["torchtitan", "deepspeed", "accelerate", "megatron"])
def test_trainer_that_does_not_pad_vocabularies_is_told_a_fast_one(
    target: str, entries: int, dtype: Dtype, is_slow: bool
) -> None:
    model = Model.of(Llama(4, 64, 4, 32, entries, key_value_heads=2), dtype)
    script = " ".join(written(target, SHAPE.plan(), model)["launch.sh"].replace("\n#", "").split())
    assert ("train with 50,264" in script) == (is_slow and target != "megatron")
    assert ("--make-vocab-size-divisible-by 8" in script) == (target == "megatron")


def test_launch_script_names_the_only_node() -> None:
    alone = replace(SHAPE, devices=tuple(Device("a", slot) for slot in range(6)))
    script = " ".join(written("torchrun", alone.plan())["launch.sh"].replace("\n#", "").split())
    assert "Run `bash launch.sh` on a (torchrun of torch ≥ 2.8); set NODE=a where the host has another name." in script


def test_launch_script_refuses_another_node(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        started(written("torchrun", SHAPE.plan())["launch.sh"], "c", tmp_path)
    assert refusal.value.stderr == "NODE must be one of a, b\n"


@given(plan=plans)
@examples(100)
def test_agents_hold_every_rank_once_and_in_order(plan: Plan) -> None:
    found = agents(plan.devices)
    assert [Device(agent.node, slot) for agent in found for slot in agent.slots] == [*plan.devices]
    assert [agent.number for agent in found] == [*range(len(found))]
    assert all(one.node != other.node for one, other in pairwise(found))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((6,), "Et*4L"), ((1, 5, 6), "E|t*4|L"), ((2, 5, 6), "Et|t*3|L"), ((3, 6), "Et*2|t*2L")],
)
def test_megatron_layout_names_the_layers_of_every_stage(ends: tuple[int, ...], expected: str) -> None:
    assert layout(replace(SHAPE, ends=ends)) == expected


@given(shape=shapes())
@examples(100)
def test_megatron_arguments_say_the_batch(shape: UniformShape) -> None:
    given_arguments = dict(argument.split(maxsplit=1) for argument, _ in parallel_arguments(shape) if " " in argument)
    micro, whole = int(given_arguments["--micro-batch-size"]), int(given_arguments["--global-batch-size"])
    parallel = int(given_arguments["--tensor-model-parallel-size"]) * int(
        given_arguments["--pipeline-model-parallel-size"]
    )
    assert whole == shape.plan().global_batch_size
    assert whole == micro * shape.micro_batches * (len(shape.devices) // parallel)


@pytest.mark.parametrize(
    ("sharding", "recomputed", "arguments"),
    [
        (Sharding.ZERO1, 0, ["--use-distributed-optimizer", "--overlap-grad-reduce"]),
        (Sharding.ZERO3, 0, ["--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"]),
        (Sharding.NONE, 1, ["--recompute-method block", "--recompute-num-layers 1"]),
        (Sharding.NONE, 3, ["--recompute-method uniform", "--recompute-num-layers 1"]),
    ],
)
def test_megatron_arguments_save_memory(sharding: Sharding, recomputed: int, arguments: list[str]) -> None:
    told = [
        argument
        for argument, _ in parallel_arguments(
            replace(SHAPE.with_strategy(sharding=sharding), recomputed_blocks=recomputed)
        )
    ]
    assert set(arguments) <= set(told)


@given(shape=shapes())
@examples(100)
def test_sequence_parallelism_is_told_as_planned(shape: UniformShape) -> None:
    megatron = "--sequence-parallel" in [argument for argument, _ in parallel_arguments(shape)]
    titan = "enable_sequence_parallel=True" in written("torchtitan", shape.plan())["trainwright_recipe.py"]
    assert megatron == titan == shape.strategy.sequence_parallel


@given(shape=shapes())
@examples(100)
def test_torchtitan_modules_are_those_of_the_model_in_order(shape: UniformShape) -> None:
    found = module_names(shape)
    blocks = [f"layers.{number}" for number in range(shape.layers - 2)]
    assert [name for stage in found for name in stage] == ["tok_embeddings", *blocks, "norm", "lm_head"]
    assert len(found) == len(shape.ends)


@given(shape=shapes())
@examples(100)
def test_deepspeed_configuration_states_the_batch(shape: UniformShape) -> None:
    found = config(shape, Dtype.FLOAT16, "adam")
    whole = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * shape.strategy.data
    assert whole == shape.global_batch_size
    assert found.get("train_batch_size", whole) == whole


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "no model" if model is None else model.family.family)
@pytest.mark.parametrize("name", TARGETS)
def test_every_file_is_well_formed_and_says_what_it_costs(name: str, model: Model | None) -> None:
    files = written(name, SHAPE.plan(), model)
    assert "# What it costs." in next(iter(files.values()))
    for file, text in files.items():
        if file.endswith(".py"):
            ast.parse(text)
        elif file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_megatron_is_told_the_sizes_of_the_model(tmp_path: Path) -> None:
    script = written("megatron", SHAPE.plan(), MODELS[3])["launch.sh"]
    (call, *_) = started(script, "b", tmp_path)
    told = dict(pairwise(call))
    assert (told["--num-layers"], told["--num-experts"], told["--moe-layer-freq"]) == ("4", "4", "[0,1,0,1]")


def test_megatron_takes_own_arguments_in_place_of_mock_data_and_as_many_steps_as_a_trial_measures(
    tmp_path: Path,
) -> None:
    script = written("megatron", SHAPE.plan())["launch.sh"]
    alone, *_ = started(script, "b", tmp_path)
    assert alone[-5:] == ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "31999"]
    assert (alone[alone.index("--train-iters") + 1], alone[alone.index("--log-interval") + 1]) == ("100", "1")
    data = ["--data-path", "/data/c4 en", "--lr", "3e-4"]
    trial, *_ = started(script, "b", tmp_path, *data, TRAINWRIGHT_ITERATIONS="13", MEGATRON="/opt/megatron")
    assert trial[-4:] == data
    assert "--vocab-size" not in trial
    assert trial[trial.index("--train-iters") + 1] == "13"
    assert "/opt/megatron/pretrain_gpt.py" in trial


@pytest.mark.parametrize("model", [BERT, T5_MODEL], ids=lambda model: model.family.family)
def test_megatron_takes_own_data_alone_where_it_has_no_mock_data(model: Model, tmp_path: Path) -> None:
    script = written("megatron", SHAPE.plan(), model)["launch.sh"]
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        started(script, "b", tmp_path)
    assert f"Megatron has no mock data of {model.family.family}: give --data-path" in refusal.value.stderr
    own, *_ = started(script, "b", tmp_path, "--data-path", "/data/wiki")
    assert own[-2:] == ["--data-path", "/data/wiki"]
    assert not {"--mock-data", "NullTokenizer", "--vocab-size"} & {*own}


def test_megatron_is_told_the_sizes_of_a_bert(tmp_path: Path) -> None:
    script = written("megatron", SHAPE.plan(), BERT)["launch.sh"]
    call, *_ = started(script, "b", tmp_path, "--data-path", "/data/wiki")
    told = dict(pairwise(call))
    assert (told["--num-layers"], told["--seq-length"], told["--ffn-hidden-size"]) == ("4", "32", "256")
    assert "--bert-no-binary-head" in call


def test_megatron_gets_rotary_positions_and_shared_heads_of_a_gpt() -> None:
    gpt = Gpt(4, 64, 4, 32, 100, rotary_size=4, rotary_base=1e5, key_value_heads=2, biases=False, tied_embeddings=False)
    script = written("megatron", SHAPE.plan(), Model.of(gpt, Dtype.FLOAT16))["launch.sh"]
    for argument in (
        "--position-embedding-type rope",
        "--rotary-percent 0.25",
        "--rotary-base 100000",
        "--num-query-groups 2",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
    ):
        assert f"    {argument} " in script
    assert "learned_absolute" not in script
    assert "Assumed" not in script


def test_megatron_is_told_the_number_format_of_every_model() -> None:
    script = written("megatron", SHAPE.plan(), BERT)["launch.sh"]
    assert "    --fp16 " in script
    assert "/pretrain_bert.py" in script


@pytest.mark.parametrize(("dtype", "is_told"), [(Dtype.FLOAT16, True), (Dtype.BFLOAT16, False), (Dtype.FLOAT32, False)])
def test_megatron_scales_losses_of_float16_so_that_the_first_steps_train(dtype: Dtype, is_told: bool) -> None:
    model = replace(LLAMA, dtype=dtype)
    assert ("--initial-loss-scale 65536 " in written("megatron", SHAPE.plan(), model)["launch.sh"]) == is_told


def test_pytorchjobs_pin_a_pod_for_every_run_of_ranks() -> None:
    documents_of = list(yaml.safe_load_all(written("pytorchjob", SHAPE.plan())["pytorchjobs.yaml"]))
    stored, *jobs = documents_of
    assert documents.loads(stored["data"]["plan.json"], Plan) == SHAPE.plan()
    pods = [job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"] for job in jobs]
    assert [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods] == ["a", "b", "a"]
    assert [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == [2, 3, 1]
    assert all("--master-addr trainwright-0-master-0" in pod["containers"][0]["command"][-1] for pod in pods)


@pytest.mark.parametrize(("tensor", "is_told"), [(1, False), (2, True)])
def test_megatron_is_sequence_parallel_where_tensor_groups_have_experts(tensor: int, is_told: bool) -> None:
    shape = SHAPE.with_strategy(tensor=tensor, data=2 // tensor)
    script = written("megatron", shape.plan(), MODELS[3])["launch.sh"]
    assert ("--sequence-parallel" in script) == is_told
    assert ("The plan is without sequence parallelism" in script) == is_told
    assert "--sequence-parallel" not in written("megatron", shape.plan(), MODELS[2])["launch.sh"]


def test_megatron_export_says_that_experts_are_predicted_without_sequence_parallelism() -> None:
    request = ExportRequest(SHAPE.with_strategy(tensor=2, data=1).plan(), MODELS[3], runtime=Runtime())
    (file,) = TARGETS["megatron"].files(request)
    assert "The plan and its prediction are without sequence parallelism" in file.text


def test_megatron_export_says_that_tokens_cannot_be_divided() -> None:
    shape = SHAPE.with_strategy(tensor=2, data=1)
    odd = Model.of(Moe(layers=4, hidden_size=64, heads=4, sequence_length=31, experts=4))
    assert "31 tokens cannot be divided among 2 devices" in written("megatron", shape.plan(), odd)["launch.sh"]


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        (
            MODELS[0],
            [
                "# optimizer: assumed",
                "# No fp16 or bf16: neither the plan nor a model (--model) states the number format",
            ],
        ),
        (MODELS[1], ["# optimizer: that of the model file", "# bf16: number format of the plan"]),
        (MODELS[2], ["# fp16: number format of the plan"]),
        (MODELS[3], ["# No fp16 or bf16, which is float32: number format of the plan"]),
    ],
    ids=["no model", "llama", "gpt", "moe"],
)
def test_deepspeed_says_why_its_optimizer_and_number_format(model: Model | None, reasons: list[str]) -> None:
    script = written("deepspeed", SHAPE.plan(), model)["launch.sh"]
    assert [reason for reason in reasons if reason not in script] == []


@pytest.mark.parametrize(
    ("ends", "recomputed", "is_told"), [((2, 4, 6), 2, True), ((2, 4, 6), 0, False), ((6,), 4, False)]
)
def test_deepspeed_stages_that_recompute_use_no_reentrant_checkpoints(
    ends: tuple[int, ...], recomputed: int, is_told: bool
) -> None:
    shape = replace(SHAPE.with_strategy(data=6 // len(ends)), ends=ends, recomputed_blocks=recomputed)
    found = config(shape, Dtype.BFLOAT16, "adam")
    assert ("pipeline" in found) == is_told
    assert found.get("pipeline", {"use_reentrant": False}) == {"use_reentrant": False}
    files = written("deepspeed", shape.plan())
    assert ("# pipeline.use_reentrant" in files["launch.sh"]) == is_told
    assert ('checkpointable_layers=["Block"],' in files.get("trainwright_pipeline.py", "")) == is_told


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO1])
def test_deepspeed_trains_with_momentum_whatever_is_sharded(sharding: Sharding) -> None:
    found = config(SHAPE.with_strategy(sharding=sharding), None, "sgd")
    assert found["optimizer"] == {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}}
    assert found.get("zero_allow_untested_optimizer", False) == (sharding is Sharding.ZERO1)
    assert "zero_allow_untested_optimizer" not in config(SHAPE.with_strategy(sharding=sharding), None, "adam")


def test_deepspeed_stages_name_the_layers_that_share_a_weight() -> None:
    gpt, llama = (written("deepspeed", SHAPE.plan(), model)["trainwright_pipeline.py"] for model in (MODELS[2], LLAMA))
    assert "(embedding, head): make each a TiedLayerSpec" in gpt
    assert "TiedLayerSpec" not in llama


@pytest.mark.parametrize(("tensor", "is_checked"), [(1, False), (2, True)])
def test_accelerate_checks_that_the_model_is_divided(tensor: int, is_checked: bool) -> None:
    devices = tuple(Device("a", slot) for slot in range(2 * tensor))
    shape = replace(SHAPE.with_strategy(tensor=tensor, sharding=Sharding.ZERO3), ends=(6,), devices=devices)
    files = written("accelerate", shape.plan())
    assert ("tp_size is ignored unless" in files["launch.sh"]) == is_checked
    assert ("def check_tensor_degree(model):" in files["trainwright_parallelism.py"]) == is_checked
    ast.parse(files["trainwright_parallelism.py"])


def test_pytorchjobs_explain_every_choice() -> None:
    lines = written("pytorchjob", SHAPE.plan())["pytorchjobs.yaml"].splitlines()
    for begin in ("replicas: 1", "restartPolicy: Never", "nodeSelector:", "command:", "nvidia.com/gpu: "):
        found = [line for line in lines if line.lstrip(" -").startswith(begin)]
        assert len(found) == 3
        assert all("  # " in line for line in found)


SCALED = Model.of(
    Llama(
        4, 64, 4, 32, key_value_heads=2, rotary_base=5e5, rotary_scaling=RotaryScaling("llama3", 8.0), norm_epsilon=1e-5
    ),
    Dtype.BFLOAT16,
)


def test_megatron_gets_angles_norms_and_clipping_of_the_model(tmp_path: Path) -> None:
    call, *_ = started(written("megatron", SHAPE.plan(), SCALED)["launch.sh"], "b", tmp_path)
    given_arguments = dict(pairwise(call))
    names = ("--rotary-base", "--rope-scaling-factor", "--norm-epsilon", "--clip-grad")
    assert [given_arguments[name] for name in names] == ["500000", "8", "1e-05", "1"]
    assert "--use-rope-scaling" in call
    plain, *_ = started(written("megatron", SHAPE.plan())["launch.sh"], "b", tmp_path)
    assert dict(pairwise(plain))["--rotary-base"] == "10000"
    assert "--use-rope-scaling" not in plain


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"head_size": 24, "query_key_norm": True}, ["--kv-channels 24", "--qk-layernorm"]),
        ({"query_key_value_bias": True}, ["--disable-bias-linear", "--add-qkv-bias"]),
        (
            {"attention_window": 8, "full_attention_every": 2},
            ["--window-size 7,0", "--window-attn-skip-freq 2"],
        ),
    ],
    ids=["qwen3", "qwen2", "window"],
)
def test_blocks_beyond_llamas_are_arguments_of_megatron_and_not_of_torchtitan(fields, arguments) -> None:
    model = Model.of(Llama(4, 64, 4, 32, key_value_heads=2, **fields), Dtype.BFLOAT16)
    script = written("megatron", SHAPE.plan(), model)["launch.sh"]
    assert [argument for argument in arguments if f"{argument} " not in script] == []
    assert "no Llama with such blocks" in written("torchtitan", SHAPE.plan(), model)["trainwright_recipe.py"]


@pytest.mark.parametrize("attention", Attention)
def test_megatron_stores_the_scores_of_attention_where_the_model_does(attention: Attention) -> None:
    model = Model.of(LLAMA.family, Dtype.BFLOAT16, attention)
    script = written("megatron", SHAPE.plan(), model)["launch.sh"]
    assert ("--attention-backend unfused" in script) == (attention is not Attention.FUSED)


@pytest.mark.parametrize("name", ["megatron", "torchtitan"])
def test_export_says_which_values_of_the_model_are_assumed(name: str) -> None:
    sentence = "Assumed, since the model file does not state it: rotary_base 10,000, norm_epsilon 1e-06"
    assumed, stated = (
        " ".join(written(name, SHAPE.plan(), model)["launch.sh"].replace("\n#", "").split())
        for model in (LLAMA, SCALED)
    )
    assert sentence in assumed
    assert "Assumed, since" not in stated


def test_torchtitan_gets_angles_and_norms_of_the_model() -> None:
    plain, scaled = (written("torchtitan", SHAPE.plan(), model)["trainwright_recipe.py"] for model in (LLAMA, SCALED))
    assert "theta=10000.0," in plain
    assert 'scaling="none",' in plain
    for line in ("theta=500000.0,", 'scaling="llama",', "scaling_factor=8.0,", "norm.eps = 1e-05"):
        assert line in scaled


def test_scaling_that_a_trainer_lacks_is_named() -> None:
    linear = replace(LLAMA, family=Llama(4, 64, 4, 32, key_value_heads=2, rotary_scaling=RotaryScaling("linear", 2.5)))
    assert "# Megatron has no such scaling of rotary angles" in written("megatron", SHAPE.plan(), linear)["launch.sh"]
    assert "torchtitan has no linear scaling" in written("torchtitan", SHAPE.plan(), linear)["launch.sh"]


@pytest.mark.parametrize(("dtype", "is_grouped"), [(Dtype.BFLOAT16, True), (Dtype.FLOAT16, False)])
def test_megatron_gets_how_experts_are_computed(dtype: Dtype, is_grouped: bool, tmp_path: Path) -> None:
    family = Moe(layers=4, hidden_size=64, heads=4, sequence_length=32, experts=4, balance_loss_weight=0.02)
    call, *_ = started(written("megatron", SHAPE.plan(), Model.of(family, dtype))["launch.sh"], "b", tmp_path)
    given_arguments = dict(pairwise(call))
    assert given_arguments["--moe-token-dispatcher-type"] == "alltoall"
    assert given_arguments["--moe-aux-loss-coeff"] == "0.02"
    assert ("--moe-grouped-gemm" in call) == is_grouped


def test_every_trainer_clips_gradients_to_the_same_norm() -> None:
    norms = {
        "megatron": "--clip-grad 1 ",
        "torchtitan": "max_norm=1.0,",
        "deepspeed": '"gradient_clipping": 1.0',
        "accelerate": "MAX_NORM = 1.0 ",
        "transformers": "--max_grad_norm 1 ",
        "fsdp2": "MAX_NORM = 1.0 ",
    }
    assert norms.keys() == {name for name, target in TARGETS.items() if not target.capabilities.every_plan}
    for name, words in norms.items():
        assert any(words in text for text in written(name, SHAPE.plan()).values()), name


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if not target.capabilities.every_plan])
def test_every_trainer_says_how_pretrained_weights_are_loaded(name: str) -> None:
    target = TARGETS[name]
    request = ExportRequest(nearest_plan(SHAPE.plan(), target.capabilities), LLAMA, remarks=(target.remark,))
    assert "retrained" in target.files(request)[0].text


FSDP_SHAPE = replace(SHAPE.with_strategy(sharding=Sharding.ZERO3), ends=(6,), devices=SHAPE.devices[:2])


@pytest.mark.parametrize("recomputed", [0, 4])
def test_trainer_gets_the_plan_as_its_arguments(recomputed: int, tmp_path: Path) -> None:
    files = written("transformers", replace(FSDP_SHAPE, recomputed_blocks=recomputed).plan())
    call, *_ = started(files["launch.sh"], "a", tmp_path, SCRIPT="run_clm.py")
    given_arguments = dict(pairwise(call))
    assert given_arguments["--per_device_train_batch_size"] == str(SHAPE.rows)
    assert given_arguments["--gradient_accumulation_steps"] == str(SHAPE.micro_batches)
    fsdp = json.loads(files["fsdp_config.json"])
    assert fsdp["reshard_after_forward"] is True
    assert fsdp["activation_checkpointing"] == (recomputed > 0)
    replicated = written("transformers", FSDP_SHAPE.with_strategy(sharding=Sharding.NONE).plan())
    assert "fsdp_config.json" not in replicated


def test_script_of_torch_alone_is_short_and_asks_for_the_model(tmp_path: Path) -> None:
    for sharding in (Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3):
        shape = replace(FSDP_SHAPE.with_strategy(sharding=sharding), recomputed_blocks=4)
        files = written("fsdp2", shape.plan())
        assert len(files["train_fsdp2.py"].splitlines()) <= 100
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        started(files["launch.sh"], "a", tmp_path)
    assert "MODEL: must be a folder or a name of Hugging Face" in refusal.value.stderr


HUGGING_FACE: list[tuple[Family, str, list[str], str]] = [
    (Gpt(2, 64, 4, sequence_length=32, vocabulary_size=100), "AutoModelForCausalLM", ["SEQUENCE = 32 "], "run_clm.py: --block_size 32"),
    (Llama(2, 64, 4, sequence_length=32), "AutoModelForCausalLM", ["SEQUENCE = 32 "], "run_clm.py: --block_size 32"),
    (Moe(2, 64, 4, sequence_length=32), "AutoModelForCausalLM", ["SEQUENCE = 32 "], "run_clm.py: --block_size 32"),
    (Bert(2, 64, 4, sequence_length=32), "AutoModelForPreTraining", ['"next_sentence_label"'], "rows of 32 tokens with next_sentence"),
    (Bert(2, 64, 4, sequence_length=32, next_sentence=False), "AutoModelForMaskedLM", ["SEQUENCE = 32 "], "run_mlm.py: --max_seq_length 32"),
    (T5(2, 64, 4, sequence_length=32, decoder_sequence_length=8), "AutoModelForSeq2SeqLM", ["SEQUENCE = 32 ", "DECODER_SEQUENCE = 8 "],
     "--max_source_length 32 --max_target_length 8"),
    (T5(2, 64, 4, sequence_length=32), "AutoModelForSeq2SeqLM", ["DECODER_SEQUENCE = 32 "], "--max_target_length 32"),
    (Vit(2, 64, 4, image_size=32, classes=10), "AutoModelForImageClassification", ["IMAGE = 32 ", "CLASSES = 10 "], "images of 32 × 32 pixels"),
    (Swin((2, 2), 96), "AutoModelForImageClassification", ["IMAGE = 224 ", "CLASSES = 1000 "], "images of 224 × 224 pixels"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "sizes", "example"), HUGGING_FACE, ids=lambda value: str(value)[:12])
def test_hugging_face_exports_name_the_class_and_lengths_of_the_family(
    family: Family, name: str, sizes: list[str], example: str
) -> None:
    plan, model = FSDP_SHAPE.plan(), Model.of(family, Dtype.BFLOAT16)
    script = written("fsdp2", plan, model)["train_fsdp2.py"]
    assert f"import AutoConfig, {name}\n" in script
    assert all(size in script for size in sizes)
    launch = " ".join(written("transformers", plan, model)["launch.sh"].replace("\n#", "").split())
    assert example in launch
    assert "run_clm.py" not in launch.replace(example, "")


def test_families_without_a_class_of_hugging_face_are_yours_or_refused() -> None:
    without = FAMILIES.keys() - {family.family for family, *_ in HUGGING_FACE}
    assert without == {"custom"} | TARGETS["fsdp2"].capabilities.missing_families
    launch = written("transformers", FSDP_SHAPE.plan(), Model.of(WideResnet()))["launch.sh"]
    assert "No example script of transformers trains wide_resnet" in " ".join(launch.replace("\n#", "").split())
