"""Training script of a user: DDP, or FSDP2 where the plan shards, on the CPU; torchrun starts it by the export's launch.sh."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, SEQUENCE = 512, 64, 64


def build(sharding: str) -> nn.Module:
    """Return a small transformer, replicated or sharded over all ranks."""
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    if dist.get_world_size() == 1:
        return model
    if sharding == "none":
        return DistributedDataParallel(model)
    for part in (*blocks, model):
        fully_shard(part, reshard_after_forward=sharding == "zero3")
    return model


def synchronise(model: nn.Module, *, on: bool) -> None:
    """Reduce gradients in the next backward, or let them accumulate."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def main() -> None:
    """Train for TRAINWRIGHT_ITERATIONS and state each step's seconds, those of the slowest rank."""
    (pipeline,) = json.loads(Path("plan.json").read_text())["pipelines"]
    (stage,) = pipeline["stages"]
    run = stage["layers"][0]
    dist.init_process_group("gloo")
    assert dist.get_world_size() == len(stage["devices"]) == run["data"]
    assert stage["devices"][dist.get_rank()]["node"] == os.environ["NODE"]
    torch.manual_seed(0)
    model = build(run["sharding"])
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(int(os.environ["TRAINWRIGHT_ITERATIONS"])):
        started = time.perf_counter()
        for number in range(pipeline["micro_batches"]):
            synchronise(model, on=number == pipeline["micro_batches"] - 1)
            rows = torch.randint(VOCABULARY, (run["rows"][dist.get_rank()], SEQUENCE))
            nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            sys.stdout.write(json.dumps({"step": step, "step_seconds": seconds.item(), "peak_bytes": peak}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    # Not destroy_process_group: the interpreter would join gloo's threads, one of which may wait for the interpreter to free
    # the tensors of the last collective (seen with DDP and torch 2.10).
    os._exit(0)


if __name__ == "__main__":
    main()
