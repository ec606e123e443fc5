"""Export to DeepSpeed: its JSON, and the pipeline's arguments, which JSON cannot hold.

Names: https://www.deepspeed.ai/docs/config-json and deepspeed/runtime/pipe/module.py of https://github.com/deepspeedai/DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.launch import launch_script
from trainwright.exports.model_values import MAX_GRADIENT_NORM
from trainwright.exports.target import ExportFile, ExportRequest, comment, counted, explained
from trainwright.exports.uniform_shape import UniformShape
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.strategy import Sharding
from trainwright.training import Optimizer

STAGES = {sharding: number for number, sharding in enumerate(Sharding)}
"""ZeRO's stages."""
FORMATS = {Dtype.FLOAT16: "fp16", Dtype.BFLOAT16: "bf16"}
"""Sections of number formats other than float32, which is the default."""
OPTIMIZERS: Final[Mapping[Optimizer, Mapping[str, Any]]] = {
    "adam": {"type": "Adam", "params": {"lr": 1e-4}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}},
}
"""Optimizers with the moments that are priced."""
_PIPELINED = frozenset({Sharding.NONE, Sharding.ZERO1})


class DeepSpeed:
    """DeepSpeed. Its pipeline engine refuses ZeRO-2 and 3, splits layers evenly, and has no tensor degree of its own.

    In bfloat16 without ZeRO it uses BF16_Optimizer, whose replicas share float32 weights and moments, as ZeRO-1's do, and which
    holds gradients twice (`_do_optimizer_sanity_check` in deepspeed/runtime/engine.py, deepspeed/runtime/bf16_optimizer.py).
    """

    software = "DeepSpeed 0.19.8"
    preset: str | None = "deepspeed"
    capabilities = Capabilities(
        uneven_stages=False,
        pipelined_tensor=False,
        pipelined_shardings=_PIPELINED,
        tensor_shardings=frozenset(Sharding) - {Sharding.ZERO3},
        replicated_stages=frozenset(Dtype) - {Dtype.BFLOAT16},
        unstaged_families=frozenset({"custom"}),
    )
    remark = (
        "The script is yours: give ds_config.json to deepspeed.initialize(config=…). Pretrained weights: from_pretrained() before that; "
        "with ZeRO stage 3 make transformers.integrations.HfDeepSpeedConfig(config) first, so that they are loaded in shards."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        shape = request.shape
        files = [
            ExportFile(
                "launch.sh",
                launch_script(
                    request.ranks, '"${SCRIPT:-train.py}"', (*request.remarks_with_vocabulary, *_reasons(request))
                ),
            ),
            ExportFile("ds_config.json", json.dumps(config(shape, request.dtype, request.optimizer), indent=2) + "\n"),
        ]
        if len(shape.ends) > 1:
            files.append(ExportFile("trainwright_pipeline.py", _pipeline(shape, request.model)))
        return tuple(files)


def config(shape: UniformShape, dtype: Dtype | None, optimizer: Optimizer) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    With tensor groups the global batch is left to DeepSpeed, which counts every rank as a replica in it.
    """
    recomputes_stages = len(shape.ends) > 1 and shape.recomputed_blocks > 0
    is_untested = optimizer == "sgd" and shape.strategy.sharding is not Sharding.NONE
    return {
        **({"train_batch_size": shape.global_batch_size} if shape.strategy.tensor == 1 else {}),
        "train_micro_batch_size_per_gpu": shape.rows,
        "gradient_accumulation_steps": shape.micro_batches,
        "gradient_clipping": MAX_GRADIENT_NORM,
        "zero_optimization": {"stage": STAGES[shape.strategy.sharding]},
        **({"tensor_parallel": {"autotp_size": shape.strategy.tensor}} if shape.strategy.tensor > 1 else {}),
        **({FORMATS[dtype]: {"enabled": True}} if dtype in FORMATS else {}),
        **({"pipeline": {"use_reentrant": False}} if recomputes_stages else {}),
        **({"zero_allow_untested_optimizer": True} if is_untested else {}),
        "optimizer": OPTIMIZERS[optimizer],
    }


def _reasons(request: ExportRequest) -> list[str]:
    """Explain ds_config.json, since JSON has no comments."""
    shape = request.shape
    sentences = [
        (
            f"ds_config.json: {counted(shape.rows, 'row')} of a micro-batch on each replica ({shape.strategy.data} in all), {counted(shape.micro_batches, 'micro-batch', 'es')} "
            f"(gradient_accumulation_steps); ZeRO stage {STAGES[shape.strategy.sharding]}; gradients are clipped to a norm of {MAX_GRADIENT_NORM:g}, as in every export; the learning rate is yours."
        ),
        f"optimizer: {'assumed, since the model was not given (--model)' if request.model is None else 'that of the model file'}.",
        _format_reason(request),
    ]
    if shape.strategy.tensor > 1:
        sentences.append(f"tensor_parallel.autotp_size {shape.strategy.tensor}: devices that share each layer.")
    if shape.recomputed_blocks and len(shape.ends) > 1:
        sentences.append(
            "pipeline.use_reentrant: reentrant checkpoints, the default, fail in the first stage, whose input has no gradient."
        )
    elif shape.recomputed_blocks:
        sentences.append(
            "All blocks are recomputed: call model.gradient_checkpointing_enable(), or wrap them in checkpoint()."
        )
    return sentences


def _format_reason(request: ExportRequest) -> str:
    if request.dtype is None:
        return "No fp16 or bf16: neither the plan nor a model (--model) states the number format, so it is yours."
    if request.dtype is Dtype.FLOAT32:
        return f"No fp16 or bf16, which is float32: {request.dtype_reason}."
    return f"{FORMATS[request.dtype]}: {request.dtype_reason}."


def _pipeline(shape: UniformShape, model: Model | None) -> str:
    interval = int(shape.recomputed_blocks > 0)
    lines = [
        (
            f"topology=PipeDataParallelTopology(num_pp={len(shape.ends)}, num_dp={shape.strategy.data}),",
            "stages outermost",
        ),
        ('partition_method="uniform",', "stages of equal numbers of layers: embedding and head count as one each"),
        (
            f"activation_checkpoint_interval={interval},",
            "layer by layer" if interval else "nothing is recomputed",
        ),
    ]
    if interval:
        lines.append(
            ('checkpointable_layers=["Block"],', "write the class of your block: layers of others are not recomputed")
        )
    notes = [
        "Pipeline of the plan for DeepSpeed; give it one entry for the embedding, for every block and for the head."
    ]
    if model is not None and model.owners:
        names = ", ".join(model.layers[layer] for layer in model.owners)
        notes.append(
            f"Layers that share a weight ({names}): make each a TiedLayerSpec of one key, or each trains its own."
        )
    head = comment(notes)
    return f'''{head}from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology


def pipeline(layers, loss_fn):
    """Return {shape.layers} layers as {len(shape.ends)} stages."""
    return PipelineModule(
        layers=layers,
        loss_fn=loss_fn,
{explained(lines, " " * 8)}    )
'''
