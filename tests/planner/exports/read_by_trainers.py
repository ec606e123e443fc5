"""Readers of exports, each run in the environment of its trainer: `python read_by_trainers.py TRAINER < CASES`.

A case is a rank of an export: the folder with its files, the arguments of its torchrun, its number and that of all ranks. A reader
returns what the trainer's own classes, made from the export, say of the rank. They are made on a CPU in a process group whose
other ranks do not exist, torch's `fake` backend.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

Facts = dict[str, Any]
"""Facts by name: the fields of a UniformShape, of the rank's own stage where they differ; `sharding` is ZeRO's stage."""


def megatron(case: dict[str, Any]) -> Facts:
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Transformer Engine, which needs a GPU, has the normalisations for sequence parallelism; torch's compute the same.
    torch_norm.WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps=1e-5, **_other: (
        torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    )(hidden_size, eps)
    moe_utils.te_general_gemm = None
    torch.cuda.current_device, torch.Tensor.cuda = lambda: "cpu", lambda tensor: tensor
    given = _arguments(case["arguments"])
    tensor = int(given["tensor_model_parallel_size"])
    parallel_state.initialize_model_parallel(
        tensor, int(given["pipeline_model_parallel_size"]), create_gloo_process_groups=False
    )
    stated = TransformerConfig(**_megatron_fields(given))
    # The stated dispatcher makes CUDA streams; the default one has the same model and needs none.
    config = replace(stated, moe_token_dispatcher_type="allgather")
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=NullTokenizer(given["vocab_size"]).vocab_size,
        max_sequence_length=int(given["max_position_embeddings"]),
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in given,
        position_embedding_type=given["position_embedding_type"],
        rotary_base=int(given.get("rotary_base", 10000)),
        rope_scaling="use_rope_scaling" in given,
        rope_scaling_factor=float(given.get("rope_scaling_factor", 8.0)),
    )
    rows, replicas = int(given["micro_batch_size"]), parallel_state.get_data_parallel_world_size()
    sequence = int(given["seq_length"]) // (tensor if config.sequence_parallel else 1)
    for layer in model.modules():
        if isinstance(layer, MoELayer):  # its forward has conditions of its own
            layer(torch.zeros(sequence, rows, config.hidden_size, dtype=config.params_dtype))
    batch = ConstantNumMicroBatchesCalculator(int(given["global_batch_size"]), rows, replicas, False, rank=1)
    gradients = DistributedDataParallelConfig(
        overlap_grad_reduce="overlap_grad_reduce" in given,
        use_distributed_optimizer="use_distributed_optimizer" in given,
        use_megatron_fsdp="use_megatron_fsdp" in given,
        data_parallel_sharding_strategy=given.get("data_parallel_sharding_strategy", "no_shard"),
    )
    stage = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    blocks = len(model.decoder.layers)
    values: Facts = {}
    if given["position_embedding_type"] == "rope":
        values = {"slow_frequency": float(model.rotary_pos_emb.inv_freq[-1]), "norm_epsilon": config.layernorm_epsilon}
    if config.num_moe_experts:
        values |= {
            "balance_loss_weight": config.moe_aux_loss_coeff,
            "dispatcher": stated.moe_token_dispatcher_type,
            "grouped": "moe_grouped_gemm" in given,
        }
    recomputed = {None: 0, "uniform": blocks, "block": min(config.recompute_num_layers or 0, blocks)}
    return {
        "stages": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "data": replicas,
        "rows": batch.get_micro_batch_size(),
        "micro_batches": batch.get(),
        "global_batch_size": batch.get_current_global_batch_size(),
        "sharding": stage[gradients.data_parallel_sharding_strategy] or int(gradients.use_distributed_optimizer),
        "recomputed_blocks": recomputed[config.recompute_method],
        "blocks": blocks,
        "sequence_parallel": config.sequence_parallel,
        "clip_norm": OptimizerConfig(clip_grad=float(given["clip_grad"])).clip_grad,
        **values,
        "dtype": str(config.params_dtype).removeprefix("torch."),
        "parameters": sum(
            one.numel() * (tensor if getattr(one, "tensor_model_parallel", False) else 1)
            for one in model.parameters()
            if is_first or not getattr(one, "shared_embedding", False)
        ),
    }


def _arguments(words: list[str]) -> dict[str, str]:
    """Return the arguments as Megatron's parser names them; a flag has no value."""
    pairs = pairwise([*words, "--"])
    return {
        name.removeprefix("--").replace("-", "_"): "" if value.startswith("--") else value
        for name, value in pairs
        if name.startswith("--")
    }


def _megatron_fields(given: dict[str, str]) -> dict[str, Any]:
    """Return the fields of TransformerConfig, as `core_transformer_config_from_args` makes them."""
    import torch

    named = {
        name: int(given[name])
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
                     "tensor_model_parallel_size", "pipeline_model_parallel_size", "recompute_num_layers",
                     "moe_router_topk", "moe_ffn_hidden_size")
        if name in given
    }  # fmt: skip
    names = (
        "moe_token_dispatcher_type",
        "moe_router_load_balancing_type",
        "normalization",
        "recompute_granularity",
        "recompute_method",
        "pipeline_model_parallel_layout",
    )
    gated = "swiglu" in given
    dtype = torch.bfloat16 if "bf16" in given else torch.float16 if "fp16" in given else torch.float32
    return {
        **named,
        **{name: given[name] for name in names if name in given},
        **({"num_moe_experts": int(given["num_experts"])} if "num_experts" in given else {}),
        **({"moe_layer_freq": json.loads(given["moe_layer_freq"])} if "moe_layer_freq" in given else {}),
        **({"layernorm_epsilon": float(given["norm_epsilon"])} if "norm_epsilon" in given else {}),
        **({"moe_aux_loss_coeff": float(given["moe_aux_loss_coeff"])} if "moe_aux_loss_coeff" in given else {}),
        "sequence_parallel": "sequence_parallel" in given,
        "hidden_dropout": float(given["hidden_dropout"]),
        "attention_dropout": float(given["attention_dropout"]),
        "add_bias_linear": "disable_bias_linear" not in given,
        "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        "bf16": "bf16" in given,
        "fp16": "fp16" in given,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }


def torchtitan(case: dict[str, Any]) -> Facts:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components import metrics
    from torchtitan.models.common.rope import RoPE

    # Its monitor asks CUDA for memory. The tokenizer and the data are the user's.
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="CPU",
        reset_peak_stats=lambda: None,
        get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0),
    )
    os.environ["HF_ASSETS"] = case["folder"]
    config = _module(Path(case["folder"]) / "trainwright_recipe.py").trainwright()
    config.comm.mode = "fake_backend"
    config.tokenizer, config.dataloader = mock.Mock(), mock.Mock()
    trainer = config.build()
    dims, rows = trainer.parallel_dims, config.dataloader.build.call_args.kwargs
    (part,) = trainer.model_parts
    micro_batches = trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches
    states = [one._get_fsdp_state() for one in part.modules() if isinstance(one, FSDPModule)]
    values: Facts = {}
    if (rope := next((one for one in part.modules() if isinstance(one, RoPE)), None)) is not None:
        values["slow_frequency"] = float(torch.angle(rope.cache[1, -1]))
    (values["norm_epsilon"],) = {one.eps for one in part.modules() if isinstance(one, torch.nn.RMSNorm)} or {None}
    gathers_again = any(one._fsdp_param_group and one._fsdp_param_group.post_forward_mesh_info for one in states)
    return {
        "stages": dims.pp,
        "tensor": dims.tp,
        "data": rows["dp_world_size"],
        "rows": rows["local_batch_size"],
        "micro_batches": micro_batches,
        "global_batch_size": rows["local_batch_size"] * rows["dp_world_size"] * micro_batches,
        "sharding": 0 if dims.dp_shard == 1 else 1 if dims.pp > 1 else 3 if gathers_again else 2,
        "recomputed_blocks": sum(isinstance(one, CheckpointWrapper) for one in part.modules()),
        "blocks": len(part.layers),
        "sequence_parallel": dims.tp > 1 and config.parallelism.enable_sequence_parallel,
        "dtype": config.training.mixed_precision_param,
        "clip_norm": config.training.max_norm,
        **{name: value for name, value in values.items() if value is not None},
        "schedule": type(trainer.pp_schedule).__name__.removeprefix("Schedule").lower() if dims.pp > 1 else "1f1b",
        "parameters": sum(one.numel() for one in part.parameters()),
    }


def accelerate(case: dict[str, Any]) -> Facts:
    from accelerate.state import DistributedType, PartialState
    from torch.utils.data import DataLoader

    # A CPU has neither FSDP2 nor a ParallelismConfig there, so it is taken for a GPU.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("fake", DistributedType.MULTI_GPU)
    module = _module(Path(case["folder"]) / "trainwright_parallelism.py")
    accelerator = module.accelerator()
    found, plugin = accelerator.parallelism_config, accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    rows = 1000 * case["ranks"]
    batches = accelerator.prepare_data_loader(DataLoader(range(rows * module.ROWS), batch_size=module.ROWS))
    replicas = rows // len(batches)
    micro_batches = accelerator.gradient_accumulation_steps
    told = {
        "tensor": found.tp_size,
        "data": found.data_parallel_size,
        "rows": len(next(iter(batches))),
        "micro_batches": micro_batches,
        "global_batch_size": module.ROWS * replicas * micro_batches,
        "sharding": 0 if plugin is None else 3 if plugin.reshard_after_forward else 2,
        "clip_norm": module.MAX_NORM,
        "dtype": {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[accelerator.mixed_precision],
    }
    if plugin is not None:
        told["recomputes"] = plugin.activation_checkpointing
    return told


def transformers(case: dict[str, Any]) -> Facts:
    import dataclasses

    from accelerate.state import DistributedType, PartialState
    from transformers import HfArgumentParser, TrainingArguments

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("fake", DistributedType.MULTI_GPU)
    words = case["arguments"][case["arguments"].index("train.py") + 1 :]
    os.chdir(case["folder"])
    with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True, create=True):
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    fsdp = arguments.fsdp_config if arguments.fsdp else None
    dtypes = {"bfloat16": arguments.bf16, "float16": arguments.fp16}
    rows, micro_batches = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    plugin = None if arguments.fsdp_plugin_args is None else dict(arguments.fsdp_plugin_args)
    assert (fsdp is None) == (plugin is None), dataclasses.asdict(arguments)
    return {
        "tensor": 1,
        "data": case["ranks"],
        "rows": rows,
        "micro_batches": micro_batches,
        "global_batch_size": rows * micro_batches * case["ranks"],
        "sharding": 0 if plugin is None else 3 if plugin["reshard_after_forward"] else 2,
        "recomputes": arguments.activation_checkpointing if plugin is None else plugin["activation_checkpointing"],
        "dtype": next((name for name, is_chosen in dtypes.items() if is_chosen), "float32"),
        "clip_norm": arguments.max_grad_norm,
    }


def deepspeed(case: dict[str, Any]) -> Facts:
    import deepspeed.comm
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import groups

    deepspeed.comm.init_distributed("fake", auto_mpi_discovery=False)
    folder = Path(case["folder"])
    given = json.loads((folder / "ds_config.json").read_text())
    if (folder / "trainwright_pipeline.py").exists():
        block = type("Block", (torch.nn.Linear,), {})
        kinds = [torch.nn.Linear, *[block] * (case["layers"] - 2), torch.nn.Linear]
        layers = [kind(1, 1) for kind in kinds]
        pipeline = _module(folder / "trainwright_pipeline.py").pipeline(layers, loss_fn=None)
        pipeline._precompute_checkpointable_values()  # as its engine does
        grid = pipeline.mpu()
        config = DeepSpeedConfig(given, grid)
        tensor, data = grid.get_slice_parallel_world_size(), grid.get_data_parallel_world_size()
        is_first, is_last = grid.get_stage_id() == 0, grid.get_stage_id() == pipeline.num_stages - 1
        told = {
            "stages": pipeline.num_stages,
            "blocks": len(pipeline.forward_funcs) - is_first - is_last,
            "recomputed_blocks": sum(pipeline.is_checkpointable_results),
        }
    else:
        config = DeepSpeedConfig(given)
        tensor = max(config.tensor_parallel_config.autotp_size, 1)
        groups._init_tp_mesh_device(tensor)
        tensor, data = groups.get_tensor_model_parallel_world_size(), groups.get_data_parallel_world_size()
        told = {"stages": 1}
    dtypes = {"float16": config.float16_config.enabled, "bfloat16": config.bfloat16_config.enabled}
    return told | {
        "tensor": tensor,
        "data": data,
        "rows": config.train_micro_batch_size_per_gpu,
        "micro_batches": config.gradient_accumulation_steps,
        "global_batch_size": config.train_batch_size // tensor,  # it counts every rank as a replica
        "sharding": int(config.zero_config.stage),
        "clip_norm": config.gradient_clipping,
        "dtype": next((name for name, is_chosen in dtypes.items() if is_chosen), "float32"),
    }


def _import(trainer: str) -> None:
    """Import what every rank would spend seconds on."""
    if trainer == "torchtitan":
        import torch
        from torchtitan.tools import utils

        utils.device_type, utils.device_module = "cpu", torch.cpu  # before other modules of torchtitan read them
    for module in MODULES[trainer]:
        importlib.import_module(module)


def _module(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _read(case: dict[str, Any]) -> Facts:
    """Read a case as its rank, in a process of its own."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    number, count = case["rank"], case["ranks"]
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(count), "NGPU": str(count), "LOCAL_RANK": "0"}
    if case["trainer"] != "torchtitan":  # which does it itself
        dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=count)
    return READERS[case["trainer"]](case)


MODULES = {
    "megatron": ("megatron.core.models.gpt.gpt_model",),
    "torchtitan": ("torchtitan.trainer", "torchtitan.models.llama3"),
    "accelerate": ("accelerate",),
    "transformers": ("accelerate", "transformers"),
    "deepspeed": ("deepspeed",),
}
READERS = {one.__name__: one for one in (megatron, torchtitan, accelerate, transformers, deepspeed)}


if __name__ == "__main__":
    trainer = sys.argv[1]
    _import(trainer)
    cases = [case | {"trainer": trainer} for case in json.load(sys.stdin)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        print("FOUND", json.dumps(processes.map(_read, cases, chunksize=1)))  # noqa: T201
