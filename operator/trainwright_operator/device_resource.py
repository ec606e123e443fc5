"""Conversion of ResourceSlices, DeviceClasses and ResourceClaims as the API server shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from sys import intern
from typing import Any, Final

from trainwright.outside.plain_text import plain_line
from trainwright_operator.api.quantities import parse_quantity
from trainwright_operator.flow.nodes.device_classes import DeviceClass, Value, classes_by_resource
from trainwright_operator.flow.nodes.published_devices import Allocation, DeviceName, PoolPart, PublishedDevice

API_VERSION: Final = "resource.k8s.io/v1"
_PCI_ADDRESS: Final = "resource.kubernetes.io/pciBusID"
_REFUSING_TAINTS: Final = ("NoSchedule", "NoExecute")
_FOR_A_POD: Final = "resource.kubernetes.io/extended-resource-claim"
"""Annotation of the claim that the scheduler makes for a pod that asks for a class's resource."""
_SHARED: Final = (
    "several claims may share each of its devices (allowMultipleAllocations in its ResourceSlice); have its driver publish "
    "devices that one claim takes whole"
)


def has_accelerators(resource_slice: dict[str, Any]) -> bool:
    """Return whether a slice has devices with the name of a product; NICs and others have none."""
    devices = (resource_slice.get("spec") or {}).get("devices") or []
    return any("productName" in (device.get("attributes") or {}) for device in devices)


def pool_part(resource_slice: dict[str, Any], classes: Mapping[str, DeviceClass]) -> PoolPart:
    """Convert a slice, with the resources that classes give its devices. What is no accelerator is left out."""
    spec = resource_slice.get("spec") or {}
    pool = spec.get("pool") or {}
    driver, name = intern(spec.get("driver", "")), intern(pool.get("name", ""))
    devices = []
    for device in spec.get("devices") or []:
        node = spec.get("nodeName") or device.get("nodeName")
        if node and "productName" in (device.get("attributes") or {}):
            devices.append(_published(device, DeviceName(driver, name, device.get("name", "")), intern(node), classes))
    return PoolPart(driver, name, pool.get("generation", 0), tuple(devices))


def pool_parts(slices: Iterable[dict[str, Any]], classes: Mapping[str, DeviceClass]) -> list[PoolPart]:
    return [pool_part(device_slice, classes) for device_slice in slices]


def _published(
    device: dict[str, Any], name: DeviceName, node: str, classes: Mapping[str, DeviceClass]
) -> PublishedDevice:
    attributes = _attributes(device, name.driver)

    def said(attribute: str) -> str:
        return intern(plain_line(str(attributes.get(f"{name.driver}/{attribute}", ""))))

    capacity, counters = device.get("capacity") or {}, device.get("consumesCounters") or []
    memory = (capacity.get("memory") or {}).get("value")
    amount, problem = _memory(memory) if memory else (None, "")
    names = (f"{name.driver}/{name.pool}/{counter['counterSet']}" for counter in counters)
    address = attributes.get(_PCI_ADDRESS)
    hardware = {said("uuid"), said("parentUUID"), f"{node}/{address}" if address else "", *names} - {""}
    type_ = said("type")
    return PublishedDevice(
        name,
        node,
        said("productName"),
        amount,
        type_,
        frozenset(map(intern, hardware)),
        is_cut=not counters and (bool(said("parentUUID")) or type_ == "amdgpu-partition"),
        is_tainted=any(taint.get("effect") in _REFUSING_TAINTS for taint in device.get("taints") or []),
        resource_names=tuple(
            resource_name
            for resource_name, named_class in classes.items()
            if named_class.selects(name.driver, attributes)
        ),
        problem=plain_line(problem) or (_SHARED if _is_shared(device) else ""),
        driver_version=said("driverVersion"),
    )


def _attributes(device: dict[str, Any], driver: str) -> dict[str, Value]:
    """Return a device's attributes by qualified name; those without a domain are the driver's."""
    attributes: dict[str, Value] = {}
    for name, holder in (device.get("attributes") or {}).items():
        value = next((value for value in holder.values() if isinstance(value, (str, bool, int))), None)
        if value is not None:
            attributes[name if "/" in name else f"{driver}/{name}"] = value
    return attributes


def _memory(text: str) -> tuple[int, str]:
    """Return a device's memory in bytes, and what is wrong with it."""
    try:
        amount = parse_quantity(text)
    except ValueError as error:
        return 0, f"its ResourceSlice has an invalid device memory: {error}"
    return amount, "" if amount > 0 else f"its ResourceSlice has an invalid device memory: {text}"


def _is_shared(device: dict[str, Any]) -> bool:
    """Return whether a claim that asks for no amounts leaves a part of the device to other claims."""
    if not device.get("allowMultipleAllocations"):
        return False

    def is_taken_whole(capacity: dict[str, Any]) -> bool:
        default = (capacity.get("requestPolicy") or {}).get("default")
        try:
            return default is None or parse_quantity(default) >= parse_quantity(capacity["value"])
        except ValueError:
            return False

    return not any(is_taken_whole(capacity) for capacity in (device.get("capacity") or {}).values())


def device_class(resource: dict[str, Any]) -> DeviceClass | None:
    """Convert a DeviceClass, or return None if it gives its devices no name of a resource."""
    meta, spec = resource["metadata"], resource.get("spec") or {}
    resource_name = spec.get("extendedResourceName")
    if not resource_name:
        return None
    expressions = [(selector.get("cel") or {}).get("expression", "") for selector in spec.get("selectors") or []]
    read_class = DeviceClass.of(meta["name"], resource_name, meta.get("creationTimestamp") or "", expressions)
    return replace(read_class, problem=plain_line(read_class.problem))


def device_classes(resources: Iterable[dict[str, Any]]) -> dict[str, DeviceClass]:
    """Convert DeviceClasses, and return the one that counts for each resource."""
    classes = map(device_class, resources)
    return classes_by_resource(each for each in classes if each is not None)


def allocations(claims: list[dict[str, Any]]) -> Iterator[Allocation]:
    """Convert the allocated claims. Administrative access holds no device."""
    for claim in claims:
        meta, allocation = claim["metadata"], (claim.get("status") or {}).get("allocation") or {}
        results = (allocation.get("devices") or {}).get("results") or []
        devices = tuple(
            DeviceName(result["driver"], result["pool"], result["device"])
            for result in results
            if not result.get("adminAccess")
        )
        if devices:
            is_for_pod = (meta.get("annotations") or {}).get(_FOR_A_POD) == "true"
            owners = (
                owner["uid"] for owner in meta.get("ownerReferences") or [] if owner["kind"] == "Pod" and is_for_pod
            )
            yield Allocation(next(owners, ""), devices)
