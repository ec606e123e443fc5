"""Plain data of YAML or JSON text, within bounds that a short text cannot exceed by aliases."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

MAX_YAML_BYTES = 8 * 2**20
"""Maximum length of YAML, which is read at about a megabyte a second; longer documents must be JSON."""
MAX_YAML_VALUES = 1_000_000
"""Maximum number of values, with an alias counted at every use: a few lines can expand to gigabytes."""


def plain_data(text: str | bytes) -> Any:
    """Return the plain data of a YAML or JSON text. Raises ValueError with one sentence on what is wrong."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _load_yaml(text)


def _load_yaml(text: str | bytes) -> Any:
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"not JSON, and for YAML longer than {MAX_YAML_BYTES} bytes; write it as JSON")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        values = 0 if node is None else _values(node, {})
        data = None if node is None or values > MAX_YAML_VALUES else loader.construct_document(node)
    except _UNREADABLE as error:
        problem = " ".join(_YAML_PLACE.sub(" in", str(error)).split())
        raise ValueError(f"neither YAML nor JSON: {problem or type(error).__name__}") from None
    if values > MAX_YAML_VALUES:
        raise ValueError(f"aliases (*name) expand to more than {MAX_YAML_VALUES} values; write it as JSON")
    return data


_YAML_PLACE = re.compile(r' in "<(byte|unicode) string>",')
"""PyYAML's name for a text that is not a file; the sentence begins with the file already."""

_UNREADABLE = (
    yaml.YAMLError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    TypeError,
    RecursionError,
)
"""Errors that PyYAML raises for malformed text; a wrong value under an explicit tag (`!!int x`) can raise any of them."""


def _values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values of a YAML node. Raises ValueError for a list or mapping that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = -1
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
            inside = sum(_values(key, counts) + _values(value, counts) for key, value in node.value)
        else:
            inside = sum(_values(member, counts) for member in node.value)
        counts[id(node)] = 1 + inside
    if counts[id(node)] < 0:
        raise ValueError(f"the alias in line {node.start_mark.line + 1} contains itself")
    return counts[id(node)]


_MERGE_TAG = "tag:yaml.org,2002:merge"
"""Tag of `<<`, which may be given more than once."""


def _refuse_repeated_keys(mapping: yaml.MappingNode) -> None:
    """Raise ValueError for a key that is written twice, of which PyYAML would drop the first in silence."""
    line_of: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in line_of:
                raise ValueError(f"the key {key.value!r} is given twice, in lines {line_of[name]} and {line}; keep one")
            line_of[name] = line
