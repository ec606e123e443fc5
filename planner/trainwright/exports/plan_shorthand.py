"""Shorthand of a uniform plan, `pp2 dp2 tp2 mb1 zero1 recompute`, as people say what they run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from trainwright.cluster import Device
from trainwright.exports.plan_words import DTYPES, WORDS, PlanWords, is_shorthand, misunderstood, words_of
from trainwright.exports.target import counted
from trainwright.exports.uniform_shape import UniformShape
from trainwright.plan import Plan, Schedule, indivisible, split_rows
from trainwright.strategy import Sharding, Strategy

__all__ = ["WORDS", "is_shorthand", "plan_of_shorthand"]


def plan_of_shorthand(
    text: str, devices: Sequence[Device], layers: int, batch: int, max_tensor_degree: int | None = None
) -> Plan:
    """Return the plan on the first devices in their order. Raises ValueError with one sentence.

    `mb` is the rows of a micro-batch on one replica (Megatron's micro-batch size), by default 1. Without `dp`, there are as many
    replicas as the devices hold; without `pp`, as many stages as the list of layers has. Case does not matter. Without layers,
    stages share the blocks evenly, and the first and the last one have the embedding and the head as well.
    `max_tensor_degree`: multiple of every tensor degree of the model; None if it is not known.
    """
    try:
        return _shape(words_of(text), devices, layers, batch, max_tensor_degree).plan()
    except ValueError as error:
        raise ValueError(f"plan {text!r}: {error}") from None


def _shape(
    said: PlanWords, devices: Sequence[Device], layers: int, batch: int, max_tensor_degree: int | None
) -> UniformShape:
    tensor, rows = (said.numbers.get(name, 1) for name in ("tp", "mb"))
    if max_tensor_degree is not None and max_tensor_degree % tensor:
        raise indivisible(f"tp{tensor}", max_tensor_degree)
    if said.recomputed not in (None, f"{layers - 2}/{layers}", f"{layers}/{layers}"):
        raise misunderstood(said.recomputed)
    sharding, keeps = Sharding(said.flags.get("sharding", Sharding.NONE)), "gathered weights" in said.flags
    if keeps and sharding is not Sharding.ZERO3:
        raise ValueError("'kept' is said of the weights that zero3 gathers; give zero3, or leave it out")
    stages = said.numbers.get("pp", len(said.layers or [layers]))
    ends = _ends(said.layers, stages, layers)
    data = said.numbers.get("dp") or len(devices) // (stages * tensor)
    needed = stages * tensor * data
    if not 1 <= needed <= len(devices):
        raise ValueError(f"needs {max(needed, stages * tensor)} devices, the cluster has {len(devices)}")
    if batch % (data * rows):
        why = "" if "dp" in said.numbers else f" (all that the {len(devices)} devices hold; dp is not given)"
        raise ValueError(
            f"{counted(data, 'replica')}{why} × {counted(rows, 'row')} do not divide the global batch of {batch}; change dp or mb"
        )
    _check_micro_batches(said, data, rows, batch)
    return UniformShape(
        ends=ends,
        strategy=Strategy(tensor, data, sharding=sharding, keep_gathered_weights=keeps),
        rows=rows,
        micro_batches=batch // data // rows,
        recomputed_blocks=layers if "recompute" in said.flags else 0,
        schedule=Schedule.GPIPE if said.flags.get("schedule") == "gpipe" else Schedule.ONE_FORWARD_ONE_BACKWARD,
        devices=tuple(devices[:needed]),
        dtype=DTYPES.get(said.flags.get("number format", "")),
    )


def _check_micro_batches(said: PlanWords, data: int, rows: int, batch: int) -> None:
    """Raise ValueError for a number of micro-batches that does not make up the batch."""
    given, right = said.numbers.get("micro_batches"), batch // data // rows
    if given is not None and given != right:
        raise ValueError(
            f"mb{rows}×{given} on {counted(data, 'replica')} are {counted(given * rows * data, 'row')}, but the global batch is "
            f"{batch}; give mb{rows}×{right}, or leave ×{given} out"
        )


def _ends(sizes: Sequence[int] | None, stages: int, layers: int) -> tuple[int, ...]:
    """Return the end of each stage's layers. Raises ValueError if the stages do not hold all layers."""
    if sizes is None:
        if stages > max(layers - 2, 1):
            raise ValueError(f"{stages} stages for {layers - 2} blocks; give fewer stages")
        counts = [*split_rows(layers - 2, stages)]
        counts[0] += 1
        counts[-1] += 1
        return tuple(accumulate(counts))
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        given = " ".join(map(str, sizes))
        sums = f"{counted(stages, 'number')} of at least 1 that sum{'s' * (stages == 1)} to {layers}"
        raise ValueError(
            f"[{given}] are {sum(sizes)} layers in {counted(len(sizes), 'stage')}, but the model has {layers}, embedding "
            f"and head included, for pp{stages}; give {sums}"
        )
    return tuple(accumulate(sizes))
