"""Verdict on the first losses of a plan's trials, which train the same rows from the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.layer import Dtype
from trainwright.worker_api import LossDependence, TrialReport
from trainwright_operator.flow.reasons import Reason, message

_BOUNDS: Final = {Dtype.FLOAT32: 1e-4, Dtype.FLOAT16: 1e-2, Dtype.BFLOAT16: 1e-2}
"""Largest difference of two first losses over the mean absolute row loss. The families' differ by at most 1.3e-7 in float32,
2.5e-4 in bfloat16 and 3.5e-5 in float16 between plans that differ in every degree."""
_CAUSES: Final = {
    LossDependence.RANDOM_NUMBERS: "a layer draws random numbers",
    LossDependence.BATCH_NORMALISATION: "a layer normalises by batch",
}


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """First loss of a measured trial, in its number format; `mean_absolute` is that of rows."""

    trial: str
    dtype: Dtype
    mean: float
    mean_absolute: float

    def agrees_with(self, other: FirstLoss) -> bool:
        scale = max(self.mean_absolute, other.mean_absolute)
        return abs(self.mean - other.mean) <= _BOUNDS[self.dtype] * scale


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """Trials whose measurements do not count, and trials that were not compared.

    Attributes:
        differing: sentence on each trial of another first loss, by its name.
        remark: clause on what was not compared; empty if every trial was.
    """

    differing: Mapping[str, str]
    remark: str = ""

    @classmethod
    def of(cls, measured: Mapping[str, tuple[Dtype, TrialReport]]) -> LossVerdict:
        """Judge the trials that our executor measured, by name, each with its number format and report.

        Formats are judged one by one. Reports of former versions, without absolute losses, are not compared.
        """
        by_dtype: dict[Dtype, list[FirstLoss]] = {}
        left_out: dict[LossDependence, list[str]] = {}
        for trial, (dtype, report) in measured.items():
            if report.loss_depends_on is not None:
                left_out.setdefault(report.loss_depends_on, []).append(trial)
            elif report.mean_absolute_row_loss is not None and report.losses and report.losses[0] is not None:
                loss = FirstLoss(trial, dtype, report.losses[0], report.mean_absolute_row_loss)
                by_dtype.setdefault(dtype, []).append(loss)
        differing: dict[str, str] = {}
        for losses in by_dtype.values():
            differing |= _differing(losses)
        causes = (f"{_CAUSES[cause]} ({', '.join(trials)})" for cause, trials in left_out.items())
        remark = f"first losses are not compared where {' or '.join(causes)}" if left_out else ""
        return cls(differing, remark)


FRAMEWORK_VERDICT: Final = LossVerdict({}, "first losses are not compared, since jobs of a framework report none")


def _differing(losses: Sequence[FirstLoss]) -> dict[str, str]:
    """Return a sentence on each trial that does not agree with most, or on every one if no more than half agree."""
    groups = [[other for other in losses if other.agrees_with(loss)] for loss in losses]
    largest = max(groups, key=len)
    if len(largest) == len(losses):
        return {}
    fields: dict[str, object] = {"agreeing": len(largest), "compared": len(losses), "dtype": losses[0].dtype}
    if 2 * len(largest) > len(losses):
        common = sorted(loss.mean for loss in largest)[len(largest) // 2]
        return {
            loss.trial: message(Reason.LOSS_DIFFERS, loss=loss.mean, other=f"{common:.6g}", **fields)
            for loss in losses
            if loss not in largest
        }
    means = {loss.trial: ", ".join(f"{other.mean:.6g}" for other in losses if other is not loss) for loss in losses}
    return {
        loss.trial: message(Reason.LOSS_DIFFERS, loss=loss.mean, other=means[loss.trial], **fields) for loss in losses
    }
