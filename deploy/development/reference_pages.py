"""Pages of docs/reference, derived from the CRD, the schemas of documents, the metrics and the files of accelerators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from trainwright import documents
from trainwright.accelerators.cloud_devices import cloud_file
from trainwright.accelerators.data_sheets import data_sheets
from trainwright.accelerators.machines import machines
from trainwright.cli.schema import DOCUMENTS
from trainwright_operator.api import GROUP, KIND, VERSION
from trainwright_operator.api.crd import openapi_schema
from trainwright_operator.metrics import METRIC_DEFINITIONS

Schema = dict[str, Any]
WRITTEN = "<!-- Written by `make generate`; change the code instead. -->\n"
CRD_HEAD = f"""# {KIND}

{WRITTEN}
`{GROUP}/{VERSION}`. `kubectl explain` prints the same. A default of *required* means that the field must be set; *absent* means
that it may be left out.
"""
DOCUMENTS_HEAD = f"""# Documents

{WRITTEN}
`trainwright schema NAME` prints the JSON schema of a document. Documents are YAML or JSON. Numbers have no unit; the name of a field
ends with it. Every document may name its kind (`document`) and its `apiVersion`.
"""
ACCELERATORS_HEAD = f"""# Accelerators

{WRITTEN}
`trainwright accelerators NAME` prints every figure with its source; case and separators of names do not count.
[Add an accelerator](../adding-an-accelerator.md) says where they come from.

Formats are those that its units compute natively. Of the kernels of PyTorch's fused attention `flash` and `cudnn` take half formats
only.
"""
CLOUDS_HEAD = """## Nodes without a product label

What stands for a device where nothing on the node names it: a label of the cloud's Kubernetes, or the machine type
(`node.kubernetes.io/instance-type`).
"""
_FIELDS_HEAD = "| field | type | default | meaning |\n| --- | --- | --- | --- |"


def metrics_page() -> str:
    """Return the page of all metrics."""
    rows = [
        f"| `{name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {_cell(metric.help)} |"
        for name, metric in METRIC_DEFINITIONS.items()
    ]
    table = "\n".join(["| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows])
    return f"# Metrics\n\n{WRITTEN}\nThe operator exports these on port 9090 at `/metrics`.\n\n{table}\n"


def accelerators_page() -> str:
    """Return the page of all accelerators, and of what clouds call them."""
    sheets = [
        f"| {sheet.name} | {', '.join(sheet.aliases)} | {sheet.memory_bytes.value / 2**30:.1f} "
        f"| {', '.join(sheet.generation_sheet.formats.values)} | {', '.join(sheet.generation_sheet.attention_kernels.values)} |"
        for sheet in data_sheets()
    ]
    heads = ["| accelerator | also | GiB | native formats | attention kernels |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([ACCELERATORS_HEAD, *heads, *sheets, "", CLOUDS_HEAD, *_cloud_rows(), ""])


def _cloud_rows() -> Iterator[str]:
    cloud = cloud_file()
    names: dict[str, list[str]] = {}
    for label in cloud.labels:
        for value, device in label.devices.items():
            names.setdefault(device, []).append(f"`{label.label}={value}`")
    for machine in machines():
        names.setdefault(machine.accelerator, []).append(f"`{machine.name}`")
    for types in cloud.machine_types:
        names.setdefault(types.device, []).extend(f"`{name}`" for name in types.names)
    yield from ("| accelerator | labels and machine types |", "| --- | --- |")
    for device, found in sorted(names.items()):
        yield f"| {device} | {', '.join(dict.fromkeys(found))} |"


def crd_page() -> str:
    """Return the page of every field of a TrainingPlan: one table per object."""
    schema = openapi_schema()["properties"]
    parts = [CRD_HEAD]
    for root in ("spec", "status"):
        for path, one in _objects(root, schema[root]):
            parts.append(f"## `{path}`\n\n{_cell(one.get('description', ''))}\n\n{_crd_table(one)}\n")
    return "\n".join(parts)


def _objects(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        inner, suffix = (field["items"], "[]") if field.get("type") == "array" else (field, "")
        if inner.get("properties") and not inner.get("x-kubernetes-preserve-unknown-fields"):
            yield from _objects(f"{path}.{name}{suffix}", inner)


def _crd_table(schema: Schema) -> str:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field, is_required=name in required)} "
        f"| {_cell(field.get('description', ''))} |"
        for name, field in schema["properties"].items()
    ]
    return "\n".join([_FIELDS_HEAD, *rows])


def documents_page() -> str:
    """Return the page of the documents that the command line reads and writes."""
    parts = [DOCUMENTS_HEAD]
    for name, noun in DOCUMENTS.items():
        schema = documents.schema(noun)
        parts.append(f"## {name}\n\n{_object_section(schema)}\n")
        for kind, inner in schema.get("$defs", {}).items():
            if "enum" in inner:
                parts.append(f"### {name}: {kind}\n\n{_type(inner)}. {_summary(inner)}\n")
            else:
                parts.append(f"### {name}: {kind}\n\n{_object_section(inner)}\n")
    return "\n".join(parts)


def _object_section(schema: Schema) -> str:
    meanings = dict(_attributes(schema.get("description", "")))
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field, is_required=name in required)} "
        f"| {_cell(field.get('description', meanings.get(name, '')))} |"
        for name, field in schema.get("properties", {}).items()
        if name not in ("apiVersion", "document")
    ]
    return "\n".join([_summary(schema), "", _FIELDS_HEAD, *rows])


def _summary(schema: Schema) -> str:
    return _cell(schema.get("description", "").split("\n\n")[0])


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield name and meaning of each entry in a docstring's `Attributes:`."""
    _, _, block = docstring.partition("Attributes:\n")
    for entry in re.split(r"\n(?=    \w)", f"\n{block}"):
        name, _, meaning = entry.strip().partition(":")
        if meaning:
            yield name, meaning.strip()


def _type(field: Schema) -> str:
    """Return the type of a field in a few words, with its bounds."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if several := field.get("anyOf", field.get("oneOf")):
        return " or ".join(_type(one) for one in several if one != {"type": "null"})
    if values := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{value}`" for value in values)
    kind = field.get("type", "any")
    if kind == "array":
        items = field.get("items") or next(iter(field.get("prefixItems", [])), {})
        return f"list of {_type(items)}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map to {_type(field['additionalProperties'])}"
    return f"{kind}{_bounds(field)}"


def _bounds(field: Schema) -> str:
    least, most = field.get("minimum"), field.get("maximum")
    if field.get("type") not in ("integer", "number") or (least is None and most is None):
        return ""
    if most is None:
        return f" ≥ {least}"
    return f" ≤ {most}" if least is None else f" {least} … {most}"


def _default(field: Schema, *, is_required: bool) -> str:
    if is_required:
        return "*required*"
    default = field.get("default")
    if isinstance(default, dict) and field.get("properties"):
        return "see below"
    return "*absent*" if default is None else _cell(f"`{json.dumps(default, ensure_ascii=False)}`")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


PAGES: dict[str, Callable[[], str]] = {
    "accelerators.md": accelerators_page,
    "crd.md": crd_page,
    "documents.md": documents_page,
    "metrics.md": metrics_page,
}
"""Generated pages by their name in docs/reference."""
