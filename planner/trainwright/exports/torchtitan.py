"""Export to torchtitan: a recipe in Python, which is its form of a configuration.

Names: torchtitan/config/configs.py and torchtitan/models/llama3 of https://github.com/pytorch/torchtitan, tag v0.3.0.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.launch import launch_script
from trainwright.exports.model_values import MAX_GRADIENT_NORM, assumed_values, stated_or_assumed
from trainwright.exports.target import ExportFile, ExportRequest, comment, counted, explained
from trainwright.exports.uniform_shape import UniformShape
from trainwright.families import Llama, Moe
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Schedule
from trainwright.runtime import Kernels, SelectiveRecompute
from trainwright.strategy import Sharding

RECIPE = "trainwright_recipe"
_NEEDED = ': "${HF_ASSETS:?must be the folder of the tokenizer}"  # torchtitan has none of its own\n'
_OWN_FORMAT = "# add mixed_precision_param, your model's number format"
_NO_MODEL = "the model was not given (--model)"


class Torchtitan:
    """torchtitan with replicas that shard nothing, or FSDP2.

    Its stages reduce gradients and release gathered weights after the last micro-batch alone (`perform_reduce_grad` of torch's
    pipelining/stage.py), so that FSDP2 is ZeRO-1 in them, whatever fsdp_reshard_after_forward says.
    """

    software = "torchtitan 0.3.0"
    preset: str | None = "torchtitan"
    capabilities = Capabilities(
        shardings=frozenset({Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3}),
        pipelined_shardings=frozenset({Sharding.NONE, Sharding.ZERO1}),
        sequence_parallel=True,
        schedules=frozenset(Schedule),
        fewer_micro_batches=False,
        tied_stages=False,
        missing_families=frozenset({"custom"}),
        optimizers=frozenset({"adam"}),
        dtypes=frozenset({Dtype.BFLOAT16, Dtype.FLOAT32}),
        missing_generations=frozenset({"pascal", "volta"}),
    )
    remark = (
        "The data set, the tokenizer and the learning rate are yours: DATASET, DATASET_PATH and HF_ASSETS, or edit the recipe. "
        "Pretrained weights: PRETRAINED is a folder of Hugging Face's safetensors."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        remarks = (
            *request.remarks_with_vocabulary,
            *_communication_remarks(request),
            *_model_remarks(request.model),
        )
        program = f"-m torchtitan.train --module {RECIPE} --config trainwright"
        return (
            ExportFile("launch.sh", launch_script(request.ranks, program, remarks, before=_NEEDED)),
            ExportFile(f"{RECIPE}.py", _recipe(request)),
        )


def _communication_remarks(request: ExportRequest) -> Iterator[str]:
    """Say what replicas communicate otherwise than predictions count it, or than would be best."""
    shape = request.shape
    stages, batches = len(shape.ends), shape.micro_batches
    if shape.strategy.data == 1:
        return
    if stages > 1 and request.overlaps_gradients:
        yield "Stages reduce gradients after the last backward; the prediction is of a reduction during it."
    elif stages == 1 and batches > 1 and shape.strategy.sharding is Sharding.NONE:
        yield (
            f"torchtitan reduces gradients in each of {batches} micro-batches. zero2 communicates as much, and takes less memory."
        )


def _model_remarks(model: Model | None) -> Iterator[str]:
    """Say what the recipe assumes of a Llama, and what torchtitan lacks of it."""
    if model is None or not isinstance(model.family, Llama) or not _is_llama3(model.family):
        return
    yield from assumed_values(model.family)
    scaling = model.family.rotary_scaling
    if scaling is not None and scaling.kind != "llama3":
        yield f"torchtitan has no {scaling.kind} scaling of rotary angles, so the recipe leaves its factor {scaling.factor:g} out."


def module_names(shape: UniformShape) -> list[list[str]]:
    """Return the modules of every stage: embedding, blocks, final normalisation and head."""
    return [
        [
            *(["tok_embeddings"] if first == 0 else []),
            *(f"layers.{layer - 1}" for layer in range(max(first, 1), min(end, shape.layers - 1))),
            *(["norm", "lm_head"] if end == shape.layers else []),
        ]
        for first, end in shape.spans
    ]


def _recipe(request: ExportRequest) -> str:
    shape, model = request.shape, request.model
    spec = _own_spec(model)
    if model is not None and isinstance(model.family, Llama) and _is_llama3(model.family):
        spec = _llama_spec(model.family)
    stages = len(shape.ends)
    training = [
        (f"local_batch_size={shape.rows * (shape.micro_batches if stages > 1 else 1)},", _local_batch(shape)),
        (f"global_batch_size={shape.global_batch_size},", f"{counted(shape.strategy.data, 'replica')}"),
        ("seq_len=SEQUENCE,", f"yours: {_NO_MODEL}") if model is None else (f"seq_len={_sequence(model)},", "model"),
        (
            'steps=int(os.environ.get("TRAINWRIGHT_ITERATIONS", "100")),',
            "yours; a trial of the operator sets what it measures",
        ),
        *_formats(request),
        (f"max_norm={MAX_GRADIENT_NORM},", "norm to which all gradients are clipped, as in every export"),
        *([("disable_cuda_graphs=True,", "torchtitan has none with stages")] if stages > 1 else []),
    ]
    return f'''{comment([f"Recipe of the plan for {Torchtitan.software}."])}import os

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer
{spec}

def parallelism():
    """Return how {counted(len(shape.devices), "rank")} train the model."""
    return ParallelismConfig(
{explained(_degrees(shape), " " * 8)}{_pipeline(shape) if stages > 1 else ""}    )


def training():
    """Return the batch and the number formats."""
    return TrainingConfig(
{explained(training, " " * 8)}    )


def checkpoint():
    """Return which weights training begins with: pretrained ones of Hugging Face in the folder PRETRAINED, or initial values."""
    folder = os.environ.get("PRETRAINED")
    if folder is None:
        return CheckpointManager.Config()
    return CheckpointManager.Config(enable=True, initial_load_path=folder, initial_load_in_hf=True)


def trainwright():
    """Return the run, for `--module {RECIPE} --config trainwright`."""
    spec = model_spec()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        hf_assets_path=os.environ["HF_ASSETS"],  # yours: the folder of the tokenizer
        dataloader=HuggingFaceTextDataLoader.Config(  # yours
            dataset=os.environ.get("DATASET", "c4"), dataset_path=os.environ.get("DATASET_PATH")
        ),
        metrics=MetricsProcessor.Config(log_freq=1),  # so that every step's throughput is logged
        checkpoint=checkpoint(),
        optimizer=default_adamw(lr=3e-4),  # yours
        training=training(),
        parallelism=parallelism(),
{explained([_recompute(request), _compile(request)], " " * 8)}    )
'''


def _recompute(request: ExportRequest) -> tuple[str, str]:
    if request.shape.recomputed_blocks:
        return "activation_checkpoint=FullAC.Config(),", "all blocks are recomputed"
    if request.runtime is not None and request.runtime.selective_recompute is SelectiveRecompute.OPERATORS:
        return "activation_checkpoint=SelectiveAC.Config(),", "cheap operators are recomputed, as predicted"
    return "activation_checkpoint=None,", "nothing is recomputed; SelectiveAC.Config() takes less memory, and longer"


def _compile(request: ExportRequest) -> tuple[str, str]:
    if request.runtime is None:
        return "compile=CompileConfig(enable=False),", "yours: compiled kernels are faster"
    is_compiled = request.runtime.kernels is Kernels.COMPILED
    return f"compile=CompileConfig(enable={is_compiled}),", f"{request.runtime.kernels} kernels, as predicted"


def _sequence(model: Model) -> object:
    return getattr(model.family, "sequence_length", "SEQUENCE")


def _local_batch(shape: UniformShape) -> str:
    if len(shape.ends) > 1:
        return f"{counted(shape.micro_batches, 'micro-batch', 'es')} × {counted(shape.rows, 'row')} on one replica"
    return f"rows of a micro-batch on one replica; {shape.micro_batches} of them accumulate"


def _degrees(shape: UniformShape) -> list[tuple[str, str]]:
    sharded = shape.strategy.sharding is not Sharding.NONE
    replicas = 1 if sharded else shape.strategy.data
    arguments = [
        (
            f"data_parallel_replicate_degree={replicas},",
            "1: replicas shard" if sharded else "replicas: HSDP without shards",
        ),
        (
            f"data_parallel_shard_degree={shape.strategy.data if sharded else 1},",
            f"{shape.strategy.sharding} (FSDP2)" if sharded else "no FSDP",
        ),
        (f"tensor_parallel_degree={shape.strategy.tensor},", "devices that share each layer"),
        (f"enable_sequence_parallel={shape.strategy.sequence_parallel},", "activations along the sequence, as planned"),
        (f"pipeline_parallel_degree={len(shape.ends)},", "stages"),
        ('spmd_backend="partial_dtensor",', "the default, spmd_types, needs more of FSDP2 than torch 2.13 has"),
    ]
    if sharded:
        always = shape.strategy.sharding is Sharding.ZERO3
        why = "weights are gathered for each pass" if always else "weights stay whole until the backward"
        if len(shape.ends) > 1:
            why = "stages keep whole weights and gradients until the last micro-batch"
        arguments.insert(2, (f'fsdp_reshard_after_forward="{"always" if always else "never"}",', why))
    return arguments


def _pipeline(shape: UniformShape) -> str:
    schedule = "GPipe" if shape.schedule is Schedule.GPIPE else "1F1B"
    lines = [
        (f'pipeline_parallel_schedule="{schedule}",', "as planned"),
        (f"pipeline_parallel_microbatch_size={shape.rows},", "rows of a micro-batch on one replica"),
        ("module_fqns_per_model_part=[", "modules of each stage"),
    ]
    stages = "".join(f"            {_quoted(names)},\n" for names in module_names(shape))
    return f"{explained(lines, ' ' * 8)}{stages}        ],\n"


def _quoted(names: list[str]) -> str:
    """Write a stage's modules, with its blocks as a comprehension where they are several."""
    blocks = [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]
    if len(blocks) < 3:
        return "[" + ", ".join(f'"{name}"' for name in names) + "]"
    inner = f'*(f"layers.{{block}}" for block in range({blocks[0]}, {blocks[-1] + 1}))'
    before = ['"tok_embeddings"'] if names[0] == "tok_embeddings" else []
    after = ['"norm"', '"lm_head"'] if names[-1] == "lm_head" else []
    return "[" + ", ".join([*before, inner, *after]) + "]"


def _formats(request: ExportRequest) -> list[tuple[str, str]]:
    if request.dtype is None:
        return [(_OWN_FORMAT, f"{_NO_MODEL}; the default is bfloat16")]
    return [(f'mixed_precision_param="{request.dtype}",', request.dtype_reason)]


def _own_spec(model: Model | None) -> str:
    if model is None:
        reason = "The model was not given (--model)."
    else:
        named = {Moe: "MoE of these sizes", Llama: "Llama with such blocks"}.get(
            type(model.family), model.family.family
        )
        reason = f"torchtitan 0.3.0 has no {named}."
    return f"""
{comment([f"{reason} Name a module of yours whose model_spec() returns the ModelSpec; its model has tok_embeddings, layers, norm, lm_head."])}from your_model import model_spec
"""


def _is_llama3(family: Llama) -> bool:
    attention = (family.head_size, family.query_key_norm, family.query_key_value_bias, family.attention_window)
    blocks = (family.block_norms, family.activation, family.residual_multiplier, family.attention_scale)
    ends = (family.embedding_multiplier, family.logits_multiplier, family.logits_soft_cap)
    return not any((*attention, *blocks, *ends))


def _rotary(family: Llama) -> list[tuple[str, str]]:
    """Return the arguments of rotary angles but their number."""
    base, why = stated_or_assumed(family, "rotary_base")
    lines, scaling = [(f"theta={base:.1f},", why)], family.rotary_scaling
    if scaling is None or scaling.kind != "llama3":
        return [
            *lines,
            ('scaling="none",', "model" if scaling is None else f"torchtitan has no {scaling.kind} scaling"),
        ]
    return [
        *lines,
        ('scaling="llama",', "model"),
        (f"scaling_factor={scaling.factor},", ""),
        (f"low_freq_factor={scaling.low_frequency_factor},", ""),
        (f"high_freq_factor={scaling.high_frequency_factor},", ""),
        (f"original_max_position_embeddings={scaling.original_positions},", ""),
    ]


def _llama_spec(family: Llama) -> str:
    width, heads = family.hidden_size, family.key_value_heads or family.heads
    epsilon, why = stated_or_assumed(family, "norm_epsilon")
    tied = "\n        enable_weight_tying=True," if family.tied_embeddings else ""
    return f'''from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm


def model_spec():
    """Return a Llama of the plan's sizes; torchtitan names only some sizes itself."""
    spec = llama3.model_registry("debugmodel")
    spec.model = llama3.Llama3Model.Config(
        dim={width},
        vocab_size={family.vocabulary_size},{tied}
        tok_embeddings=Embedding.Config(
            num_embeddings={family.vocabulary_size}, embedding_dim={width}, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape={width}, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features={width}, out_features={family.vocabulary_size}, param_init=llama3._output_linear_init({width})
        ),
        layers=llama3._build_llama3_layers(
            n_layers={family.layers},
            dim={width},
            n_heads={family.heads},
            n_kv_heads={heads},
            hidden_dim={family.feed_forward_size},
            rope=ComplexRoPE.Config(
                dim={width // family.heads},
                max_seq_len={family.sequence_length},
{explained(_rotary(family), " " * 16)}            ),
            attn_backend="flex",
        ),
    )
    for norm in (spec.model.norm, *(norm for block in spec.model.layers for norm in (block.attention_norm, block.ffn_norm))):
        norm.eps = {epsilon:g}  # {why}
    return spec
'''
