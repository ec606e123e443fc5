"""Export to PyTorchJobs of Kubeflow's training operator: a pod for each run of ranks, pinned to its node."""

from __future__ import annotations

from typing import Any, Final

import yaml

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.launch import Agent, agents
from trainwright.exports.target import ExportFile, ExportRequest, comment
from trainwright.exports.torchrun import PLAN_FILE, plan_file

NAME = "trainwright"
PORT = 29500

REASONS: Final = {
    "data:": "the plan as it is: the pods of all jobs mount it",
    "replicas:": "one pod: all replicas of a job would share a template, which cannot pin each to a node of its own",
    "restartPolicy:": "a rank that starts anew cannot join the others",
    "nodeSelector:": "the node on which the plan has these ranks",
    "name: pytorch": "the operator looks for this name",
    "command:": "--node-rank numbers the jobs in the plan's order, so that rank r is its r-th device",
    "nvidia.com/gpu:": "a GPU for each of these ranks",
}
"""Reasons by the beginning of the line that they explain."""


class _Dumper(yaml.SafeDumper):
    """Dumper that writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


class PyTorchJob:
    """Kubeflow's training operator v1.

    A PyTorchJob has one template for all its workers, which cannot name a node for each of them. So every run of ranks is a
    job of its own with a master alone, and torchrun's own arguments join them.
    """

    software = "Kubeflow training operator v1 (PyTorchJob kubeflow.org/v1)"
    preset: str | None = None
    capabilities = Capabilities(every_plan=True)
    remark = (
        "Replace REGISTRY/TRAINING-IMAGE and train.py; rank r of the script is the r-th device of /plan/plan.json. Which GPUs of "
        "a node a pod gets is up to its device plugin. "
        "With a queue (Kueue) each job is a workload of its own, and they may be admitted one by one."
    )

    def files(self, request: ExportRequest) -> tuple[ExportFile, ...]:
        agent_list = agents(request.plan.devices)
        documents = [_config_map(request), *(_job(agent, len(agent_list)) for agent in agent_list)]
        text = "".join(map(_explained, documents))
        return (ExportFile("pytorchjobs.yaml", comment(request.remarks) + text),)


def _explained(document: dict[str, Any]) -> str:
    """Return a document of YAML, with the reasons of its choices at the ends of their lines."""
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True, allow_unicode=True)
    return "".join(f"{line}{_comment_of(line)}\n" for line in text.splitlines())


def _comment_of(line: str) -> str:
    begin = line.lstrip(" -")  # keys of the plan's own JSON are quoted
    return next((f"  # {reason}" for start, reason in REASONS.items() if begin.startswith(start)), "")


def _config_map(request: ExportRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-plan"},
        "data": {PLAN_FILE: plan_file(request).text},
    }


def _job(agent: Agent, count: int) -> dict[str, Any]:
    program = (
        f"exec torchrun --nnodes {count} --node-rank {agent.number} --nproc-per-node {len(agent.slots)} "
        f"--master-addr {NAME}-0-master-0 --master-port {PORT} train.py --plan /plan/{PLAN_FILE}"
    )
    container = {
        "name": "pytorch",
        "image": "REGISTRY/TRAINING-IMAGE",
        "command": ["sh", "-c", program],
        "resources": {"limits": {"nvidia.com/gpu": len(agent.slots)}},
        "volumeMounts": [{"name": "plan", "mountPath": "/plan"}],
    }
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": agent.node},
        "containers": [container],
        "volumes": [{"name": "plan", "configMap": {"name": f"{NAME}-plan"}}],
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": f"{NAME}-{agent.number}",
            "annotations": {"trainwright.dev/ranks": agent.rank_words},
        },
        "spec": {
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod}},
            }
        },
    }
