"""Command that shrinks the guards' allowlists: `python tests/house/shrink_allowlists.py [--accept] [RULE …]`."""

from __future__ import annotations

import argparse

from allowlists import shrink
from rules import RULES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--accept", action="store_true", help="write today's offenders anew: after a scripted move only"
    )
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"some of {', '.join(RULES)}; none for all")
    arguments = parser.parse_args()
    if unknown := set(arguments.rules) - set(RULES):
        parser.error(f"unknown rule: {', '.join(sorted(unknown))}")
    for rule in arguments.rules or RULES:
        print(shrink(rule, accept=arguments.accept))  # noqa: T201 - a command


if __name__ == "__main__":
    main()
