"""Check of commit subjects: `area: Imperative summary` in at most 72 characters, or `release: 0.2.0`, since `origin/main`."""

from __future__ import annotations

import re
import subprocess
import sys

BASE = "origin/main"
MAX_CHARACTERS = 72
SUBJECT = re.compile(r"(?P<area>[A-Za-z0-9][\w./-]*(, [A-Za-z0-9][\w./-]*)*): (?P<verb>[A-Z][a-z-]+) \S.*[^.]")
RELEASE = re.compile(r"release: \d+\.\d+\.\d+")
NO_VERB = re.compile(r"(?!(Bring|String|Ping|Ring)\b|(Embed|Need|Feed|Seed|Shed|Speed|Exceed|Proceed|Focus|Bias|Alias)\b)"
                     r"\w+(ing|ed|[^s]s)")  # fmt: skip
"""Words with endings that no imperative has: Adding, Added, Adds."""


def complaint(subject: str) -> str | None:
    """Return what is wrong with a subject, or None."""
    if len(subject) > MAX_CHARACTERS:
        return f"{len(subject)} characters; at most {MAX_CHARACTERS}"
    if RELEASE.fullmatch(subject):
        return None
    found = SUBJECT.fullmatch(subject)
    if found is None:
        return "not of the form `area: Imperative summary`, without a full stop"
    if NO_VERB.fullmatch(found["verb"]):
        return f"{found['verb']!r} is not an imperative"
    return None


def subjects(base: str) -> list[tuple[str, str]] | None:
    """Return hash and subject of every commit since the base without merges, or None if the base is missing."""
    if _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") is None:
        return None
    log = _git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD") or ""
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in log.splitlines()]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    found = subjects(BASE)
    if found is None:
        print(f"commit subjects are not checked: there is no {BASE}", file=sys.stderr)
        return
    complaints = [f"{commit} {subject!r}: {what}" for commit, subject in found if (what := complaint(subject))]
    if complaints:
        sys.exit("\n".join(["commit subjects to fix:", *complaints]))


if __name__ == "__main__":
    main()
