"""Shorthand of a uniform plan, `pp2 dp2 tp2 mb1 zero1 recompute`, as people say what they run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from trainwright.cluster import Device
from trainwright.exports.uniform_shape import UniformShape
from trainwright.plan import Plan, Schedule, Sharding, split_rows

WORDS: Final = "pp, dp, tp and mb with a number, zero1 to zero3, recompute, gpipe, and layers as in [4 3 5]"
_DEGREE: Final = re.compile(r"(pp|dp|tp|mb)([1-9][0-9]{0,5})")
_BEGIN: Final = re.compile(r"\s*(pp|dp|tp|mb)-?[0-9]")
_LAYERS: Final = re.compile(r"\[([0-9 ]+)\]")


def is_shorthand(text: str) -> bool:
    """Return whether a text begins like a degree, in any case, and is no name of a file; the degree may be wrong."""
    return _BEGIN.match(text.lower()) is not None and not {".", "/"} & set(text)


def plan_of_shorthand(text: str, devices: Sequence[Device], layers: int, batch: int) -> Plan:
    """Return the plan on the first devices in their order. Raises ValueError with one sentence.

    `mb` is the rows of a micro-batch on one replica (Megatron's micro-batch size), by default 1. Without `dp`, all devices are
    used. Case does not matter. Without layers, stages share the blocks evenly, and the first and the last one have the embedding and the head as well.
    """
    sizes = _LAYERS.search(text)
    found: dict[str, int] = {}
    flags: set[str] = set()
    for word in _LAYERS.sub(" ", text.lower()).split():
        degree = _DEGREE.fullmatch(word)
        if degree is not None and degree[1] not in found:
            found[degree[1]] = int(degree[2])
        elif word in {"recompute", "gpipe", "1f1b", *Sharding} and word not in flags:
            flags.add(word)
        else:
            raise ValueError(f"plan {text!r}: {word!r} is not understood or given twice; give {WORDS}")
    stages, tensor, rows = (found.get(name, 1) for name in ("pp", "tp", "mb"))
    data = found.get("dp", len(devices) // (stages * tensor))
    needed = stages * tensor * data
    if not 1 <= needed <= len(devices):
        raise ValueError(f"plan {text!r}: needs {max(needed, stages * tensor)} devices, the cluster has {len(devices)}")
    if batch % (data * rows):
        raise ValueError(
            f"plan {text!r}: {data} replicas × {rows} rows do not divide the global batch of {batch}; change dp or mb"
        )
    shape = UniformShape(
        ends=_ends(text, None if sizes is None else sizes[1], stages, layers),
        tensor=tensor,
        data=data,
        rows=rows,
        micro_batches=batch // data // rows,
        sharding=next((one for one in Sharding if one in flags), Sharding.NONE),
        recomputed_blocks=layers if "recompute" in flags else 0,
        schedule=Schedule.GPIPE if "gpipe" in flags else Schedule.ONE_FORWARD_ONE_BACKWARD,
        devices=tuple(devices[:needed]),
    )
    return shape.plan()


def _ends(text: str, sizes: str | None, stages: int, layers: int) -> tuple[int, ...]:
    if sizes is None:
        if stages > max(layers - 2, 1):
            raise ValueError(f"plan {text!r}: {stages} stages for {layers - 2} blocks; give fewer stages")
        counts = [*split_rows(layers - 2, stages)]
        counts[0] += 1
        counts[-1] += 1
    else:
        counts = [int(size) for size in sizes.split()]
        if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
            raise ValueError(
                f"plan {text!r}: {stages} stages need as many numbers of layers that sum to {layers}, embedding and head included"
            )
    return tuple(accumulate(counts))
