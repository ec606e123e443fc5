"""Checks of the worker on the GPUs at hand; prints a table and exits with 1 if any fails."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from gpu_checks.checks import CHECKS
from gpu_checks.findings import Finding, Verdict, as_json, markdown, skipped, summary, text_table
from gpu_checks.hardware import Hardware
from gpu_checks.plan_ranks import GivenPlan
from gpu_checks.running import GRACE_SECONDS, Check, findings_of

MINUTES = 25.0
BAD_INPUT = 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_checks", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program itself")
    parser.add_argument("--small", action="store_true", help="tiny sizes, which say nothing about a device")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help=", ".join(names))
    parser.add_argument("--plan", type=Path, metavar="FILE", help="check ranks of this plan instead, on one GPU")
    parser.add_argument("--model", type=Path, metavar="FILE", help="the training that the plan is for")
    parser.add_argument(
        "--rank",
        type=int,
        nargs="+",
        default=(),
        metavar="N",
        help="ranks of the plan (default: the first of its first and of its last stage)",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all checks together (default {MINUTES:g})")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the table, and FILE.json beside it")
    arguments = parser.parse_args()
    if (arguments.plan is None) is not (arguments.model is None):
        parser.error("give --plan and --model together")
    if arguments.rank and arguments.plan is None:
        parser.error("--rank is of a plan; give --plan and --model")
    if arguments.only and arguments.plan is not None:
        parser.error("--only chooses among the usual checks, and --plan replaces them; give one of them")
    return arguments


def main() -> int:
    """Run the checks. Returns 1 if any fails, 2 if a document cannot be used, else 0."""
    arguments = _arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here; `--device cpu --small` tries the program itself")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        hardware = Hardware(arguments.device, arguments.small, Path(folder))
        try:
            checks = _checks(arguments)
        except OSError as error:
            print(f"{error.filename}: cannot be read: {error.strerror}", file=sys.stderr)
            return BAD_INPUT
        except ValueError as error:
            print(error, file=sys.stderr)
            return BAD_INPUT
        title = f"GPU checks on {hardware.description}"
        print(title, flush=True)
        found = _run(hardware, checks, time.monotonic() + 60 * arguments.minutes)
    print(f"\n{text_table(found)}\n\n{summary(found)}")
    if arguments.write:
        arguments.write.write_text(markdown(title, found), encoding="utf-8")
        arguments.write.with_suffix(".json").write_text(as_json(title, found), encoding="utf-8")
    return int(any(one.verdict is Verdict.FAILS for one in found))


def _checks(arguments: argparse.Namespace) -> list[Check]:
    if arguments.plan is None:
        return [check for check in CHECKS if not arguments.only or check.name in arguments.only]
    given = GivenPlan.read(arguments.plan, arguments.model, arguments.rank)
    return [Check("ranks", 60 * arguments.minutes, given.subjects)]


def _run(hardware: Hardware, checks: list[Check], end: float) -> list[Finding]:
    found: list[Finding] = []
    for check in checks:
        budget = min(check.budget_seconds, end - GRACE_SECONDS - time.monotonic())
        if budget <= 0:
            found.append(skipped("all", "the time for all checks is spent", check=check.name))
            continue
        begin = time.monotonic()
        for finding in findings_of(check, hardware, budget_seconds=budget):
            found.append(finding)
            place = f"[{check.name}, {time.monotonic() - begin:.0f} s] {finding.subject}"
            print(f"{place}: {finding.measured} ({finding.verdict_text})", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
