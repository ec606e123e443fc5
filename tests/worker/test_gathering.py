"""Values of all ranks, exchanged as JSON."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from trainwright.worker_api import RankMemory
from trainwright_worker.gang.gathering import gather

OWN = (RankMemory("node-a", 0, 2**40), None, RankMemory("node-with-a-longer-name", 7, 1))


def ask(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(OWN))
    device = torch.device("cpu")
    assert gather(OWN[rank], RankMemory | None, device) == list(OWN)
    assert gather("x" * rank, str, device) == ["", "x", "xx"]
    pair = dist.new_group([0, 2])
    if rank != 1:
        assert gather((rank, 0.1), tuple[int, float], device, pair) == [(0, 0.1), (2, 0.1)]
    harmful = pickle.dumps(OWN).decode("latin1")
    with pytest.raises(ValueError, match="1 validation error for"):
        gather(harmful if rank == 1 else OWN[0], str if rank == 1 else RankMemory, device)
    Path(folder, str(rank)).touch()
    dist.destroy_process_group()


@pytest.mark.torch_processes
def test_ranks_gather_values_of_unequal_size_and_refuse_what_is_none(tmp_path: Path) -> None:
    spawn(ask, (str(tmp_path / "store"), str(tmp_path)), nprocs=len(OWN))
    assert all((tmp_path / str(rank)).exists() for rank in range(len(OWN)))
