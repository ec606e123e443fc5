"""Match of profiles with a cluster, by data sheet, and with a model, by layer kinds, their weights and their activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Final

from trainwright.accelerators import names_of_same_sheet
from trainwright.answer.profiled_format import WEIGHT_TOLERANCE, weight_ratios
from trainwright.cli.inputs.plausibility import rate_warning
from trainwright.cli.output import note
from trainwright.cluster import Cluster
from trainwright.documents import DocumentError
from trainwright.profiles import Profiles
from trainwright.training import Training

FORMATS: Final = {0.5: "half", 2.0: "twice"}
"""Ratios of weight bytes that another number format explains."""
ACTIVATION_RATIO: Final = 1.4
"""Ratio of activation bytes, or the inverse, that makes a row look like another model's if every layer kind has it.

Twice the sequence length gives every kind at least 2. Other kernels change one kind or the other: saved scores of attention
triple a block's bytes and leave those of embedding and head as they are.
"""
MAX_NAMED: Final = 6


def check_layer_kinds(profiles: Profiles, training: Training, *, file: Path, model_file: Path) -> None:
    """Raise DocumentError if the model has layer kinds without profiles, or with some that take no time though they compute."""
    _refuse_no_time(profiles, training, file)
    profiled = _profiled_kinds(profiles)
    missing = [name for name in dict.fromkeys(training.model.layers) if name not in profiled]
    if profiled and missing:
        raise DocumentError(
            f"{file}: the model of {model_file} has layers of kind {_named(missing)}, but the profiles are of "
            f"{_named(profiled)}; give the profiles of this model, or leave --profiles out to estimate them"
        )


def note_same_sheets(profiles: Profiles, cluster: Cluster) -> None:
    """Note which accelerators of the cluster have profiles of another name, as their data sheet tells."""
    for name, profiled in names_of_same_sheet(
        profiles, [accelerator.name for accelerator in cluster.accelerators]
    ).items():
        note(f"the profiles of {profiled} are taken for {name}, which has the same data sheet")


def mismatch_warning(profiles: Profiles, training: Training) -> str | None:
    """Return why the profiles may be of another model, number format or unit; None if nothing indicates it."""
    kind_names = {kind.name for kind in training.model.kinds}
    others = [name for name in _profiled_kinds(profiles) if name not in kind_names]
    if others:
        return f"the profiles have layers of kind {_named(others)}, which this model lacks; check that they are of this model"
    shares: defaultdict[str, set[float]] = defaultdict(set)
    for layer, ratio in weight_ratios(profiles, training):
        share = next((share for share in (1.0, *FORMATS) if abs(ratio / share - 1) <= WEIGHT_TOLERANCE), None)
        if share is None:
            return (
                f"the profiles' {layer.kind} holds {layer.parameter_bytes} bytes of weights, {ratio:.3g} times those "
                "of this model; check that they are of this model"
            )
        shares[layer.accelerator].add(share)
    return (
        _format_mismatch(shares, training)
        or _activations_mismatch(profiles, training)
        or rate_warning(profiles, training.model)
    )


def _refuse_no_time(profiles: Profiles, training: Training, file: Path) -> None:
    computing = {kind.name for kind in training.model.kinds if kind.forward_flops_per_row}
    for number, layer in enumerate(profiles.layers):
        if not layer.forward_seconds and layer.kind in computing:
            raise DocumentError(
                f"{file}: layers.{number}.forward_seconds: {layer.kind} on {layer.accelerator} computes, so it takes more than "
                "0 s; measure it again, or leave it out"
            )


def _format_mismatch(shares: Mapping[str, set[float]], training: Training) -> str | None:
    """Return that weights of some accelerators look like those of another number format, by the shares of each."""
    mixed = [name for name, of_all in shares.items() if len(of_all) > 1]
    if mixed:
        return (
            f"the weights of the profiles on {_named(mixed)} are in several number formats, by their bytes; check that all "
            f"were measured in {training.model.dtype}"
        )
    share_by_accelerator = {name: next(iter(of_all)) for name, of_all in shares.items()}
    others = [name for name, share in share_by_accelerator.items() if share in FORMATS]
    if not others or len({share_by_accelerator[name] for name in others}) > 1:
        return None
    on = f" on {_named(others)}" if len(others) < len(shares) else ""
    return (
        f"the weights of the profiles{on} take {FORMATS[share_by_accelerator[others[0]]]} the bytes of this model's in {training.model.dtype}; "
        "check that they were measured in this number format"
    )


def _activations_mismatch(profiles: Profiles, training: Training) -> str | None:
    """Return that rows look like another model's, if the activations of every kind are more, or fewer, than this one's."""
    kinds = {kind.name: kind for kind in training.model.kinds}
    ratios: dict[str, list[float]] = {}
    for layer in profiles.layers:
        if layer.tensor_degree == 1 and layer.activation_bytes:
            expected = kinds[layer.kind].saved_bytes(training.model.dtype, 1, layer.rows)
            ratios.setdefault(layer.kind, []).append(layer.activation_bytes / max(expected, 1.0))
    ratio_by_kind = {kind: median(of_kind) for kind, of_kind in ratios.items()}
    least, most = min(ratio_by_kind.values(), default=1.0), max(ratio_by_kind.values(), default=1.0)
    if len(ratio_by_kind) < min(len(kinds), 2) or not (least >= ACTIVATION_RATIO or most <= 1 / ACTIVATION_RATIO):
        return None
    shown = dict.fromkeys(f"{ratio:.3g}" for ratio in (least, most))
    return (
        f"the profiles' {_named(ratio_by_kind)} hold {' to '.join(shown)} times the activations of this model's for each row; check that "
        "they are in bytes, and of this model, with its sequence length or image size"
    )


def _profiled_kinds(profiles: Profiles) -> list[str]:
    names = [layer.kind for layer in profiles.layers] + [large.kind for large in profiles.too_large]
    return list(dict.fromkeys(names))


def _named(kinds: Iterable[str]) -> str:
    names = list(kinds)
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else "")
