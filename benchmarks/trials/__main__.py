"""`make bench-trials`: bring up the cluster, measure links and layers, predict, try, compare."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from local_cluster.shape import read_shape
from trainwright import documents
from trainwright.orders import SeriesOrder, SeriesReport
from trainwright_demo.__main__ import ROOT, bring_up_local_cluster
from trainwright_demo.kubectl import Kubectl
from trials.accuracy import Tried, keep, show
from trials.plans import chosen_plans
from trials.pods import Bench, bench_on
from trials.settings import CLUSTER_FILE, SETTINGS, Setting, gang, measured_cluster, measured_profiles, part_of

RESULTS = Path(__file__).resolve().parents[1] / "results" / "trials.csv"
AT_ONCE = 5
"""Plans in one gang, so that one that fails takes few others with it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=22, help="plans of each setting (default 22)")
    parser.add_argument("--talkative", type=int, default=9, help="at least so many that communicate much (default 9)")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--keep-cluster", action="store_true", help="leave the cluster up")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    console = Console(width=150) if not sys.stdout.isatty() else Console()
    shape = read_shape(CLUSTER_FILE)
    bring_up_local_cluster(CLUSTER_FILE)
    tried: list[Tried] = []
    try:
        with bench_on(Kubectl(kubeconfig=ROOT / ".local-cluster" / "kubeconfig")) as bench:
            console.print("measuring links")
            cluster = measured_cluster(bench, shape)
            for setting in SETTINGS:
                console.print(f"profiling layers: {setting.name}")
                profiles = measured_profiles(bench, shape, setting)
                arguments.out.with_suffix(f".{len(tried)}.profiles.json").write_text(
                    documents.dumps(profiles), encoding="utf-8"
                )
                part = part_of(cluster, setting.nodes)
                arguments.out.with_suffix(f".{len(tried)}.cluster.json").write_text(
                    documents.dumps(part), encoding="utf-8"
                )
                plans = chosen_plans(setting, part, profiles, count=arguments.plans, talkative=arguments.talkative)
                tried += _try(bench, setting, plans, arguments.iterations, console)
                show(setting, [one for one in tried if one.setting is setting], console)
                keep(tried, arguments.out)
    finally:
        if not arguments.keep_cluster:
            subprocess.run([sys.executable, "-m", "local_cluster", "down", "--file", str(CLUSTER_FILE)], check=False)
    return 0


def _try(bench: Bench, setting: Setting, plans: list, iterations: int, console: Console) -> list[Tried]:
    """The plans in gangs of several; a gang that fails is told and left out."""
    shape = read_shape(CLUSTER_FILE)
    found = []
    for start in range(0, len(plans), AT_ONCE):
        some = plans[start : start + AT_ONCE]
        console.print(f"trying plans {start + 1} … {start + len(some)} of {len(plans)}")
        order = SeriesOrder(
            gang(shape, setting.nodes, deadline_seconds=900.0), setting.model, tuple(one.plan for one in some),
            warmup_iterations=2, iterations=iterations,
            timeline=True,
        )  # fmt: skip
        try:
            report = bench.run(order)
        except RuntimeError as error:
            console.print(f"[red]these plans gave no figures: {error}[/red]")
            continue
        assert isinstance(report, SeriesReport)
        found += [Tried(setting, chosen, trial) for chosen, trial in zip(some, report.trials, strict=True)]
    return found


if __name__ == "__main__":
    sys.exit(main())
