"""Export to Megatron-LM: its arguments and the commands that start them.

Names of the arguments: megatron/training/arguments.py and docs/user-guide/features/pipeline_parallel_layout.md of
https://github.com/NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Final

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.launch import launch_script
from trainwright.exports.model_values import (
    MAX_GRADIENT_NORM,
    assumed_values,
    is_llama3,
    stated_or_assumed,
    stores_scores,
)
from trainwright.exports.target import ALIGNED_ENTRIES, ExportFile, ExportRequest, counted, explained
from trainwright.exports.uniform_shape import UniformShape
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe
from trainwright.families.fields import RotaryScaling
from trainwright.layer import Dtype
from trainwright.strategy import Sharding

STRATEGIES: Final = {Sharding.ZERO2: "optim_grads", Sharding.ZERO3: "optim_grads_params"}
"""Megatron-FSDP's names of what is sharded."""

Arguments = Iterator[tuple[str, str]]
"""Arguments with the reason for each."""


_WITHOUT_ARGUMENT: Final = (
    "query_key_norm_over",
    "block_norms",
    "logits_soft_cap",
    "activation",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_multiplier",
    "attention_scale",
    "window_rotary_base",
)
"""Fields of a Llama that no argument of Megatron's pretrain_gpt.py sets, whatever their values."""


def missing_field(family: Family) -> str | None:
    """Return the field of a family, with its value, that Megatron has no argument for; None if it has all."""
    if isinstance(family, Llama):
        values = ((name, getattr(family, name)) for name in _WITHOUT_ARGUMENT)
        return next((f"llama.{name} {value}" for name, value in values if value is not None), None)
    if not isinstance(family, Gpt):
        return None
    if family.parallel_residual:
        return "gpt.parallel_residual true"
    return "gpt.activation relu" if family.activation == "relu" else None


class Megatron:
    """Megatron-LM. Its FSDP is documented with tensor, expert and context degrees, not with pipelines.

    pretrain_t5.py refuses pipelines, and DistributedOptimizer every optimizer but Adam.
    """

    software = "Megatron-LM core_v0.16.1"
    preset: str | None = "megatron"
    capabilities = Capabilities(
        pipelined_shardings=frozenset({Sharding.NONE, Sharding.ZERO1}),
        sequence_parallel=True,
        partial_recompute=True,
        unstaged_families=frozenset({"t5"}),
        missing_families=frozenset({"custom"}),
        missing_field=missing_field,
        sharded_optimizers=frozenset({"adam"}),
    )
    remark = (
        "The data set, the tokenizer and the learning rate are yours: arguments of launch.sh follow those of the plan, and "
        "without any pretrain_gpt.py reads mock data. MEGATRON is the folder of the script, by default that of launch.sh."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        has_experts = request.model is not None and isinstance(request.model.family, Moe)
        arguments = [
            *parallel_arguments(request.shape, request.overlaps_gradients, has_experts=has_experts),
            *_model_arguments(request),
            *_run_arguments(request),
        ]
        before = f"arguments=(\n{explained(arguments)})\n"
        if request.shape.strategy.tensor > 1 and request.shape.strategy.sharding not in STRATEGIES:
            before += (
                "export CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron asks for it with a tensor degree, before Blackwell\n"
            )
        before += _own_arguments(request)
        program = f'{_script(request)} "${{arguments[@]}}" "${{own[@]}}"'
        family = None if request.model is None else request.model.family
        remarks = (
            *request.remarks,
            *assumed_values(family),
            *_expert_remarks(request),
            *_pretrained_remarks(request),
        )
        return (ExportFile("launch.sh", launch_script(request.ranks, program, remarks, before=before)),)


_SCRIPTS: Final = {Bert: "bert", T5: "t5", Gpt: "gpt", Llama: "gpt", Moe: "gpt"}


def _script(request: ExportRequest) -> str:
    """Return the script in a checkout of Megatron-LM, or the user's for other models, as the shell names it."""
    name = "gpt" if request.model is None else _SCRIPTS.get(type(request.model.family))
    return '"${SCRIPT:-train.py}"' if name is None else f'"${{MEGATRON:-.}}"/pretrain_{name}.py'


def _own_arguments(request: ExportRequest) -> str:
    """Return the user's arguments, in place of mock data where pretrain_gpt.py reads them."""
    own = 'own=("$@")  # yours: bash launch.sh --data-path … --tokenizer-type … --lr …, which follow the others\n'
    family = None if request.model is None else request.model.family
    if isinstance(family, Bert | T5):
        needed = f"Megatron has no mock data of {family.family}: give --data-path and the tokenizer's arguments"
        return f'{own}((${{#own[@]}})) || {{ echo "{needed}" >&2; exit 2; }}\n'
    if family is not None and not isinstance(family, Gpt | Llama | Moe):
        return own
    size, why = "", ""
    if family is not None:
        size, why = f" --vocab-size {family.vocabulary_size - 1}", "  # NullTokenizer adds one"
    return f"{own}((${{#own[@]}})) || own=(--mock-data --tokenizer-type NullTokenizer{size}){why}\n"


def layout(shape: UniformShape) -> str:
    """Return Megatron's pipeline layout: E the embedding, t a block, L the loss with the head, | between stages."""
    stages = []
    for (first, end), blocks in zip(shape.spans, shape.blocks, strict=True):
        middle = "" if blocks == 0 else "t" if blocks == 1 else f"t*{blocks}"
        stages.append(f"{'E' * (first == 0)}{middle}{'L' * (end == shape.layers)}")
    return "|".join(stages)


_OVERLAP: Final = {True: ", as predicted", False: "; predicted without, so it may be faster", None: ""}


def parallel_arguments(
    shape: UniformShape, overlaps_gradients: bool | None = None, *, has_experts: bool = False
) -> Arguments:
    """Yield the arguments that say how the model is trained on the devices, with what is predicted of gradients.

    `MoELayer.forward` raises ValueError in training if a tensor group has experts and is not sequence parallel, so that a model
    with experts always is.
    """
    stages = len(shape.ends)
    overlap = f"gradients are reduced during the last backward{_OVERLAP[overlaps_gradients]}"
    yield f"--tensor-model-parallel-size {shape.strategy.tensor}", "devices that share each layer"
    if shape.strategy.sequence_parallel:
        yield "--sequence-parallel", "activations divided along the sequence outside of products"
    elif has_experts and shape.strategy.tensor > 1:
        yield "--sequence-parallel", "not of the plan: Megatron refuses to train experts in tensor groups without it"
    yield f"--pipeline-model-parallel-size {stages}", "stages; replicas follow from the number of ranks"
    if stages > 1:
        layers = " ".join(str(end - first) for first, end in shape.spans)
        yield f"--pipeline-model-parallel-layout {quote(layout(shape))}", f"layers by stage {layers}, E and L included"
    yield f"--micro-batch-size {shape.rows}", "rows of a micro-batch on one replica"
    yield (
        f"--global-batch-size {shape.global_batch_size}",
        f"{counted(shape.strategy.data, 'replica')} × {counted(shape.micro_batches, 'micro-batch', 'es')}",
    )
    if shape.strategy.sharding is Sharding.NONE:
        if shape.strategy.data > 1:
            yield "--overlap-grad-reduce", overlap
    elif shape.strategy.sharding is Sharding.ZERO1:
        yield "--use-distributed-optimizer", f"ZeRO-1: optimizer state over {counted(shape.strategy.data, 'replica')}"
        yield "--overlap-grad-reduce", overlap
    else:
        strategy = STRATEGIES[shape.strategy.sharding]
        yield "--use-megatron-fsdp", f"{shape.strategy.sharding} over {counted(shape.strategy.data, 'replica')}"
        yield f"--data-parallel-sharding-strategy {strategy}", "what is sharded"
        yield "--use-distributed-optimizer", "Megatron-FSDP needs it"
        yield "--no-gradient-accumulation-fusion", "Megatron-FSDP needs it"
        yield "--ckpt-format fsdp_dtensor", "the only format that Megatron-FSDP writes"
    yield from _recompute_arguments(shape)


def _recompute_arguments(shape: UniformShape) -> Arguments:
    count, most = shape.recomputed_blocks, max(shape.blocks)
    if count == 0:
        return
    yield "--recompute-granularity full", "activations of a block are computed again in the backward"
    if count == most:
        yield "--recompute-method uniform", "all blocks"
        yield "--recompute-num-layers 1", "one block at a time"
    else:
        yield "--recompute-method block", "the first blocks of each stage"
        yield f"--recompute-num-layers {count}", "blocks of each stage"


def _model_arguments(request: ExportRequest) -> Arguments:
    model, dtype = request.model, request.dtype
    if dtype is not None:
        yield from _format_arguments(dtype, request.dtype_reason)
    if model is None:
        missing = "arguments and the number format" if dtype is None else "arguments"
        yield f"# add the {missing} of your model here", "the model was not given (--model)"
        return
    family = model.family
    if not isinstance(family, Gpt | Llama | Moe | Bert):
        yield "# add the arguments of your model here", f"Megatron's sizes of {family.family}"
        return
    yield f"--num-layers {family.layers}", "blocks; the plan counts embedding and head as layers, too"
    yield f"--hidden-size {family.hidden_size}", "model"
    yield f"--num-attention-heads {family.heads}", "model"
    yield f"--seq-length {family.sequence_length}", "model"
    yield f"--max-position-embeddings {family.sequence_length}", "model"
    drops = isinstance(family, Gpt | Bert) and family.dropout
    for name in ("hidden", "attention"):
        yield f"--{name}-dropout {0.1 if drops else 0.0}", "as profiled"
    if stores_scores(model):
        yield "--attention-backend unfused", "scores of attention are stored, as the model file says"
    if isinstance(family, Gpt):
        yield from _gpt_arguments(family)
    elif isinstance(family, Bert):
        yield from _bert_arguments(family)
    else:
        yield from _llama_arguments(family)
    if isinstance(family, Moe):
        yield from _expert_arguments(family, dtype)
    yield f"--make-vocab-size-divisible-by {ALIGNED_ENTRIES}", "no more padding than fast products need"


def _format_arguments(dtype: Dtype, reason: str) -> Arguments:
    if dtype is not Dtype.FLOAT32:
        yield f"--{'fp16' if dtype is Dtype.FLOAT16 else 'bf16'}", reason
        yield "--accumulate-allreduce-grads-in-fp32", "gradients are reduced in float32"
    if dtype is Dtype.FLOAT16:
        yield "--initial-loss-scale 65536", "from the default of 2^32, the first 15 steps or so update nothing"


def _bert_arguments(family: Bert) -> Arguments:
    yield "--position-embedding-type learned_absolute", "model"
    yield f"--ffn-hidden-size {family.feed_forward_size}", "model"
    if not family.next_sentence:
        yield "--bert-no-binary-head", "no head for the next sentence"


def _group_arguments(family: Gpt | Llama | Moe) -> Arguments:
    if family.key_value_heads not in (None, family.heads):
        yield "--group-query-attention", "grouped queries"
        yield f"--num-query-groups {family.key_value_heads}", "heads of keys and values"


def _gpt_arguments(family: Gpt) -> Arguments:
    if family.rotary_size is None:
        yield "--position-embedding-type learned_absolute", "model"
    else:
        yield "--position-embedding-type rope", "rotary positions"
        share = family.rotary_size * family.heads / family.hidden_size
        yield f"--rotary-percent {share}", f"{family.rotary_size} values of a head are rotated"
        base, why = stated_or_assumed(family, "rotary_base")
        yield f"--rotary-base {round(base)}", why
    yield from _group_arguments(family)
    if not family.biases:
        yield "--disable-bias-linear", "products have no biases"
    if not family.tied_embeddings:
        yield "--untie-embeddings-and-output-weights", "the head has weights of its own"


def _llama_arguments(family: Llama | Moe) -> Arguments:
    yield "--position-embedding-type rope", "Llama"
    yield "--normalization RMSNorm", "Llama"
    yield "--disable-bias-linear", "Llama"
    if isinstance(family, Llama) or family.gated:
        yield "--swiglu", "gated feed-forward"
    yield f"--ffn-hidden-size {family.feed_forward_size}", "model"
    yield from _group_arguments(family)
    if family.head_size is not None:
        yield f"--kv-channels {family.head_size}", "width of a head"
    if family.query_key_norm:
        yield "--qk-layernorm", "queries and keys are normalised by head"
    if family.query_key_value_bias:
        yield "--add-qkv-bias", "biases of queries, keys and values"
    yield from _window_arguments(family)
    base, why = stated_or_assumed(family, "rotary_base")
    yield f"--rotary-base {round(base)}", why
    yield from _scaling_arguments(family.rotary_scaling)
    epsilon, why = stated_or_assumed(family, "norm_epsilon")
    yield f"--norm-epsilon {epsilon:g}", why
    if not family.tied_embeddings:
        yield "--untie-embeddings-and-output-weights", "the head has weights of its own"


def _window_arguments(family: Llama | Moe) -> Arguments:
    """Yield the window of attention, which Megatron states as tokens before and after a token."""
    if family.attention_window is None:
        return
    yield f"--window-size {family.attention_window - 1},0", "tokens that attention reaches before and after a token"
    if family.full_attention_every is not None:
        yield (
            f"--window-attn-skip-freq {family.full_attention_every}",
            "one block in this many reaches all tokens before",
        )


def _scaling_arguments(scaling: RotaryScaling | None) -> Arguments:
    if scaling is None:
        return
    if is_llama3(scaling):
        yield "--use-rope-scaling", "rotary angles are scaled as in Llama 3.1"
        yield f"--rope-scaling-factor {scaling.factor:g}", "model"
    elif scaling.kind == "linear" and scaling.factor.is_integer():
        yield f"--rotary-seq-len-interpolation-factor {scaling.factor:.0f}", "rotary angles are divided by it"
    else:
        yield "# Megatron has no such scaling of rotary angles", f"{scaling.kind}, factor {scaling.factor:g}"


def _pretrained_remarks(request: ExportRequest) -> Iterator[str]:
    """Say how weights of Hugging Face are loaded."""
    if request.model is not None and isinstance(request.model.family, Llama | Moe | Gpt):
        yield (
            'Pretrained weights: convert them by Megatron Bridge, `AutoBridge.import_ckpt("ORGANISATION/MODEL", "DIR")`, then add '
            "`--load DIR --finetune` to the arguments of launch.sh."
        )


def _expert_remarks(request: ExportRequest) -> Iterator[str]:
    """Say where sequence parallelism is Megatron's wish and not the plan's."""
    family, shape = None if request.model is None else request.model.family, request.shape
    if not isinstance(family, Moe) or shape.strategy.tensor == 1 or shape.strategy.sequence_parallel:
        return
    what = "The plan is" if request.runtime is None else "The plan and its prediction are"
    yield f"{what} without sequence parallelism, which Megatron demands where tensor groups have experts."
    if family.sequence_length % shape.strategy.tensor:
        yield (
            f"Megatron cannot train this plan: {family.sequence_length} tokens cannot be divided among {shape.strategy.tensor} devices; "
            "choose a sequence length or a tensor degree with which they can."
        )


def _expert_arguments(family: Moe, dtype: Dtype | None) -> Arguments:
    yield f"--num-experts {family.experts}", "model"
    yield f"--moe-router-topk {family.experts_per_token}", "experts of each token"
    yield f"--moe-ffn-hidden-size {family.feed_forward_size}", "width of one expert"
    yield (
        "--moe-token-dispatcher-type alltoall",
        "tokens go to their experts; the default gathers all of them everywhere",
    )
    if dtype is Dtype.BFLOAT16:
        yield "--moe-grouped-gemm", "one product for all experts; Ampere or newer"
    weight, why = stated_or_assumed(family, "balance_loss_weight")
    yield "--moe-router-load-balancing-type aux_loss", "spreads tokens over the experts"
    yield f"--moe-aux-loss-coeff {weight:g}", why
    if family.expert_every > 1:
        numbers = [int(number % family.expert_every == 0) for number in range(1, family.layers + 1)]
        yield f"--moe-layer-freq {quote(str(numbers).replace(' ', ''))}", "blocks that have experts"


def _run_arguments(request: ExportRequest) -> Arguments:
    yield f"--optimizer {request.optimizer}", "assumed" if request.model is None else "optimizer of the model file"
    yield f"--clip-grad {MAX_GRADIENT_NORM:g}", "norm of all gradients, as in every export"
    yield "--lr 1e-4", "yours"
    yield '--train-iters "${TRAINWRIGHT_ITERATIONS:-100}"', "yours; a trial of the operator sets what it measures"
    yield "--log-interval 1", "so that every step's time is logged"
