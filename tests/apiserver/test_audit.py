"""Audit log of a real API server: the query of the documentation finds who created and changed a plan."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import DOCS, Page
from operator_process import operator, until

QUERY = next(one.text for one in Page(DOCS / "gitops.md").fences if one.language == "bash" and "jq" in one.text)


def rows(log: Path, namespace: str, name: str) -> list[list[str]]:
    """Run the documented query on the log, for another plan."""
    command = QUERY.replace('"team-a"', json.dumps(namespace)).replace('"gpt2"', json.dumps(name))
    done = subprocess.run(
        ["bash", "-c", command.replace("audit.log", str(log))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("jq") is None, reason="the query needs jq")
def test_query_of_the_docs_names_the_users_who_changed_a_plan(
    equipped_api_server: Any, namespace: str, training_plan, tmp_path: Path
) -> None:
    api = equipped_api_server
    plan = training_plan("tiny")
    rights = ("--clusterrole=cluster-admin", "--user=anna@example.org", "--user=ben@example.org")
    api.kubectl("create", "rolebinding", "people", *rights, "--namespace", namespace)
    anna, ben = ("--as=anna@example.org", "--namespace", namespace), ("--as=ben@example.org", "--namespace", namespace)
    api.kubectl("create", *anna, document=plan)
    api.kubectl("create", *anna, document=training_plan("other"))
    with operator(api, namespace, tmp_path):  # which writes the status many times

        def is_accepted() -> bool:
            status = api.get("trainingplan", "tiny", "--namespace", namespace).get("status", {})
            return any(one["type"] == "Accepted" and one["status"] == "True" for one in status.get("conditions", []))

        until("the plan to be accepted", 60, is_accepted)
        api.kubectl("patch", "trainingplan", "tiny", *ben, "--type=merge", "--patch", '{"spec": {"priority": 3}}')
    refused = api.try_kubectl(
        *("patch", "trainingplan", "tiny", "--as=carl@example.org", "--namespace", namespace),
        *("--type=merge", "--patch", '{"spec": {"priority": 9}}'),
    )
    assert refused.returncode != 0
    api.kubectl("delete", "trainingplan", "tiny", *anna)
    found = rows(api.audit_log, namespace, "tiny")
    assert [(verb, user) for _, verb, user, _ in found] == [
        ("create", "anna@example.org"),
        ("patch", "ben@example.org"),
        ("delete", "anna@example.org"),
    ]
    assert all(program.startswith("kubectl/") for *_, program in found)
