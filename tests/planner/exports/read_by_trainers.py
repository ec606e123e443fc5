"""Readers of exports, each run in the environment of its trainer: `python read_by_trainers.py TRAINER < CASES`.

A case has the folder of an export, what the export says of it, and the arguments of its first torchrun. Every reader prints the
facts that the trainer's own classes found.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any


def megatron(case: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = case["arguments"]
    valued = {name: value for name, value in pairwise(given) if name.startswith("--")}
    stages = int(valued["--pipeline-model-parallel-size"])
    config = TransformerConfig(
        num_layers=int(valued["--num-layers"]),
        hidden_size=int(valued["--hidden-size"]),
        num_attention_heads=int(valued["--num-attention-heads"]),
        num_query_groups=int(valued.get("--num-query-groups", valued["--num-attention-heads"])),
        tensor_model_parallel_size=int(valued["--tensor-model-parallel-size"]),
        sequence_parallel="--sequence-parallel" in given,
        pipeline_model_parallel_size=stages,
        pipeline_dtype="bfloat16" if stages > 1 else None,
        pipeline_model_parallel_layout=valued.get("--pipeline-model-parallel-layout", "").strip("'") or None,
        recompute_granularity=valued.get("--recompute-granularity"),
        recompute_method=valued.get("--recompute-method"),
        recompute_num_layers=int(valued["--recompute-num-layers"]) if "--recompute-num-layers" in valued else None,
    )
    DistributedDataParallelConfig(
        overlap_grad_reduce="--overlap-grad-reduce" in given,
        use_distributed_optimizer="--use-distributed-optimizer" in given,
        use_megatron_fsdp="--use-megatron-fsdp" in given,
        data_parallel_sharding_strategy=valued.get("--data-parallel-sharding-strategy", "no_shard"),
    )
    layout = config.pipeline_model_parallel_layout
    blocks = [len([one for one in row[0] if one is LayerType.decoder]) for row in layout.layout] if layout else None
    return {"blocks": blocks or [config.num_layers]}


def torchtitan(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = _module(Path(case["folder"]) / "trainwright_recipe.py").trainwright()
    dims = ParallelDims.from_config(config.parallelism, case["ranks"])
    with torch.device("meta"):
        model = config.model_spec.model.build()
    for names in config.parallelism.module_fqns_per_model_part or []:
        for name in names:
            model.get_submodule(name)
    replicas = dims.dp_replicate * dims.dp_shard
    assert config.training.global_batch_size % (config.training.local_batch_size * replicas) == 0
    parts = config.parallelism.module_fqns_per_model_part
    blocks = [sum(name.startswith("layers.") for name in part) for part in parts] if parts else [len(model.layers)]
    return {"blocks": blocks, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def accelerate(case: dict[str, Any]) -> dict[str, Any]:
    module = _module(Path(case["folder"]) / "trainwright_parallelism.py")
    found = module.parallelism()
    assert found.total_size == module.RANKS == case["ranks"]
    return {"blocks": [case["blocks"][0]]}


def deepspeed(case: dict[str, Any]) -> dict[str, Any]:
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
    from deepspeed.runtime.utils import partition_uniform

    class Replicas:
        def get_data_parallel_world_size(self) -> int:
            return case["replicas"]

    if not deepspeed.comm.is_initialized():
        store = f"file://{case['folder']}/rendezvous"
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, init_method=store, rank=0, world_size=1)
    found = DeepSpeedConfig(json.loads((Path(case["folder"]) / "ds_config.json").read_text()), mpu=Replicas())
    assert found.train_batch_size == case["batch"]
    stages = len(case["blocks"])
    PipeDataParallelTopology(num_pp=stages, num_dp=case["replicas"])
    parts = [int(part) for part in partition_uniform(case["layers"], stages)]
    sizes = [stop - start for start, stop in pairwise(parts)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return {"blocks": sizes, "stage": int(found.zero_config.stage)}


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    reader = {one.__name__: one for one in (megatron, torchtitan, accelerate, deepspeed)}[sys.argv[1]]
    print("FOUND", json.dumps([reader(case) for case in json.load(sys.stdin)]))  # noqa: T201
