"""Kept measurements that no plan is to reuse any more."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from trainwright import documents
from trainwright_operator.flow.actions import DeleteConfigMap
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict, stored_time
from trainwright_operator.flow.measurements.former_revision import FIRST, former_revision
from trainwright_operator.flow.measurements.kept_measurements import KEY_KEY
from trainwright_operator.flow.measurements.measurement_keys import KeptProfile
from trainwright_operator.flow.names import EXPIRES_ANNOTATION
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import StoredConfigMap

MAX_KEPT_BYTES: Final = 8_000_000
"""Limit on the size of a namespace's measurements, which are listed whole: about a thousand models of twelve nodes."""
_MAX_DELETED: Final = 20
"""Limit on deletions in one pass."""


def obsolete_measurements(context: ReconcileContext) -> tuple[DeleteConfigMap, ...]:
    """Return the deletions of measurements that no plan is to reuse, a limited number at once.

    These are those of a node that this plan found at another speed, expired ones, and the oldest of too many.
    """
    measurements = sorted(
        context.snapshot.measurements, key=lambda stored: (stored.created_at, stored.name), reverse=True
    )
    drifted = _drifted(context, measurements)
    expired = [measurement.name for measurement in measurements if _has_expired(context, measurement)]
    left_bytes, too_many = MAX_KEPT_BYTES, list[str]()
    for measurement in measurements:
        if measurement.name not in drifted and measurement.name not in expired:
            left_bytes -= sum(map(len, measurement.data.values()))
            too_many += [measurement.name] if left_bytes < 0 else []
    return tuple(map(DeleteConfigMap, list(dict.fromkeys((*drifted, *expired, *too_many)))[:_MAX_DELETED]))


def _has_expired(context: ReconcileContext, stored: StoredConfigMap) -> bool:
    until = stored_time(stored.annotations.get(EXPIRES_ANNOTATION, ""))
    return until is not None and until <= context.now


def _drifted(context: ReconcileContext, measurements: Iterable[StoredConfigMap]) -> list[str]:
    """Return the profiles of nodes from before the plan found that their speed had changed."""
    former, names = FIRST, list[str]()
    with suppress(documents.DocumentError, NeedsNewerVersion):
        former = former_revision(context)
    if not former.drifted or former.refuted_at is None:
        return names
    for measurement in measurements:
        with suppress(documents.DocumentError, NeedsNewerVersion):
            if measurement.created_at <= former.refuted_at:
                key: KeptProfile = parse_strict(measurement.data.get(KEY_KEY, ""), KeptProfile, measurement.name)
                names += [measurement.name] if key.node[0] in former.drifted else []
    return names
