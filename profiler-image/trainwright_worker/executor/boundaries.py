"""A rank's mailboxes: activations and gradients that come from and go to the neighbouring stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from trainwright_worker.executor.groups import Groups
from trainwright_worker.executor.mesh import Mesh, Transfer, transfers
from trainwright_worker.executor.messages import Form, Inbox, Outbox, connect


@dataclass(frozen=True)
class Boundaries:
    """None where there is no stage before, or behind."""

    activations_in: Inbox | None = None
    activations_out: Outbox | None = None
    gradients_in: Inbox | None = None
    gradients_out: Outbox | None = None

    @classmethod
    def of(cls, mesh: Mesh, rank: int, groups: Groups, form_behind: Callable[[int], Form]) -> Boundaries:
        """The mailboxes of a rank; `form_behind` gives the form of the boundary behind a layer."""
        stage = mesh.stage_of(rank)
        stages = mesh.pipelines[stage.pipeline]
        first, last = stage.runs[0], stage.runs[-1]
        activations_in = activations_out = gradients_in = gradients_out = None
        if stage.number > 0:
            before = stages[stage.number - 1].runs[-1]
            form = form_behind(stage.first - 1)
            rows = first.rows_of(rank)
            activations_in = Inbox(groups.forward, _to(transfers(before, first), rank), rows=rows, form=form)
            gradients_out = Outbox(groups.backward, _from(transfers(first, before), rank), rows=rows)
        if stage.number + 1 < len(stages):
            behind = stages[stage.number + 1].runs[0]
            form = form_behind(stage.end - 1)
            rows = last.rows_of(rank)
            activations_out = Outbox(groups.forward, _from(transfers(last, behind), rank), rows=rows)
            gradients_in = Inbox(groups.backward, _to(transfers(behind, last), rank), rows=rows, form=form)
        return cls(activations_in, activations_out, gradients_in, gradients_out)

    @staticmethod
    def connect(mesh: Mesh, rank: int, groups: Groups, device: torch.device) -> None:
        """Connect the ranks of a plan's pipelines that will send each other anything; all of them call this."""
        ahead: list[tuple[int, int]] = []
        back: list[tuple[int, int]] = []
        for stages in mesh.pipelines:
            for before, behind in pairwise(stages):
                last, first = before.runs[-1], behind.runs[0]
                ahead += [(one.source, one.target) for one in transfers(last, first)]
                back += [(one.source, one.target) for one in transfers(first, last)]
        connect(groups.forward, ahead, rank, device)
        connect(groups.backward, back, rank, device)

    def drain(self) -> None:
        """Wait for all that is still on its way."""
        for box in (self.activations_out, self.gradients_out):
            if box is not None:
                box.drain()


def _to(moves: tuple[Transfer, ...], rank: int) -> list[Transfer]:
    return [one for one in moves if one.target == rank]


def _from(moves: tuple[Transfer, ...], rank: int) -> list[Transfer]:
    return [one for one in moves if one.source == rank]
