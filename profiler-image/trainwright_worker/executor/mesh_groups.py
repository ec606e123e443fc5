"""Ranks of meshes that communicate, within a pipeline and with other pipelines; without torch.

Stages with shardings of operators are equal in all pipelines, so that ranks at the same place of their meshes have the same
parts of weights.
"""

from __future__ import annotations

from itertools import chain, product

from trainwright_worker.executor.plan_ranks import MESH_DIMENSIONS, PlanRanks, Ranks


def mesh_lines(plan_ranks: PlanRanks, rank: int, dimensions: tuple[int, ...]) -> tuple[Ranks, ...]:
    """Return the ranks along mesh dimensions from a rank, ascending, and those at their places in each other pipeline."""
    own = plan_ranks.stage_of(rank)
    places = [own.mesh.members.index(member) for member in own.mesh.line(rank, dimensions)]
    meshes = (stage.mesh for stages in plan_ranks.pipelines for stage in stages if stage.first == own.first)
    return tuple(tuple(sorted(mesh.members[place] for place in places)) for mesh in meshes)


def joint_line(plan_ranks: PlanRanks, rank: int, dimensions: tuple[int, ...]) -> Ranks:
    """Return the ranks of all pipelines along mesh dimensions from a rank, ascending."""
    return tuple(sorted(chain.from_iterable(mesh_lines(plan_ranks, rank, dimensions))))


def mesh_peers(plan_ranks: PlanRanks, rank: int, dimensions: tuple[int, ...]) -> Ranks:
    """Return the ranks of all pipelines that have the same shard of what ranks along mesh dimensions share, ascending.

    Shards are in the order of ranks, which need not be that of places.
    """
    lines = mesh_lines(plan_ranks, rank, dimensions)
    shard = next(line.index(rank) for line in lines if rank in line)
    return tuple(sorted(line[shard] for line in lines))


def mesh_groups(plan_ranks: PlanRanks) -> tuple[Ranks, ...]:
    """Return the ranks of every group."""
    groups: dict[Ranks, None] = {}
    for stage in (stage for stages in plan_ranks.pipelines for stage in stages if stage.operators is not None):
        groups |= dict.fromkeys(tuple(sorted(line)) for line in stage.mesh.lines())
        if len(plan_ranks.pipelines) > 1:
            for rank, dimensions in product(stage.ranks, ((), *MESH_DIMENSIONS)):
                joint, peers = (of(plan_ranks, rank, dimensions) for of in (joint_line, mesh_peers))
                groups |= {joint: None, peers: None}
    return tuple(groups)
