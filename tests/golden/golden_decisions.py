"""Traces of `decide`: the actions of every reconciliation of simulated runs as a digest and a summary, messages separately.

`python tests/golden/golden_decisions.py FOLDER` writes every action in full, to explain a changed digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "operator" / "simulation")]

import subjects as s
from flow_scenarios import SCENARIOS
from flow_world import START, World

FILE = Path(__file__).with_name("decisions.json")
MESSAGE_KEYS = {"message", "text", "what"}
MESSAGE_PATHS = {"excludedNodes": "reason"}
"""A list under this key has messages in the field named here."""
MESSAGE_LISTS = {"unlikeKinds"}
Trace = list[dict[str, Any]]


def trace(scenario: str) -> Trace:
    """Return one entry for each pass of a scenario: seconds since the start, summaries, digest, and new messages."""
    entries: Trace = []
    known: dict[str, str] = {}
    for actions, seconds in passes(scenario):
        messages: dict[str, str] = {}
        plain = [_without_messages(action, _subject(action), messages) for action in actions]
        news = {path: message for path, message in messages.items() if known.get(path) != message}
        known.update(news)
        entry = {
            "seconds": seconds,
            "actions": [line for action in plain for line in _summary(action)],
            "digest": hashlib.sha256(_canonical(plain).encode()).hexdigest()[:16],
        }
        entries.append(entry | ({"messages": news} if news else {}))
    return entries


def passes(scenario: str) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """Yield the actions of every call of `decide` as plain data, with the seconds since the start."""
    found: list[tuple[list[dict[str, Any]], float]] = []

    def watch(world: World) -> World:
        def decide() -> list[Any]:
            actions = s.decide(world.snapshot(), world.now)
            found.append(([_action(one) for one in actions], (world.now - START).total_seconds()))
            return actions

        world.decide = decide  # type: ignore[method-assign]
        return world

    SCENARIOS[scenario](watch)
    yield from found


def _action(action: Any) -> dict[str, Any]:
    return {"action": s.ACTION_NAMES[type(action)], **_plain_fields(action)}


def _plain_fields(noun: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(noun, field.name)) for field in fields(noun)}


def _plain(value: Any) -> Any:  # noqa: PLR0911 - a kind of value each
    """Return plain data; documents inside strings are opened, so that their messages are found."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return _document(value) if value.startswith("{") else value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        return _rounded(value)
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, Sequence):
        return [_plain(member) for member in value]
    return _plain(value.dump()) if hasattr(value, "dump") else value


def _rounded(value: float | str) -> float:
    """Return the number without its last digits, which depend on the CPU: BLAS has a kernel for each kind."""
    return float(f"{float(value):.12g}")


def _document(value: str) -> Any:
    """Return an opened document, unless its text is not the canonical one: then the text counts."""
    opened = json.loads(value)
    for separators in ((",", ":"), (", ", ": ")):
        for keys_are_sorted in (False, True):
            for is_ascii in (False, True):
                if json.dumps(opened, separators=separators, sort_keys=keys_are_sorted, ensure_ascii=is_ascii) == value:
                    return {"json": json.loads(value, parse_float=_rounded)}
    return value


def _without_messages(value: Any, path: str, messages: dict[str, str]) -> Any:
    """Return the value with empty messages, which go into `messages` by their path."""
    if isinstance(value, list):
        return [_without_messages(member, f"{path}[{_key(member, at)}]", messages) for at, member in enumerate(value)]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, member in value.items():
        where = f"{path}.{key}"
        if key in MESSAGE_KEYS and isinstance(member, str):
            messages[where] = member
            found[key] = ""
        elif key in MESSAGE_PATHS:
            field = MESSAGE_PATHS[key]
            messages |= {f"{where}[{one['name']}].{field}": one[field] for one in member}
            found[key] = [{**one, field: ""} for one in member]
        elif key in MESSAGE_LISTS:
            messages |= {f"{where}[{at}]": one for at, one in enumerate(member)}
            found[key] = len(member)
        else:
            found[key] = _without_messages(member, where, messages)
    return found


def _key(member: Any, at: int) -> Any:
    return next((member[name] for name in ("type", "name") if name in member), at) if isinstance(member, dict) else at


def _subject(action: dict[str, Any]) -> str:
    named = action.get("name") or action.get("reason")
    return f"{action['action']} {named}" if named else str(action["action"])


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _summary(action: dict[str, Any]) -> Iterator[str]:
    """Yield a readable line, or for a status one for phase, conditions, progress and trials."""
    kind, status = action["action"], action.get("status")
    if kind == "set status":
        progress = status.get("progress")
        yield f"{kind}: {status.get('phase')}" + (f" {progress['done']}/{progress['total']}" if progress else "")
        begun = [one for one in status["conditions"] if one["reason"] != "NotStarted"]
        yield " ".join(f"{one['type']}={one['status']}/{one['reason']}" for one in begun)
        if status.get("trials"):
            yield " ".join(f"{one['name']}={one['state']}/{one.get('reason')}" for one in status["trials"])
        return
    known = [action[name] for name in ("name", "role", "gang", "node", "type", "reason") if action.get(name)]
    if "manifest" in action:
        known.append(action["manifest"]["metadata"]["name"])
    if "data" in action:
        known.append(",".join(action["data"]))
    yield " ".join([f"{kind}:", *known])


def record() -> dict[str, Trace]:
    """Return the traces of all scenarios."""
    return {name: trace(name) for name in SCENARIOS}


def text(traces: dict[str, Trace]) -> str:
    """Return the file's text: a line for each pass, and its messages on lines of their own."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: [\n{_lines(trace)}\n]" for name, trace in traces.items()) + "\n}\n"


def _lines(trace: Trace) -> str:
    lines = []
    for entry in trace:
        structure = {key: value for key, value in entry.items() if key != "messages"}
        line = json.dumps(structure, ensure_ascii=False)
        if "messages" in entry:
            told = ",\n".join(
                f"  {json.dumps(path)}: {json.dumps(message, ensure_ascii=False)}"
                for path, message in entry["messages"].items()
            )
            line = f'{line[:-1]}, "messages": {{\n{told}\n}}}}'
        lines.append(line)
    return ",\n".join(lines)


def stored() -> dict[str, Trace]:
    """Return the traces of the file."""
    found: dict[str, Trace] = json.loads(FILE.read_text())
    return found


def write_in_full(folder: Path) -> None:
    """Write the actions of every scenario, in full, to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCENARIOS:
        found = [{"seconds": seconds, "actions": actions} for actions, seconds in passes(name)]
        path = folder / f"{name.replace(' ', '-')}.json"
        path.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False))


if __name__ == "__main__":
    write_in_full(Path(sys.argv[1]))
