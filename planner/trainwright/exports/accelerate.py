"""Export to Hugging Face Accelerate: its ParallelismConfig, as Python.

Names: src/accelerate/parallelism_config.py of https://github.com/huggingface/accelerate.
"""

from __future__ import annotations

from typing import Final

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.launch import launch_script
from trainwright.exports.model_values import MAX_GRADIENT_NORM
from trainwright.exports.target import ExportFile, ExportRequest, comment, counted, explained
from trainwright.layer import Dtype
from trainwright.strategy import Sharding

FSDP = frozenset({Sharding.ZERO2, Sharding.ZERO3})
_LOADED_DIVIDED: Final = 'from_pretrained(..., tp_plan="auto", device_mesh=accelerator.torch_device_mesh["tp"])'
_TENSOR_REMARK: Final = (
    f"tp_size is ignored unless the model is loaded divided: {_LOADED_DIVIDED}; check_tensor_degree(model) of "
    "trainwright_parallelism.py raises otherwise."
)
PRECISION = {Dtype.FLOAT32: "no", Dtype.FLOAT16: "fp16", Dtype.BFLOAT16: "bf16"}


class Accelerate:
    """Accelerate with DDP or FSDP2. It has no pipelines, and refuses DDP together with a tensor degree."""

    software = "Accelerate 1.15.0"
    preset: str | None = "accelerate"
    capabilities = Capabilities(
        pipelines=False,
        replicated_tensor=False,
        shardings=FSDP | {Sharding.NONE},
    )
    remark = (
        "The script is yours: it takes its Accelerator, the DataLoader's batch size and the norm of gradients from "
        "trainwright_parallelism.py. Pretrained weights: from_pretrained() before prepare()."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        program = '"${SCRIPT:-train.py}"'
        remarks = (*request.remarks_with_vocabulary, *([_TENSOR_REMARK] if request.shape.strategy.tensor > 1 else []))
        return (
            ExportFile("launch.sh", launch_script(request.ranks, program, remarks)),
            ExportFile("trainwright_parallelism.py", _module(request)),
        )


def _module(request: ExportRequest) -> str:
    shape = request.shape
    sharded = shape.strategy.sharding in FSDP
    sizes = [
        (
            f"dp_replicate_size={1 if sharded else shape.strategy.data},",
            "1: replicas shard" if sharded else "replicas, as DDP",
        ),
        (
            f"dp_shard_size={shape.strategy.data if sharded else 1},",
            f"FSDP2 over {counted(shape.strategy.data, 'replica')}" if sharded else "no FSDP",
        ),
        (f"tp_size={shape.strategy.tensor},", "devices that share each layer"),
    ]
    options = [
        ("parallelism_config=parallelism(),", "degrees, above"),
        (f"gradient_accumulation_steps={shape.micro_batches},", "micro-batches of an iteration"),
    ]
    if request.dtype is not None:
        options.append((f'mixed_precision="{PRECISION[request.dtype]}",', request.dtype_reason))
    plugin, recompute = "", "Nothing is recomputed."
    if sharded:
        always = shape.strategy.sharding is Sharding.ZERO3
        why = (
            "ZeRO-3: weights are gathered for each pass" if always else "ZeRO-2: weights stay whole until the backward"
        )
        arguments = [
            ("fsdp_version=2,", "ParallelismConfig takes no other"),
            (f"reshard_after_forward={always},", why),
            (f"activation_checkpointing={shape.recomputed_blocks > 0},", "recompute of all blocks, or none"),
            ('auto_wrap_policy="transformer_based_wrap",', "block by block"),
        ]
        if shape.strategy.tensor == 1:
            arguments.append(
                ("cpu_ram_efficient_loading=True,", "make it before from_pretrained(): rank 0 alone reads the weights")
            )
        plugin = f"    plugin = FullyShardedDataParallelPlugin(\n{explained(arguments, ' ' * 8)}    )\n"
        options.append(("fsdp_plugin=plugin,", "sharding, above"))
    elif shape.recomputed_blocks:
        recompute = "All blocks are recomputed: call model.gradient_checkpointing_enable()."
    docstring = "Return the Accelerator of a rank." if sharded else f"Return the Accelerator of a rank. {recompute}"
    imports = "from accelerate.utils import FullyShardedDataParallelPlugin\n" if sharded else ""
    check = ""
    if shape.strategy.tensor > 1:
        imports += "from torch.distributed.tensor import DTensor\n"
        check = _CHECK
    return f'''{comment(["Parallelism of the plan for Accelerate 1.15.0."])}from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
{imports}
MAX_NORM = {MAX_GRADIENT_NORM}  # clip as every export does: accelerator.clip_grad_norm_(model.parameters(), MAX_NORM) where sync_gradients
ROWS = {shape.rows}  # batch_size of the DataLoader: rows of a micro-batch on one replica
RANKS = {len(shape.devices)}


def parallelism():
    """Return how {counted(len(shape.devices), "rank")} train the model."""
    return ParallelismConfig(
{explained(sizes, " " * 8)}    )


def accelerator():
    """{docstring}"""
{plugin}    return Accelerator(
{explained(options, " " * 8)}    )
{check}'''


_CHECK: Final = f'''

def check_tensor_degree(model):
    """Raise ValueError for a model that is not divided among tp_size devices; call it before prepare(), which does not divide it."""
    if not any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError(
            'load the model with {_LOADED_DIVIDED}: '
            "otherwise tp_size has no effect"
        )
'''
