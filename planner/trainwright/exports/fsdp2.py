"""Export to a script of torch alone, which trains a model of Hugging Face or of one's own by FSDP2 or DDP."""

from __future__ import annotations

from typing import Final

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.hugging_face_classes import CAUSAL, HuggingFaceClass, hugging_face_class
from trainwright.exports.launch import launch_script
from trainwright.exports.model_values import MAX_GRADIENT_NORM
from trainwright.exports.target import ExportFile, ExportRequest, comment, explained
from trainwright.layer import Dtype
from trainwright.strategy import Sharding
from trainwright.training import Optimizer

SCRIPT: Final = "train_fsdp2.py"
_NEEDED: Final = (
    ': "${MODEL:?must be a folder or a name of Hugging Face, or MODULE:FUNCTION of yours}"\n'
    "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}\n"
)
_RECOMPUTE: Final = (
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing"
)
_OPTIMIZERS: Final[dict[Optimizer, str]] = {
    "adam": "torch.optim.AdamW(model.parameters(), lr=1e-4)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)",
}


class Fsdp2:
    """torch's FSDP2 (`fully_shard`), or DDP where replicas shard nothing. Number formats that need a scaled loss are left out."""

    software = "torch ≥ 2.8 (FSDP2)"
    preset: str | None = "accelerate"
    capabilities = Capabilities(
        pipelines=False,
        tensor=False,
        shardings=frozenset({Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3}),
        dtypes=frozenset({Dtype.BFLOAT16, Dtype.FLOAT32}),
        missing_families=frozenset({"trans_gan", "wide_resnet"}),
    )
    remark = (
        f"{SCRIPT} trains on random inputs: replace batches() by your data. MODEL names the model. Pretrained weights: with PRETRAINED=1 rank 0 "
        "reads them, and the others get them from there."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        return (
            ExportFile(
                "launch.sh", launch_script(request.ranks, SCRIPT, request.remarks_with_vocabulary, before=_NEEDED)
            ),
            ExportFile(SCRIPT, _script(request)),
        )


def _script(request: ExportRequest) -> str:
    shape, is_sharded = request.shape, request.shape.strategy.sharding is not Sharding.NONE
    imports = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    if is_sharded:
        imports = (
            "from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict\n"
            "from torch.distributed.device_mesh import init_device_mesh\n" + imports
        )
    else:
        imports = "from torch.nn.parallel import DistributedDataParallel"
    if shape.recomputed_blocks:
        imports = f"{_RECOMPUTE}\n{imports}"
    of_model = _class_of(request)
    return f'''{comment([f"Training by the plan, for {Fsdp2.software}; launch.sh starts it."])}import contextlib
import importlib
import os
import time

import torch
import torch.distributed as dist
{imports}

{_constants(request)}
rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")


def make_model():
    """Return the model and its blocks. A model of yours takes a batch of batches(), and returns a dict with the loss."""
    name = os.environ["MODEL"]
    if ":" in name:
        module, function = name.split(":")
        return getattr(importlib.import_module(module), function)()
    from transformers import AutoConfig, {of_model.name}

    config = AutoConfig.from_pretrained(name, use_cache=False)
    if os.environ.get("PRETRAINED") and rank == 0:
        model = {of_model.name}.from_pretrained(name, config=config, dtype=torch.float32)
    else:
        model = {of_model.name}.from_config(config, dtype=torch.float32)
    names = [name for name in model._no_split_modules if not name.endswith("Embeddings")]  # which the head may share
    return model, [part for part in model.modules() if type(part).__name__ in names]


def batches():
    """Yield micro-batches of this rank: random ones, in place of your data."""
    generator = torch.Generator().manual_seed(rank)
    integers = lambda end, *shape: torch.randint(end, shape, generator=generator).to(device)
    while True:
        {of_model.batch}


{_sharded(request) if is_sharded else _replicated(request)}

def main():
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model, data = parallel_model(), batches()
    optimizer = {_OPTIMIZERS[request.optimizer]}  # yours
    for step in range(STEPS):
        start = time.perf_counter()
        for number in range(MICRO_BATCHES):
            with last(model, number == MICRO_BATCHES - 1):
                loss = model(**next(data))["loss"] / MICRO_BATCHES
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        if rank == 0:
            print(f"step {{step}}: {{seconds:.6f}} s, loss {{MICRO_BATCHES * float(loss):.4f}}, peak {{peak:.2f}} GiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def _class_of(request: ExportRequest) -> HuggingFaceClass:
    return (None if request.model is None else hugging_face_class(request.model.family)) or CAUSAL


def _constants(request: ExportRequest) -> str:
    shape, of_model = request.shape, _class_of(request)
    why = "yours" if of_model is CAUSAL else "model"
    return explained(
        [
            (f"ROWS = {shape.rows}", "of a micro-batch on one replica"),
            (f"MICRO_BATCHES = {shape.micro_batches}", "of an iteration"),
            *((f"{name} = {size}", why) for name, size in of_model.sizes),
            (f"MAX_NORM = {MAX_GRADIENT_NORM}", "to which gradients are clipped, as in every export"),
            ('STEPS = int(os.environ.get("TRAINWRIGHT_ITERATIONS", "100"))', "yours"),
        ],
        indent="",
    )


def _recompute(request: ExportRequest) -> str:
    if not request.shape.recomputed_blocks:
        return "    # nothing is recomputed\n"
    return (
        "    apply_activation_checkpointing(model, check_fn=lambda part: part in blocks)  # recompute of all blocks\n"
    )


def _sharded(request: ExportRequest) -> str:
    """Return the functions of a model whose replicas shard it."""
    dtype = request.dtype or Dtype.BFLOAT16
    policy = "MixedPrecisionPolicy()"
    if dtype is not Dtype.FLOAT32:
        policy = f"MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)"
    always = request.shape.strategy.sharding is Sharding.ZERO3
    why = "weights are gathered for each pass" if always else "weights stay whole until the backward"
    return f'''def parallel_model():
    """Return the model in shards, with the values of rank 0: the others hold no whole model."""
    with contextlib.nullcontext() if rank == 0 else torch.device("meta"):
        model, blocks = make_model()
    values = model.state_dict() if rank == 0 else {{}}
{_recompute(request)}    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = {policy}  # {request.dtype_reason}
    for part in (*blocks, model):  # {request.shape.strategy.sharding}: {why}
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward={always})
    if rank > 0:
        model.to_empty(device=device)
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return model


@contextlib.contextmanager
def last(model, is_last):
    """Reduce gradients in the last micro-batch alone; until then they are summed whole."""
    model.set_requires_gradient_sync(is_last)
    yield
'''


def _replicated(request: ExportRequest) -> str:
    """Return the functions of a model of which every replica holds all."""
    dtype = request.dtype or Dtype.BFLOAT16
    cast = "contextlib.nullcontext()"
    if dtype is not Dtype.FLOAT32:
        cast = f"torch.autocast(device.type, torch.{dtype})"
    return f'''def parallel_model():
    """Return the model, of which every replica holds all."""
    model, blocks = make_model()
{_recompute(request)}    return DistributedDataParallel(model.to(device))


@contextlib.contextmanager
def last(model, is_last):
    """Reduce gradients in the last micro-batch alone, and compute in the plan's number format."""
    with contextlib.nullcontext() if is_last else model.no_sync(), {cast}:
        yield
'''
