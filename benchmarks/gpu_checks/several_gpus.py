"""Several GPUs of this machine: plans compared with one process, links, and a whole trial of data and of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.hardware import Hardware
from gpu_checks.plan_gangs import gang_subjects
from gpu_checks.running import Subject
from gpu_checks.whole_trials import trial_findings, uniform_plan
from gpu_checks.worker_commands import WorkerCommands
from trainwright.cluster import Link, Port
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.worker_api import LinkReport, LinkTask

MOST_GPUS = 8
ROWS, MICRO_BATCHES = 8, 4


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield what needs a GPU for each process."""
    if hardware.is_gpu and hardware.count < 2:
        yield Subject("several GPUs", lambda: [skipped("several GPUs", "there is one")])
        return
    count = max(min(hardware.count, MOST_GPUS), 2)
    machine = Machine(hardware, count)
    yield Subject("links", machine.links)
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
        """Try the model of the demo on two devices, predicted from the measured link."""
        gpt = Gpt(2, 64, 4, 32, 256) if self.hardware.small else Gpt(12, 768, 12, 1024, 50257)
        model = Model.of(gpt, self.hardware.half)
        plan = uniform_plan(len(model.layers), devices=2, data=data, rows=ROWS, micro_batches=MICRO_BATCHES)
        link = self.measured_links[0]
        inside = Port(link.latency_seconds, link.bandwidth_bytes_per_second)
        yield from trial_findings(f"GPT-2 small, {way}", self.hardware, model, plan, inside)
