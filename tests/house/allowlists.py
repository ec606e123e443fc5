"""Allowlists of the guards: known offenders, one per line, whose number may only fall.

`python tests/house/shrink_allowlists.py` takes out what no longer offends. After a scripted move, which gives every
entry another path, `--accept` writes today's offenders anew and reports how many there were and are.
"""

from __future__ import annotations

from pathlib import Path

from rules import RULES

FOLDER = Path(__file__).with_name("allowlists")
COMMAND = "python tests/house/shrink_allowlists.py"


def allowed(rule: str) -> set[str]:
    """Return the entries of a rule's allowlist."""
    path = FOLDER / f"{rule}.txt"
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def complaints(rule: str) -> list[str]:
    """Return a sentence for every new offender, and for every entry that no longer offends."""
    today, before = set(RULES[rule]()), allowed(rule)
    what = rule.replace("_", " ")
    return [
        *(
            f"{place}: new among {what}; mend it (the rule is `{rule}` in tests/house/rules.py)"
            for place in sorted(today - before)
        ),
        *(
            f"{place}: no longer among {what}; remove the entry from tests/house/allowlists/{rule}.txt ({COMMAND})"
            for place in sorted(before - today)
        ),
    ]


def shrink(rule: str, *, accept: bool) -> str:
    """Write a rule's allowlist without the entries that no longer offend; with `accept`, write today's offenders."""
    today, before = set(RULES[rule]()), allowed(rule)
    after = today if accept else before & today
    path = FOLDER / f"{rule}.txt"
    if after:
        path.write_text("".join(f"{place}\n" for place in sorted(after)), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
    return f"{rule}: {len(before)} entries became {len(after)}, {len(today - after)} new offenders"
