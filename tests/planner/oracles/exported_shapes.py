"""Plans of every kind, shapes of uniform ones, and a stand-in for torchrun, for tests of exports."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st
from random_plans import random_plan

from trainwright.cluster import Device
from trainwright.exports import UniformShape
from trainwright.families import Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Schedule
from trainwright.strategy import Sharding, Strategy

SHAPE = UniformShape(
    ends=(2, 5, 6),
    strategy=Strategy(1, 2),
    rows=2,
    micro_batches=4,
    recomputed_blocks=0,
    schedule=Schedule.ONE_FORWARD_ONE_BACKWARD,
    devices=tuple(Device(node, slot) for node, slot in (("a", 1), ("a", 0), ("b", 0), ("b", 1), ("b", 2), ("a", 3))),
)
LLAMA = Model.of(Llama(layers=4, hidden_size=64, heads=4, sequence_length=32, key_value_heads=2), Dtype.BFLOAT16)
plans = st.builds(
    random_plan,
    st.integers(0, 10**6),
    layers=st.integers(3, 9),
    tensor_degrees=st.sampled_from([(1,), (1, 2), (1, 2, 4)]),
    devices=st.integers(1, 8),
)


@st.composite
def shapes(draw: st.DrawFn) -> UniformShape:
    stages, layers = draw(st.integers(1, 3)), draw(st.integers(3, 9))
    cuts = draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1))
    tensor, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    shape = UniformShape(
        ends=(*sorted(cuts), layers),
        strategy=Strategy(
            tensor,
            data,
            sharding=draw(st.sampled_from(Sharding)) if data > 1 else Sharding.NONE,
            sequence_parallel=tensor > 1 and draw(st.booleans()),
        ),
        rows=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 4)),
        recomputed_blocks=0,
        schedule=draw(st.sampled_from(Schedule)),
        devices=tuple(Device(f"node-{number // 2}", number % 2) for number in range(stages * tensor * data)),
    )
    return replace(shape, recomputed_blocks=draw(st.integers(0, max(shape.blocks))))


def started(script: str, node: str, folder: Path, *own: str, **environment: str) -> list[list[str]]:
    """Run a launch script on a node, with arguments of its own, and return the GPUs and arguments of each torchrun."""
    folder.mkdir(exist_ok=True)
    (folder / "launch.sh").write_text(script)
    stand_in = folder / "torchrun"
    stand_in.write_text("""#!/bin/bash\nprintf '%s\\n' "$(printf '%s\\t' "$CUDA_VISIBLE_DEVICES" "$@")"\n""")
    stand_in.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NODE": node, **environment}
    done = subprocess.run(
        ["bash", "launch.sh", *own], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return sorted(line.rstrip("\t").split("\t") for line in done.stdout.splitlines())
