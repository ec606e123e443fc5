"""Several GPUs of this machine: plans compared with one process, links, and a whole trial of data and of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.hardware import Hardware
from gpu_checks.plan_gangs import gang_subjects
from gpu_checks.running import Subject
from gpu_checks.whole_trials import here, predicted_trial_findings, trial_findings, uniform_plan
from gpu_checks.worker_commands import NETWORK, NODE, WorkerCommands
from trainwright.cluster import Accelerator, Cluster, Link, Node, Port
from trainwright.families import Gpt
from trainwright.library import find_plans
from trainwright.model import Model
from trainwright.search import Limits, Problem, required_profiles
from trainwright.worker_api import LinkReport, LinkTask

MAX_GPUS = 8
DEMO_ROWS, DEMO_TENSOR_DEGREE = 32, 2
"""Batch and limit of `deploy/examples/gpt2-small-emulated.yaml`, with its model."""
ROWS, MICRO_BATCHES = 8, 4


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield what needs a GPU for each process."""
    if hardware.is_gpu and hardware.count < 2:
        yield Subject("several GPUs", lambda: [skipped("several GPUs", "there is one")])
        return
    count = max(min(hardware.count, MAX_GPUS), 2)
    machine = Machine(hardware, count)
    yield Subject("links", machine.links)
    yield Subject("the demo's plan", machine.demo)
    yield Subject("GPT-2 small, data 2", partial(machine.trial, "data 2", data=2))
    yield Subject("GPT-2 small, 2 stages", partial(machine.trial, "2 stages", data=1))
    yield from gang_subjects(hardware, hardware.backend, count, share_device=False)


@dataclass(frozen=True)
class Machine:
    """Devices of this machine and the links between them."""

    hardware: Hardware
    count: int

    @cached_property
    def measured_links(self) -> tuple[Link, ...]:
        commands = WorkerCommands(self.hardware)
        report = commands.report_of(LinkTask(commands.gang(self.count)))
        if not isinstance(report, LinkReport):
            raise TypeError(f"the worker answered a links order with a {report.kind} report")
        return report.links

    def links(self) -> Iterator[Finding]:
        """Yield the links; a data sheet's rate is of the whole interconnect, which one pair may not reach."""
        for link in self.measured_links:
            measured = f"{link.bandwidth_bytes_per_second / 1e9:.3g} GB/s, {1e6 * link.latency_seconds:.3g} µs"
            sheet = self.hardware.sheet
            if sheet is None:
                yield skipped("link within the machine", f"there is no data sheet of {self.hardware.name}", measured)
                continue
            rate = sheet.link_bytes_per_second.value
            holds = 0 < link.bandwidth_bytes_per_second <= 1.05 * rate
            expected = f"at most the {rate / 1e9:.3g} GB/s of {sheet.link}"
            yield judged("link within the machine", measured, expected, holds=holds)

    def trial(self, way: str, *, data: int) -> Iterator[Finding]:
        """Try GPT-2 small on two devices, predicted from the measured link."""
        gpt = Gpt(2, 64, 4, 32, 256) if self.hardware.small else Gpt(12, 768, 12, 1024, 50257)
        model = Model.of(gpt, self.hardware.half)
        plan = uniform_plan(len(model.layers), here(2), data=data, rows=ROWS, micro_batches=MICRO_BATCHES)
        yield from trial_findings(f"GPT-2 small, {way}", self.hardware, model, plan, self._inside)

    def demo(self) -> Iterator[Finding]:
        """Search on these devices for the model of the demo, as its example plan does, and try the winner."""
        model, commands = Model.of(Gpt(8, 64, 4, 64, 512), self.hardware.half), WorkerCommands(self.hardware)
        node = Node(NODE, self.hardware.name, self.count, NETWORK, self._inside)
        needed = required_profiles((node,), model, DEMO_ROWS, DEMO_TENSOR_DEGREE)
        measured = commands.profile(model, {one.tensor_degree: one.rows for one in needed}, seconds_per_layer=0.1)
        problem = Problem(
            cluster=Cluster((Accelerator(node.accelerator, self.hardware.memory_bytes),), (node,)),
            model=model,
            profiles=measured[0],
            global_batch_size=DEMO_ROWS,
            limits=Limits(max_tensor_degree=DEMO_TENSOR_DEGREE),
            runtime=measured[1],
        )
        plan = find_plans(problem, "amp")[0].plan
        estimate = commands.predict(plan, model, *measured, self._inside)
        yield from predicted_trial_findings("the demo's model", self.hardware, model, plan, estimate)

    @property
    def _inside(self) -> Port:
        link = self.measured_links[0]
        return Port(link.latency_seconds, link.bandwidth_bytes_per_second)
