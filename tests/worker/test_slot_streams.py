"""A link of which one connection reaches a part, measured through a shaped loopback in a namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from trainwright.worker_api import LinkTask

STREAM_BYTES_PER_SECOND = 25e6
CLASSES = 4096
"""Classes by source port, each with a rate of its own; two connections of a test share one in 4,096 runs."""
FIRST_CLASS = 16


def shaped_loopback() -> str:
    """Return tc commands that give the connections of each source port their own rate."""
    rate = f"{STREAM_BYTES_PER_SECOND * 8:.0f}bit"
    lines = [
        "qdisc replace dev lo root handle 1: htb default 1 r2q 1000",
        "class add dev lo parent 1: classid 1:1 htb rate 10gbit",
    ]
    for number in range(CLASSES):
        name = f"1:{number + FIRST_CLASS:x}"
        source_port = f"match ip protocol 6 0xff match u16 {number:#x} {CLASSES - 1:#x} at 20"
        lines += [
            f"class add dev lo parent 1: classid {name} htb rate {rate} burst 128k cburst 128k",
            f"filter add dev lo parent 1: protocol ip prio 1 u32 {source_port} flowid {name}",
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def namespace() -> Iterator[str]:
    """Name of a network namespace with the shaped loopback, and nothing else."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, ip and tc")
    name = f"trainwright-streams-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-netns", name, "link", "set", "lo", "up"], check=True)
        made = subprocess.run(
            ["tc", "-netns", name, "-batch", "-"], input=shaped_loopback(), text=True, capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"this kernel shapes no classes: {made.stderr.splitlines()[-1]}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(180)
def test_slots_reach_together_what_one_connection_does_not(worker, make, namespace: str) -> None:
    outcome = worker.local(LinkTask(make.gang(2, 2)), prefix=("ip", "netns", "exec", namespace))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    between = [link for link in report.links if link.source != link.target]
    assert len(between) == 2
    for link in between:  # a machine that stalls during a message errs by more than the shaping does
        assert link.flow_bytes_per_second == pytest.approx(STREAM_BYTES_PER_SECOND, rel=0.3)
        assert 1.5 < link.bandwidth_bytes_per_second / link.flow_bytes_per_second < 2.5
