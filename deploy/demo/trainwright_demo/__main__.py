"""`python -m trainwright_demo`: what `make demo` runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from trainwright_demo.install import check_images, install_operator, remove
from trainwright_demo.kubectl import Kubectl
from trainwright_operator.kubectl.client import KubectlError
from trainwright_operator.kubectl.trial_table import final_report
from trainwright_operator.kubectl.watch import Follower, new_console

ROOT = Path(__file__).resolve().parents[3]
FOLLOW_DEADLINE_SECONDS = 1_500.0


def main() -> int:
    arguments = parse_arguments()
    try:
        return run_demo(arguments)
    except KubectlError as error:
        raise SystemExit(str(error)) from None


def run_demo(arguments: argparse.Namespace) -> int:
    console = new_console()
    started = time.monotonic()
    if arguments.context:
        kubectl = Kubectl(context=arguments.context)
        if arguments.remove:
            remove(kubectl, arguments.plan)
            return 0
        check_images()
    else:
        bring_up_local_cluster(arguments.cluster_file)
        kubectl = Kubectl(kubeconfig=ROOT / ".local-cluster" / "kubeconfig")
    console.rule("operator")
    install_operator(kubectl, local=not arguments.context)
    console.rule("TrainingPlan")
    name = kubectl.fresh_apply(arguments.plan)
    follower = Follower(kubectl, name, console)
    resource = follower.until_finished(FOLLOW_DEADLINE_SECONDS)
    console.rule("result")
    succeeded = final_report(resource, console)
    console.print(f"[dim]the demo took {time.monotonic() - started:.0f} s[/dim]")
    where = (
        f"kubectl --context {arguments.context}"
        if arguments.context
        else 'eval "$(.venv/bin/python -m local_cluster env)"; kubectl'
    )
    console.print(f"[dim]to inspect: {where} get trainingplans[/dim]")
    return 0 if succeeded else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="TrainingPlan manifest to apply")
    parser.add_argument("--cluster-file", type=Path, help="description of the local cluster")
    parser.add_argument("--context", help="use this kube context in place of the local cluster")
    parser.add_argument("--remove", action="store_true", help="remove the plan and the operator from that context")
    arguments = parser.parse_args()
    if bool(arguments.context) == bool(arguments.cluster_file):
        parser.error("give --cluster-file for the local cluster or --context for one of yours, not both")
    return arguments


def bring_up_local_cluster(cluster_file: Path) -> None:
    for command in ("up", "load"):
        subprocess.run([sys.executable, "-m", "local_cluster", command, "--file", str(cluster_file)], check=True)


if __name__ == "__main__":
    sys.exit(main())
