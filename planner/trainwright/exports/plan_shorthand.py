"""Shorthand of a uniform plan, `pp2 dp2 tp2 mb1 zero1 recompute`, as people say what they run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from trainwright.cluster import Device
from trainwright.exports.uniform_shape import UniformShape
from trainwright.plan import Plan, Schedule, Sharding, split_rows

WORDS: Final = "pp, dp, tp and mb with a number, zero1 to zero3, recompute, gpipe, and layers as in [4 3 5]"
_DEGREE: Final = re.compile(r"(pp|dp|tp|mb)([0-9]{1,6})")
_SIGN: Final = re.compile(r"(^|[\s\]])(pp|dp|tp|mb)-?[0-9]|^\s*\[")
_FLAGS: Final[Mapping[str, str]] = {
    "recompute": "recompute",
    "gpipe": "schedule",
    "1f1b": "schedule",
    **{str(one): "sharding" for one in Sharding},
}
"""Words without a number, and what each of them sets. Two that set the same contradict each other."""
_LAYERS: Final = re.compile(r"\[([0-9 ]+)\]")


def is_shorthand(text: str) -> bool:
    """Return whether a text has a word like a degree, in any case, or begins with layers, and is no name of a file.

    What it says may be wrong.
    """
    return _SIGN.search(text.lower()) is not None and not {".", "/"} & set(text)


@dataclass(frozen=True, slots=True)
class _Said:
    """Words of a text by what they decide (`pp`, `sharding`, …), and the layers in brackets."""

    words: Mapping[str, str]
    layers: tuple[int, ...] | None

    def degree(self, name: str) -> int | None:
        """Return the number after pp, dp, tp or mb; None if it is not given."""
        word = self.words.get(name)
        return None if word is None else int(word.removeprefix(name))


def plan_of_shorthand(text: str, devices: Sequence[Device], layers: int, batch: int) -> Plan:
    """Return the plan on the first devices in their order. Raises ValueError with one sentence.

    `mb` is the rows of a micro-batch on one replica (Megatron's micro-batch size), by default 1. Without `dp`, all devices are
    used. Case does not matter. Without layers, stages share the blocks evenly, and the first and the last one have the embedding and the head as well.
    """
    said = _said(text)
    stages, tensor, rows = (said.degree(name) or 1 for name in ("pp", "tp", "mb"))
    ends = _ends(text, said.layers, stages, layers)
    data = said.degree("dp") or len(devices) // (stages * tensor)
    needed = stages * tensor * data
    if not 1 <= needed <= len(devices):
        raise ValueError(f"plan {text!r}: needs {max(needed, stages * tensor)} devices, the cluster has {len(devices)}")
    if batch % (data * rows):
        raise ValueError(
            f"plan {text!r}: {data} replicas × {rows} rows do not divide the global batch of {batch}; change dp or mb"
        )
    shape = UniformShape(
        ends=ends,
        tensor=tensor,
        data=data,
        rows=rows,
        micro_batches=batch // data // rows,
        sharding=Sharding(said.words.get("sharding", Sharding.NONE)),
        recomputed_blocks=layers if "recompute" in said.words else 0,
        schedule=Schedule.GPIPE if said.words.get("schedule") == "gpipe" else Schedule.ONE_FORWARD_ONE_BACKWARD,
        devices=tuple(devices[:needed]),
    )
    return shape.plan()


def _said(text: str) -> _Said:
    """Return what the words say. Raises ValueError for an unknown word, and for two that decide the same."""
    found: dict[str, str] = {}
    for word in _LAYERS.sub(" ", text.lower()).split():
        degree = _DEGREE.fullmatch(word)
        name = _FLAGS.get(word) if degree is None else degree[1]
        if name is None:
            raise ValueError(f"plan {text!r}: {word!r} is not understood; give {WORDS}")
        if degree is not None and int(degree[2]) == 0:
            raise ValueError(f"plan {text!r}: {word!r} must be at least {name}1; leave it out for the default")
        if name in found:
            pair = f"{word!r} is given twice" if word == found[name] else f"{found[name]!r} and {word!r} contradict"
            raise ValueError(f"plan {text!r}: {pair}; keep one")
        found[name] = word
    lists = _LAYERS.findall(text)
    if len(lists) > 1:
        raise ValueError(
            f"plan {text!r}: layers are given twice, as {' and '.join(f'[{one}]' for one in lists)}; keep one"
        )
    return _Said(found, tuple(map(int, lists[0].split())) if lists else None)


def _ends(text: str, sizes: Sequence[int] | None, stages: int, layers: int) -> tuple[int, ...]:
    """Return the end of each stage's layers. Raises ValueError if the stages do not hold all layers."""
    if sizes is None:
        if stages > max(layers - 2, 1):
            raise ValueError(f"plan {text!r}: {stages} stages for {layers - 2} blocks; give fewer stages")
        counts = [*split_rows(layers - 2, stages)]
        counts[0] += 1
        counts[-1] += 1
        return tuple(accumulate(counts))
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        given = " ".join(map(str, sizes))
        raise ValueError(
            f"plan {text!r}: [{given}] are {sum(sizes)} layers in {len(sizes)} stages, but the model has {layers}, embedding "
            f"and head included, for pp{stages}; give {stages} numbers of at least 1 that sum to {layers}"
        )
    return tuple(accumulate(sizes))
