"""Draw of the problems and plans in `estimate_inputs.json`: 20 clusters, each with a model, profiles, a runtime and 20 plans.

Run once, by `python tests/golden/draw_estimates.py`. The golden estimates read the stored documents, so later changes
of this draw, of the random-plan generator or of the data sheets do not touch them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import subjects as s
from random_plans import random_plan

INPUTS = Path(__file__).with_name("estimate_inputs.json")
CLUSTERS, PLANS = 20, 20
MODELS: tuple[dict[str, Any], ...] = (
    {"gpt": {"layers": 6, "hidden_size": 512, "heads": 8, "sequence_length": 256, "vocabulary_size": 30000}},
    {"gpt": {"layers": 10, "hidden_size": 256, "heads": 4, "sequence_length": 128, "vocabulary_size": 1000}},
    {"bert": {"layers": 5, "hidden_size": 768, "heads": 8, "sequence_length": 128}},
    {"llama": {"layers": 6, "hidden_size": 512, "heads": 8, "key_value_heads": 4, "sequence_length": 256}},
    {"t5": {"layers": 3, "hidden_size": 512, "heads": 8, "sequence_length": 128, "decoder_sequence_length": 64}},
    {"moe": {"layers": 4, "hidden_size": 256, "heads": 8, "sequence_length": 128, "experts": 4, "expert_every": 2}},
    {"vit": {"layers": 6, "hidden_size": 384, "heads": 8, "image_size": 64, "patch_size": 8, "classes": 100}},
    {"swin": {"layers": [2, 2, 2], "hidden_size": 64, "heads": [4, 8, 16], "image_size": 56, "patch_size": 2}},
    {"wide_resnet": {"depth": 50, "base_channels": 16, "image_size": 64, "classes": 100}},
    {"trans_gan": {"layers": [2, 1, 1], "hidden_size": 256, "heads": 4, "bottom_width": 4, "latent_size": 64}},
)
ACCELERATORS = {"NVIDIA-A100-SXM4-40GB": 40, "Tesla-T4": 15, "Tesla-V100-SXM2-16GB": 16, "NVIDIA-L4": 24}
PROFILE_FIELDS = (
    "accelerator", "kind", "tensor_degree", "rows", "forward_seconds", "backward_seconds", "update_seconds",
    "activation_bytes", "parameter_bytes",
)  # fmt: skip
DEFAULTS = {"order": "tensor_inner", "sharding": "none", "recompute": False, "schedule": "1f1b"}
"""Fields of plans that are left out of the file where they have these values."""


def draw_cluster(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(sorted(ACCELERATORS), draw.choice((1, 2, 2, 3)))
    sizes = draw.choice(((2, 2, 2, 2), (4, 4), (1, 2, 1, 4), (8,), (3, 2), (1,) * 6, (2, 4, 2)))
    share = draw.choice((1.0, 1.0, 0.02, 0.005))
    port = lambda latency, rates: {  # noqa: E731 - two fields, drawn four times
        "latency_seconds": latency,
        "bandwidth_bytes_per_second": draw.choice(rates),
        **({"flow_bytes_per_second": draw.choice(rates) / 4} if draw.random() < 0.2 else {}),
    }
    nodes = [
        {
            "name": f"node-{number}",
            "accelerator": names[number % len(names)],
            "devices": size,
            "network": port(2e-5, (2e8, 1.25e9, 1.25e10)),
            "inside": port(5e-6, (1e10, 1e11)),
        }
        for number, size in enumerate(sizes)
    ]
    used = [name for name in names if any(node["accelerator"] == name for node in nodes)]
    accelerators = [{"name": name, "memory_bytes": int(ACCELERATORS[name] * 2**30 * share)} for name in used]
    links = [
        {"source": a["name"], "target": b["name"], **port(5e-5, (1e8, 6e8, 3e9))}
        for a in nodes
        for b in nodes
        if a is not b and draw.random() < 0.3
    ]
    return {"accelerators": accelerators, "nodes": nodes, "links": links if draw.random() < 0.5 else []}


def draw_runtime(draw: random.Random, accelerators: Sequence[str]) -> dict[str, Any]:
    """Half of them plain, so that a difference is easily traced."""
    if draw.random() < 0.5:
        return {}
    return {
        "compute_ratios": [{"accelerator": name, "ratio": draw.choice((0.9, 1.1, 1.3))} for name in accelerators],
        "row_growth_ratio": draw.choice((1.0, 0.8, 1.2)),
        "link_ratio": draw.choice((1.0, 0.7)),
        "collective_ratios": draw.choice(({}, {"all_reduce": 1.2, "all_gather": 1.1, "reduce_scatter": 1.5})),
        "overlaps_gradients": draw.random() < 0.5,
        "overlap_slowdown_ratio": draw.choice((1.0, 1.3)),
        "constant_seconds": 1e-4,
        "constant_bytes": 2**20,
        "activation_ratio": draw.choice((1.0, 1.2)),
        "gradient_dtype": draw.choice(("float32", "float16")),
        "splits_boundaries": draw.random() < 0.5,
    }


def draw_plan(draw: random.Random, seed: int, problem: dict[str, Any], degrees: tuple[int, ...], layers: int) -> Any:
    """Return a random plan on the cluster's devices, half of them shuffled, every fourth as AMP's cost model needs it."""
    devices = [[node["name"], slot] for node in problem["cluster"]["nodes"] for slot in range(node["devices"])]
    plan = random_plan(seed, layers=layers, tensor_degrees=degrees, devices=len(devices))
    document = json.loads(s.documents.dumps(plan))
    if draw.random() < 0.5:
        draw.shuffle(devices)
    if seed % 4 == 0:
        document = as_amp_knows_it(document)
    for pipeline in document["pipelines"]:
        for stage in pipeline["stages"]:
            stage["devices"] = [
                dict(
                    zip(("node", "slot"), devices[2 * int(at["node"].removeprefix("node-")) + at["slot"]], strict=True)
                )
                for at in stage["devices"]
            ]
    return {key: value for key, value in _short(document).items() if key not in ("apiVersion", "document")}


def as_amp_knows_it(plan: dict[str, Any]) -> dict[str, Any]:
    """One pipeline whose stages have one layer run each, without sharding and recompute."""
    pipeline = plan["pipelines"][0]
    for stage in pipeline["stages"]:
        first, last = stage["layers"][0], stage["layers"][-1]
        count = last["first"] + last["count"] - first["first"]
        stage["layers"] = [{**first, "count": count, "sharding": "none", "recompute": False}]
    batch = pipeline["micro_batches"] * pipeline["micro_batch_size"]
    return {**plan, "pipelines": [pipeline], "global_batch_size": batch}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(member) for member in value]
    if isinstance(value, dict):
        return {key: _short(member) for key, member in value.items() if DEFAULTS.get(key, value) != member}
    return value


def draw_problem(number: int) -> dict[str, Any]:
    draw = random.Random(f"golden estimates {number}")
    cluster = draw_cluster(draw)
    names = [accelerator["name"] for accelerator in cluster["accelerators"]]
    training = {
        **MODELS[number % len(MODELS)],
        "global_batch_size": 8,
        "dtype": draw.choice(("float32", "float16")),
        "optimizer": draw.choice(("adam", "adam", "sgd")),
    }
    model = s.documents.parse(training, s.Training).model
    degrees = tuple(degree for degree in (1, 2, 4) if model.max_tensor_degree % degree == 0)
    rows = draw.choice(((1, 2, 4, 8), (1, 3, 12), (1, 2, 4, 8, 16)))
    profiles = s.documents.dump(
        s.estimate_profiles(model, names, tensor_degrees=degrees, rows=rows, optimizer=training["optimizer"])
    )
    problem = {
        "cluster": cluster,
        "model": training,
        "runtime": draw_runtime(draw, names),
        "profiles": [[layer[field] for field in PROFILE_FIELDS] for layer in profiles["layers"]],
    }
    plans = [draw_plan(draw, PLANS * number + one, problem, degrees, len(model.layers)) for one in range(PLANS)]
    return {**problem, "plans": plans}


def main() -> None:
    drawn = [draw_problem(number) for number in range(CLUSTERS)]
    compact = lambda value: json.dumps(value, separators=(",", ":"))  # noqa: E731 - a shorter name
    problems = [
        ",\n".join(
            f' "{key}": {_lines(value) if key in ("plans", "profiles") else compact(value)}'
            for key, value in one.items()
        )
        for one in drawn
    ]
    body = ",\n".join(f"{{\n{problem}\n}}" for problem in problems)
    INPUTS.write_text(f'{{"profile_fields": {compact(PROFILE_FIELDS)},\n"problems": [\n{body}\n]}}\n')


def _lines(values: Sequence[Any]) -> str:
    return "[\n  " + ",\n  ".join(json.dumps(value, separators=(",", ":")) for value in values) + "\n ]"


if __name__ == "__main__":
    main()
