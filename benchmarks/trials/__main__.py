"""`make bench-trials`: bring up the cluster, measure links and layers, predict, try, compare."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from local_cluster.config import ClusterConfig, read_config
from trainwright import documents
from trainwright.profiles import Profiles
from trainwright.worker_api import TrialSeriesReport, TrialSeriesTask
from trainwright_demo.__main__ import ROOT, bring_up_local_cluster
from trainwright_demo.kubectl import Kubectl
from trials.accuracy import PlanTrial, keep, show
from trials.plans import ChosenPlan, chosen_plans, sharded_plans
from trials.pods import Bench, bench_on
from trials.settings import (
    CLUSTER_FILE,
    OPERATOR_SETTINGS,
    OPERATORS_FILE,
    SETTINGS,
    MeasuredCluster,
    TrialScenario,
    gang,
    measure_cluster,
    measured_profiles,
)

RESULTS = Path(__file__).resolve().parents[1] / "results"
AT_ONCE = 5
"""Plans in one gang, small so that a failure affects few."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=22, help="plans of each setting (default 22)")
    parser.add_argument(
        "--talkative", type=int, default=10, help="at least this many that communicate much (default 10)"
    )
    parser.add_argument(
        "--operators", action="store_true", help="only plans that shard operators, on a cluster of their own"
    )
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--keep-cluster", action="store_true", help="leave the cluster up")
    parser.add_argument("--out", type=Path, help="the table (default trials.csv or operator_trials.csv of the results)")
    parser.add_argument("--measured", type=Path, help="a folder for the measured links and profiles")
    arguments = parser.parse_args()
    console = Console(width=150) if not sys.stdout.isatty() else Console()
    cluster_file, settings = (OPERATORS_FILE, OPERATOR_SETTINGS) if arguments.operators else (CLUSTER_FILE, SETTINGS)
    out = arguments.out or RESULTS / ("operator_trials.csv" if arguments.operators else "trials.csv")
    shape = read_config(cluster_file)
    bring_up_local_cluster(cluster_file)
    tried: list[PlanTrial] = []
    try:
        with bench_on(Kubectl(kubeconfig=ROOT / ".local-cluster" / "kubeconfig")) as bench:
            for number, setting in enumerate(settings, 1):
                console.print(f"{setting.name}: measuring links and collectives")
                surroundings = measure_cluster(bench, shape, setting)
                console.print(f"profiling layers; {surroundings.runtime.collective_ratios}")
                profiles = measured_profiles(bench, shape, setting)
                if arguments.measured:
                    _keep_measured(arguments.measured, number, surroundings, profiles)
                count = arguments.plans
                plans = (
                    sharded_plans(setting, surroundings, profiles, count=count)
                    if arguments.operators
                    else chosen_plans(setting, surroundings, profiles, count=count, talkative=arguments.talkative)
                )
                tried += Trials(bench, setting, shape, arguments.iterations, console).of(plans)
                show(setting, [one for one in tried if one.setting is setting], console)
                keep(tried, out)
    finally:
        if not arguments.keep_cluster:
            subprocess.run([sys.executable, "-m", "local_cluster", "down", "--file", str(cluster_file)], check=False)
    return 0


def _keep_measured(folder: Path, number: int, surroundings: MeasuredCluster, profiles: Profiles) -> None:
    """Write the documents that the predictions were made from."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in (
        ("cluster", surroundings.cluster), ("runtime", surroundings.runtime), ("profiles", profiles)
    ):  # fmt: skip
        (folder / f"{number}-{name}.json").write_text(documents.dumps(document), encoding="utf-8")


@dataclass(frozen=True)
class Trials:
    """Trials of one scenario's plans."""

    bench: Bench
    setting: TrialScenario
    shape: ClusterConfig
    iterations: int
    console: Console

    def of(self, plans: list[ChosenPlan]) -> list[PlanTrial]:
        """Run the plans' trials.

        A Void trial (ran, does not count) is retried once, since transient load may be the cause.
        """
        found = self._in_gangs(plans)
        void = [one.chosen for one in found if one.is_void]
        if void:
            self.console.print(f"{len(void)} came late; once more")
            again = {id(one.chosen): one for one in self._in_gangs(void)}
            found = [again.get(id(one.chosen), one) for one in found]
        return found

    def _in_gangs(self, plans: list[ChosenPlan]) -> list[PlanTrial]:
        """Try the plans in gangs of `AT_ONCE`; report and skip a gang that fails."""
        found: list[PlanTrial] = []
        for start in range(0, len(plans), AT_ONCE):
            some = plans[start : start + AT_ONCE]
            self.console.print(f"trying plans {start + 1} … {start + len(some)} of {len(plans)}")
            order = TrialSeriesTask(
                gang(self.shape, self.setting.nodes, deadline_seconds=900.0), self.setting.model,
                tuple(one.plan for one in some), warmup_iterations=2, iterations=self.iterations, timeline=True,
            )  # fmt: skip
            try:
                report = self.bench.run(order)
            except RuntimeError as error:
                self.console.print(f"[red]these plans gave no figures: {error}[/red]")
                continue
            assert isinstance(report, TrialSeriesReport)
            found += [PlanTrial(self.setting, chosen, trial) for chosen, trial in zip(some, report.trials, strict=True)]
        return found


if __name__ == "__main__":
    sys.exit(main())
