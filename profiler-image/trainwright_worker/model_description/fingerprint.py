"""Digests of a user model's first weights and rows, which have to be the same in every process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright_worker.layers.custom import CustomLayers, CustomModel, load_model
from trainwright_worker.layers.custom_makers import LayerMakers

_ROWS = 2
SECONDS = 900.0
"""Time that another process has to make its digests."""


def digests(model: CustomModel, layers: Sequence[int]) -> dict[str, str]:
    """Return a digest of every field's first rows, by `field NAME`, and of each of these layers' weights, by `layer NUMBER`."""
    digest_of: dict[str, str] = {}
    makers = LayerMakers(model)
    with torch.device("cpu"):
        for iteration in (0, 1):
            rows = model.rows(seed=0, iteration=iteration, first=0, count=_ROWS)
            digest_of |= {f"field {name} {iteration}": _digest([value]) for name, value in rows.items()}
        for layer in layers:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(makers.seed_of(layer))
                module = makers.make(layer)
                digest_of[f"layer {layer}"] = _digest([*module.parameters(), *module.buffers()])
    return digest_of


@contextmanager
def other_process(entrypoint: str, layers: Sequence[int]) -> Iterator[subprocess.Popen[str]]:
    """Run a process with another seed of Python's hashes, which writes the same digests, until the body ends."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, entrypoint, *map(str, layers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check_other_process(
    layers: CustomLayers, numbers: Sequence[int], other: subprocess.Popen[str], seconds: float = SECONDS
) -> str | None:
    """Check that a process with other hashes starts with the same weights and rows.

    Return what could not be checked, None if nothing. Raises ValueError if they differ.
    """
    own = digests(layers.model, numbers)
    try:
        written, error_output = other.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"weights and rows of another process: it took more than {seconds:.0f} s"
    if other.returncode != 0:
        last = (error_output.strip().splitlines() or ["it wrote nothing"])[-1]
        raise layers.error(f"it cannot be made in another process: {last}; correct it")
    differs = _first_difference(own, json.loads(written.strip().splitlines()[-1]))
    if differs is None:
        return None
    kind, name, *_ = differs.split()
    if kind == "field":
        raise layers.error(
            f"field {name!r} of rows() has other values in another process for the same seed, iteration and rows (hash() "
            "of a text, numpy without a seed, or the time); make them from numbers alone"
        )
    label = layers.make_module(int(name)).label
    raise layers.error(
        f"{label} starts with other weights in another process for the same seed (numpy, Python's random, a "
        "hash or the time), so that replicas would differ; draw them from torch's default generator"
    )


def _first_difference(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the first name whose digests differ."""
    return next((name for name, digest in own.items() if other.get(name) != digest), None)


def _digest(values: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b()
    for value in values:
        plain = value.detach().contiguous().flatten()
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        if plain.numel():
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main() -> int:
    """Write the digests of the entry point's model, of the layers that follow it."""
    entrypoint, *layers = sys.argv[1:]
    sys.stdout.write(f"\n{json.dumps(digests(load_model(entrypoint), [int(layer) for layer in layers]))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
