"""Document of what is carried over when nodes changed and a plan goes on with others.

It is stored with the discovery of the new revision, in one ConfigMap, so that both are there or neither. The former
revision's other ConfigMaps are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Final

from trainwright.bounds import OMITTED_DEFAULT
from trainwright.cluster import Accelerator
from trainwright.document_kind import document
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.search import RequiredProfile
from trainwright_operator.api.status import RefutedStatus, RevisionCause
from trainwright_operator.flow.actions import DeleteConfigMap
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.outcome import OutcomeState, result_in
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.phase import ReconcileContext

FORMER_KEY: Final = "former.json"


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """Profiling run with the ConfigMap of its result. It holds for devices of the same memory and device table."""

    config_map: str
    dtype: Dtype
    accelerator: Accelerator
    run: RequiredProfile


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """Seconds of a checked node over those that were kept of it."""

    node: str
    ratio: float


@document("FormerRevision")
@dataclass(frozen=True, slots=True)
class FormerRevision:
    """Measurements that still hold, device time and plan of the revisions before the present one.

    Attributes:
        change: which nodes changed, or what showed that reused measurements do not hold.
        cause: why the nodes were discovered anew.
        device_seconds: of the trials so far, the gang that the change cut off included; they count against trials.maxDeviceHours.
        running_plan: the last winner, if there was one.
        profiles: profiles that were measured.
        links: ConfigMap with the measured links, if it covers all nodes that are left; else empty.
        refuted_at: when pods showed that reused measurements do not hold; older ones are not reused.
        drifted: nodes that showed it, which are profiled rather than others of their type.
        refuted_images: how often pods showed it by another image.
        refuted_speeds: how often a node showed it by another speed.
        speeds: of nodes that were checked.
    """

    change: str
    device_seconds: float = 0.0
    running_plan: Plan | None = None
    profiles: tuple[MeasuredProfile, ...] = ()
    links: str = ""
    refuted_at: Annotated[datetime | None, OMITTED_DEFAULT] = None
    drifted: Annotated[tuple[str, ...], OMITTED_DEFAULT] = ()
    refuted_images: Annotated[int, OMITTED_DEFAULT] = 0
    refuted_speeds: Annotated[int, OMITTED_DEFAULT] = 0
    speeds: Annotated[tuple[NodeSpeed, ...], OMITTED_DEFAULT] = ()
    cause: Annotated[RevisionCause, OMITTED_DEFAULT] = RevisionCause.NODES

    def profile_maps(self, dtype: Dtype, accelerator: Accelerator, run: RequiredProfile) -> tuple[str, ...]:
        """Return the ConfigMaps with the results of a profiling run: one, or two where a part of it was reused."""
        target = dtype, _unpriced(accelerator), run
        return tuple(
            profile.config_map
            for profile in self.profiles
            if (profile.dtype, _unpriced(profile.accelerator), profile.run) == target
        )

    def speeds_with(self, checked: Mapping[str, float]) -> dict[str, float]:
        """Return the speeds by the name of the node, those of the present revision's checks in the place of former ones."""
        return {speed.node: speed.ratio for speed in self.speeds} | dict(checked)

    def refuted_status(self) -> RefutedStatus | None:
        """Return the entry in the plan's status, or None where all holds that was reused."""
        if not self.refuted_images and not self.refuted_speeds:
            return None
        return RefutedStatus(images=self.refuted_images, speeds=self.refuted_speeds)

    @property
    def kept_maps(self) -> frozenset[str]:
        """Return the ConfigMaps of former revisions that are still read."""
        return frozenset({self.links, *(profile.config_map for profile in self.profiles)})


FIRST: Final = FormerRevision("")
"""Nothing, for the first revision."""


def former_revision(context: ReconcileContext) -> FormerRevision:
    """Return what former revisions left. Raise DocumentError if it was modified."""
    stored = context.snapshot.find(context.names.discovery)
    if stored is None or context.names.revision == 1:
        return FIRST
    former: FormerRevision = parse_strict(stored.data.get(FORMER_KEY, ""), FormerRevision, stored.name)
    return former


def keep_profile(
    context: ReconcileContext, discovery: DiscoveredDevices, config_map: str, dtype: Dtype, run: RequiredProfile
) -> MeasuredProfile | None:
    """Return the entry of a profiling run if that ConfigMap holds its measurement."""
    stored = context.snapshot.find(config_map)
    if stored is None or result_in(stored).outcome.state is not OutcomeState.SUCCEEDED:
        return None
    accelerator = next(accelerator for accelerator in discovery.accelerators if accelerator.name == run.accelerator)
    return MeasuredProfile(config_map, dtype, _unpriced(accelerator), run)


def _unpriced(accelerator: Accelerator) -> Accelerator:
    return replace(accelerator, price_per_hour=None)


def obsolete_maps(context: ReconcileContext) -> tuple[DeleteConfigMap, ...]:
    """Return the deletions of the ConfigMaps of former revisions, save for those that are carried over."""
    names = context.names
    if names.revision == 1:
        return ()
    kept = former_revision(context).kept_maps | {names.discovery}
    former = (
        config_map.name
        for config_map in context.snapshot.stored
        if names.revision_of(config_map.name) and not config_map.terminating
    )
    return tuple(DeleteConfigMap(name) for name in former if not names.owns(name) and name not in kept)
