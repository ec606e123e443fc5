"""Words of a plan's shorthand: what each of them says, and what is wrong with one that says nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainwright.layer import Dtype
from trainwright.plan import OPERATORS_WORD
from trainwright.strategy import RankOrder, Sharding

WORDS: Final = "pp, dp, tp and mb with a number, zero1 to zero3, kept, recompute, gpipe, bf16, fp16 or fp32, and layers as in [4 3 5]"
DTYPES: Final[Mapping[str, Dtype]] = {
    "bf16": Dtype.BFLOAT16,
    "fp16": Dtype.FLOAT16,
    "fp32": Dtype.FLOAT32,
    **{str(dtype): dtype for dtype in Dtype},
}
"""Number formats by the words for them."""
MAX_DIGITS: Final = 9
_DEGREE: Final = re.compile(r"(pp|dp|tp)([0-9]+)|(mb)([0-9]+)(?:[×x*]([0-9]+))?")
_FLAGS: Final[Mapping[str, str]] = {
    "recompute": "recompute",
    "kept": "gathered weights",
    "gpipe": "schedule",
    "1f1b": "schedule",
    **{str(sharding): "sharding" for sharding in Sharding},
    **dict.fromkeys(DTYPES, "number format"),
}
"""Words without a number, and what each of them sets. Two that set the same contradict each other."""
_LAYERS: Final = re.compile(r"\[[^\[\]]*\]")
_SIZE: Final = re.compile(r"(?:([0-9]{1,4})×)?([0-9]{1,6})")
"""Layers of a stage; a number before × is that of the stages with as many."""

_COVERED: Final = re.compile(r"\brecompute\s+([0-9]+/[0-9]+)(?=$|[\s,])")
"""Layers that are recomputed, as a summary tells them."""

_SUFFIX: Final = re.compile(r"\.[a-z]\w*$")
_LIKE_A_WORD: Final = re.compile(r"(pp|dp|tp|mb)([-=:]?[0-9].*)?|zero[-=:]?[0-9].*|recompute|gpipe|1f1b|\[.*")
_DASHED: Final = re.compile(r"(pp|dp|tp|mb|zero)[-=:_]([0-9]+)")
_APART: Final = re.compile(r"[|+–]|[0-9]+/[0-9]+$|\[.*[a-z]")
"""Parts of a summary that describe unequal layers or pipelines, which shorthand cannot."""

_ELSEWHERE: Final[Mapping[str, str]] = {
    "half": "write bf16 or fp16",
    **dict.fromkeys(
        ("sp", "sequence_parallel"),
        "the runtime decides on sequence parallelism (sequence_parallel in the file of --runtime)",
    ),
    **dict.fromkeys((OPERATORS_WORD, *map(str, RankOrder)), "give such a plan in a file (plan --write-plan)"),
}
"""Settings that are not words of a plan, with the place where each is set."""


def is_shorthand(text: str) -> bool:
    """Return whether a text looks like words of a plan, in any case, and not like the name of a file.

    What it says may be wrong.
    """
    if _SUFFIX.search(text.lower()):
        return False
    first, *others = text.lower().split() or [""]
    return any(map(_LIKE_A_WORD.fullmatch, first.split("/")[:1])) or (
        "/" not in first and any(map(_LIKE_A_WORD.fullmatch, others))
    )


@dataclass(frozen=True, slots=True)
class PlanWords:
    """Words of a text by what they decide.

    Attributes:
        flags: `zero1` under `sharding`, and so on.
        numbers: after pp, dp, tp and mb, and the number of micro-batches under `micro_batches`.
        layers: layers by stage; None if they are not given.
        recomputed: `24/26`, which is right if these are the blocks of all layers; None if it is not given.
    """

    flags: Mapping[str, str]
    numbers: Mapping[str, int]
    layers: tuple[int, ...] | None
    recomputed: str | None = None


def words_of(text: str) -> PlanWords:
    """Return what the words say. Raises ValueError for an unknown word, and for two that decide the same."""
    word_of: dict[str, str] = {}
    numbers: dict[str, int] = {}
    lists = _LAYERS.findall(text.lower())
    if len(lists) > 1:
        raise ValueError(f"layers are given twice, as {' and '.join(lists)}; keep one")
    layers = _layers(lists[0]) if lists else None
    covered = _COVERED.search(text.lower())
    for word in _COVERED.sub("recompute", _LAYERS.sub(" ", text.lower())).replace(",", " ").split():
        degree = _DEGREE.fullmatch(word)
        name = _FLAGS.get(word) if degree is None else degree[1] or degree[3]
        if name is None:
            raise misunderstood(word)
        if name in word_of:
            pair = f"{word!r} is given twice" if word == word_of[name] else f"{word_of[name]!r} and {word!r} contradict"
            raise ValueError(f"{pair}; keep one")
        word_of[name] = word
        if degree is not None:
            given = {name: degree[2] or degree[4], **({"micro_batches": degree[5]} if degree[5] else {})}
            if max(map(len, given.values())) > MAX_DIGITS:
                raise ValueError(f"{word!r} is too large; give at most {MAX_DIGITS} digits")
            numbers |= {what: int(number) for what, number in given.items()}
            if not all(numbers[what] for what in given):
                raise ValueError(f"{word!r} must be at least {name}1; leave it out for the default")
    flags = {name: word for name, word in word_of.items() if name not in numbers}
    return PlanWords(flags, numbers, layers, covered[1] if covered else None)


def _layers(text: str) -> tuple[int, ...]:
    """Return the layers of each stage, as `[4 3 5]`, `[4,3,5]` or `[6×3 1]` says them."""
    if _APART.search(text):
        raise misunderstood(text)
    parts = [_SIZE.fullmatch(part) for part in re.split(r"[\s,]+", text.strip("[]").strip(" ,"))]
    if not all(parts):
        raise ValueError(f"{text!r} is not understood; give layers as numbers, as in [4 3 5]")
    return tuple(size for part in parts if part for size in [int(part[2])] * int(part[1] or 1))


def misunderstood(word: str) -> ValueError:
    """Return the error of a word: what is wrong with it, and what to write in its place."""
    if word in _ELSEWHERE:
        return ValueError(f"{word!r} is no word of a plan: {_ELSEWHERE[word]}")
    if (dashed := _DASHED.fullmatch(word)) is not None:
        return ValueError(f"{word!r} is not understood: write {dashed[1]}{dashed[2]}")
    if word in ("pp", "dp", "tp", "mb"):
        return ValueError(f"{word!r} needs its number right after it, as in {word}2")
    if _APART.search(word):
        return ValueError(
            f"{word!r} tells layers apart, which shorthand cannot; give such a plan as a file (plan --write-plan)"
        )
    if "/" in word:
        return ValueError(f"{word!r} is not understood: put a space between words")
    return ValueError(f"{word!r} is not understood; give {WORDS}")
