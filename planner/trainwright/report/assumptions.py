"""Remarks on what an answer assumes of the runtime, and of networks that nobody has measured."""

from __future__ import annotations

from dataclasses import replace

from trainwright.report.remark import Remark
from trainwright.runtime import Runtime
from trainwright.runtime_presets import runtime_presets
from trainwright.search import Candidate, Problem, is_assumed


def assumed_runtime(candidate: Candidate, problem: Problem) -> Remark:
    """Return the preset that the runtime is, and the memory that is assumed of a process; empty where both are stated."""
    runtime = problem.runtime
    used = set(problem.cluster.accelerators_of(candidate.plan.nodes))
    assumed = sorted(
        process_bytes.held_bytes
        for process_bytes in runtime.process_bytes
        if process_bytes.accelerator in used and is_assumed(process_bytes)
    )
    stated = replace(runtime, process_bytes=())
    name = next((name for name, preset in runtime_presets().items() if preset.runtime == stated), None)
    fields = {
        **({"runtime": name} if name and stated != Runtime() else {}),
        **({"assumed_process_bytes": assumed[-1]} if assumed else {}),
    }
    sizes = " to ".join(f"{size / 1e9:g}" for size in dict.fromkeys(assumed[:1] + assumed[-1:]))
    memory = f"{sizes} GB a device for what a process holds besides tensors"
    sentences = [f"Runtime: {runtime_presets()[name].title}."] if name and stated != Runtime() else []
    if assumed and stated == Runtime():
        sentences = [
            f"No runtime is stated: Trainwright's own worker is assumed, and {memory}; `--runtime` names another."
        ]
    elif assumed:
        sentences.append(f"The runtime states no memory of a process: {memory} are assumed.")
    return Remark(tuple(sentences), fields)


def assumed_network(candidate: Candidate, problem: Problem) -> Remark:
    """Return the share of the stated bandwidth that counts between the plan's nodes; empty where it is all of it."""
    nodes = [problem.cluster.node(name) for name in dict.fromkeys(candidate.plan.nodes)]
    ratios = sorted({node.network.reached_ratio for node in nodes if node.network is not None})
    if len(nodes) == 1 or not ratios or ratios[0] == 1:
        return Remark()
    shares = " to ".join(f"{ratio:.0%}" for ratio in dict.fromkeys((ratios[0], ratios[-1])))
    sentence = (
        f"Between nodes, {shares} of the stated bandwidth counts, which is what training reaches over such networks: an "
        "assumption until the links are measured."
    )
    return Remark((sentence,), {"assumed_network_share": ratios[0]})
