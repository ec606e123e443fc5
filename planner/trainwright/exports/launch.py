"""Launch of a plan by torchrun: one command for each run of ranks on a node, so that every rank keeps its device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from shlex import quote

from trainwright.cluster import Device
from trainwright.exports.target import comment

TORCHRUN = "torchrun of torch ≥ 2.8"


@dataclass(frozen=True, slots=True)
class Agent:
    """Consecutive ranks on one node, which one torchrun starts.

    Attributes:
        number: its node rank in the words of torchrun; ranks follow these numbers.
        slots: GPU of each of its ranks.
    """

    number: int
    node: str
    slots: tuple[int, ...]
    first_rank: int

    @property
    def rank_words(self) -> str:
        last = self.first_rank + len(self.slots) - 1
        return f"rank {last}" if len(self.slots) == 1 else f"ranks {self.first_rank}–{last}"


def agents(devices: Iterable[Device]) -> tuple[Agent, ...]:
    """Group devices in the order of their ranks into runs on one node.

    A node whose ranks are not consecutive has several: torchrun numbers ranks agent by agent.
    """
    agent_list: list[Agent] = []
    first = 0
    for node, group in groupby(devices, key=lambda device: device.node):
        slots = tuple(device.slot for device in group)
        agent_list.append(Agent(len(agent_list), node, slots, first))
        first += len(slots)
    return tuple(agent_list)


def launch_script(devices: Sequence[Device], program: str, remarks: Iterable[str], *, before: str = "") -> str:
    """Return a script that starts a node's ranks with torchrun; it is the same on every node.

    `program` is what torchrun runs, in the words of the shell; `before` sets what it needs.
    """
    agent_list = agents(devices)
    by_node: dict[str, list[Agent]] = {}
    for agent in agent_list:
        by_node.setdefault(agent.node, []).append(agent)
    cases = "".join(
        f"  {quote(node)})\n"
        + "".join(
            f"    start {agent.number} {','.join(map(str, agent.slots))}  # {agent.rank_words}\n" for agent in own
        )
        + "    ;;\n"
        for node, own in by_node.items()
    )
    sizes = {len(agent.slots) for agent in agent_list}
    split_nodes = [node for node, own in by_node.items() if len(own) > 1]
    where, node_hint = f"on each of {len(by_node)} nodes", "NODE says which one it is"
    if len(by_node) == 1:
        where, node_hint = f"on {agent_list[0].node}", f"set NODE={agent_list[0].node}"
    notes = [
        *remarks,
        (
            f"Run `bash launch.sh` {where} ({TORCHRUN}); {node_hint} where the host has another name. MASTER_ADDR is the address of "
            "the node of rank 0."
        ),
        "Ranks are numbered by --node-rank and then by the order of CUDA_VISIBLE_DEVICES: both keep the plan's placement.",
    ]
    if len(sizes) > 1:
        notes.append("Nodes start different numbers of processes; torchrun allows that.")
    if split_nodes:
        notes.append(
            f"Ranks of {', '.join(split_nodes)} are not consecutive, so that node starts torchrun several times."
        )
    return f"""#!/usr/bin/env bash
{comment(notes)}set -euo pipefail
cd "$(dirname "$0")"
export CUDA_DEVICE_ORDER=PCI_BUS_ID  # GPUs are counted as nvidia-smi counts them
master=${{MASTER_ADDR:-{quote(agent_list[0].node)}}}
{before}
start() {{  # node rank, GPUs in the order of their ranks
  local gpus=${{2//,/ }}
  CUDA_VISIBLE_DEVICES=$2 torchrun --nnodes {len(agent_list)} --node-rank "$1" --nproc-per-node "$(wc -w <<< "$gpus")" \\
    --master-addr "$master" --master-port "${{MASTER_PORT:-29500}}" {program} &
}}
case "${{NODE:-$(hostname)}}" in
{cases}  *)
    echo "NODE must be one of {", ".join(by_node)}" >&2
    exit 2
    ;;
esac
for job in $(jobs -p); do wait "$job"; done
"""
