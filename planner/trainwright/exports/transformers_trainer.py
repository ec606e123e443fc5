"""Export to Hugging Face's Trainer: its arguments, and Accelerate's FSDP configuration, which it reads.

Names: src/transformers/training_args.py of https://github.com/huggingface/transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from trainwright.exports.accelerate import FSDP, PRECISION
from trainwright.exports.capabilities import Capabilities
from trainwright.exports.hugging_face_classes import hugging_face_class
from trainwright.exports.launch import launch_script
from trainwright.exports.model_values import MAX_GRADIENT_NORM
from trainwright.exports.target import ExportFile, ExportRequest, explained
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.strategy import Sharding

FSDP_FILE: Final = "fsdp_config.json"
_OPTIMIZERS: Final = {"adam": "--optim adamw_torch", "sgd": "--optim sgd --optim_args momentum=0.9"}


class TransformersTrainer:
    """Trainer with DDP or FSDP2, for every script that parses TrainingArguments."""

    software = "transformers 5.23.0"
    preset: str | None = "accelerate"
    capabilities = Capabilities(pipelines=False, tensor=False, shardings=FSDP | {Sharding.NONE})
    remark = (
        "The script is yours: SCRIPT, one that parses TrainingArguments, as transformers' examples do; arguments of launch.sh follow those "
        "of the plan: `SCRIPT=… bash launch.sh --model_name_or_path … --dataset_name … --do_train`. Pretrained weights: "
        "--model_name_or_path; without them --config_name."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        before = f"arguments=(\n{explained(_arguments(request))})\n"
        remarks = [*request.remarks_with_vocabulary, *([] if request.model is None else [_example(request.model)])]
        program = '"${SCRIPT:-train.py}" "${arguments[@]}" "${own[@]}"'
        before += 'own=("$@")  # yours, which follow the plan\n'
        files = [ExportFile("launch.sh", launch_script(request.ranks, program, remarks, before=before))]
        if request.shape.strategy.sharding in FSDP:
            files.append(ExportFile(FSDP_FILE, json.dumps(_fsdp(request), indent=2) + "\n"))
        return tuple(files)


def _example(model: Model) -> str:
    """Say which example script trains a model, and with which arguments for the sizes of a row."""
    of_model = hugging_face_class(model.family)
    if of_model is None:
        return f"No example script of transformers trains {model.family.family}: SCRIPT is yours."
    return of_model.example


def _arguments(request: ExportRequest) -> Iterator[tuple[str, str]]:
    shape = request.shape
    yield f"--per_device_train_batch_size {shape.rows}", "rows of a micro-batch on one replica"
    yield f"--gradient_accumulation_steps {shape.micro_batches}", "micro-batches of an iteration"
    if request.dtype is None:
        yield "# add --bf16 or --fp16", "the model was not given (--model)"
    elif request.dtype is not Dtype.FLOAT32:
        yield f"--{PRECISION[request.dtype]}", request.dtype_reason
    if shape.strategy.sharding in FSDP:
        yield f"--fsdp --fsdp_config {FSDP_FILE}", f"{shape.strategy.sharding} over all replicas, by FSDP2"
    elif shape.recomputed_blocks:
        yield "--activation_checkpointing", "recompute of all blocks"
    yield _OPTIMIZERS[request.optimizer], "assumed" if request.model is None else "optimizer of the model file"
    yield f"--max_grad_norm {MAX_GRADIENT_NORM:g}", "norm of all gradients, as in every export"
    yield "--learning_rate 1e-4", "yours"
    yield '--max_steps "${TRAINWRIGHT_ITERATIONS:-100}"', "yours; a trial of the operator sets what it measures"
    yield "--logging_steps 1", "so that every step is logged"
    yield '--output_dir "${OUTPUT:-output}"', "yours"


def _fsdp(request: ExportRequest) -> dict[str, object]:
    """Return Accelerate's FSDP options by the names of TrainingArguments."""
    shape = request.shape
    return {
        "version": 2,
        "reshard_after_forward": shape.strategy.sharding is Sharding.ZERO3,
        "activation_checkpointing": shape.recomputed_blocks > 0,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
    }
