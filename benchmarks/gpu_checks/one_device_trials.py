"""Training of whole models on one device, beside predictions and Hugging Face's own models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpu_checks import hugging_face_models
from gpu_checks.hardware import Hardware
from gpu_checks.running import Subject
from gpu_checks.whole_trials import here, trial_findings, uniform_plan
from trainwright.families import Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model

ROWS, MICRO_BATCHES = 4, 4


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield GPT-2 medium and a Llama of 1.1 billion parameters (TinyLlama's shape), or tiny ones."""
    gpt, llama = Gpt(24, 1024, 16, 1024, 50257), Llama(22, 2048, 32, 2048, 32000, 5632, 4)
    if hardware.small:
        gpt, llama = Gpt(2, 64, 4, 32, 256), Llama(2, 64, 4, 32, 256, 128, 2)
    for name, family, dtypes in (
        ("GPT-2 medium", gpt, dict.fromkeys((hardware.half, Dtype.FLOAT16))),
        ("Llama, 1.1 billion", llama, (hardware.half,)),
    ):
        for dtype in dtypes:
            model = Model.of(family, dtype)
            plan = uniform_plan(len(model.layers), here(1), rows=ROWS, micro_batches=MICRO_BATCHES)
            yield Subject(f"{dtype} {name}", partial(trial_findings, name, hardware, model, plan))
        theirs = f"{hardware.half} {name} of Hugging Face, {ROWS * MICRO_BATCHES} rows"
        yield Subject(theirs, partial(hugging_face_models.find, theirs, hardware, family, (ROWS, MICRO_BATCHES)))
