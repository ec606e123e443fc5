"""Running plans for tests of re-planning."""

from __future__ import annotations

from hypothesis import strategies as st

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import RankOrder, Sharding, Strategy


@st.composite
def plans(draw: st.DrawFn, devices: tuple[Device, ...], layers: int, batch: int) -> Plan:
    """Plans of one pipeline on some of eight devices, stages of 1, 2 or 4 devices."""
    shuffled = draw(st.permutations(devices))
    sizes, left = [], len(devices)
    while left and len(sizes) < 3 and (not sizes or draw(st.booleans())):
        sizes.append(draw(st.sampled_from([size for size in (1, 2, 4) if size <= left])))
        left -= sizes[-1]
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))
    stages, at = [], 0
    for size, first, end in zip(sizes, [0, *cuts], [*cuts, layers], strict=True):
        middle = draw(st.sampled_from([first, *range(first + 1, end)]))
        runs = []
        for start, stop in ((first, middle), (middle, end)):
            if start == stop:
                continue
            tensor = draw(st.sampled_from([degree for degree in (1, 2, 4) if size % degree == 0]))
            rows = (8 // (size // tensor),) * (size // tensor)
            runs.append(
                LayerRun(
                    start,
                    stop - start,
                    Strategy(tensor, size // tensor, draw(st.sampled_from(RankOrder)), draw(st.sampled_from(Sharding))),
                    rows,
                )
            )
        stages.append(Stage(tuple(shuffled[at : at + size]), tuple(runs)))
        at += size
    return Plan(layers, batch, (Pipeline(batch // 8, 8, tuple(stages)),))
