"""Two processes that train by the public surface under one plan, save, and train on under another plan.

Run as a program: `python training_gang.py CASES_FILE RESULT_FILE`. The cases are a JSON list of objects with the fields of
`Case`; the result is a list of equal length.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("oracles")))
from eight_processes import join, leave, start
from own_training import CLIP_NORM, OPTIMIZERS, SEED, held_out, held_out_tokens, options, schedule

from trainwright_worker.training import CheckpointError, Trainer

STEPS = 4


@dataclass(frozen=True)
class Case:
    """Training that changes its plan in the middle.

    Attributes:
        plans: files of the plans before and after.
        folder: of its checkpoints.
    """

    name: str
    model: str
    plans: list[str]
    optimizer: str
    folder: str
    dtype: str = "float32"

    def trainer(self, plan: str) -> Trainer:
        return Trainer(
            plan,
            self.model,
            optimizer=OPTIMIZERS[self.optimizer],
            options=options,
            schedule=schedule,
            clip_norm=CLIP_NORM,
            seed=SEED,
            dtype=self.dtype,
        )


def run(case: Case) -> dict:
    losses, evaluated, first = [], [], 0
    other_rows = held_out_tokens if case.name.startswith("gpt") else held_out
    try:
        for plan in case.plans:
            with case.trainer(plan) as trainer:
                first = trainer.resume(case.folder)
                evaluated.append(trainer.evaluate(1, other_rows) if first else None)
                losses += [trainer.step(iteration) for iteration in range(first, first + STEPS)]
                evaluated.append(trainer.evaluate(1, other_rows))
                trainer.save(case.folder, first + STEPS)
    except (ValueError, CheckpointError) as error:
        return {"refused": str(error)}
    return {"losses": losses, "evaluated": evaluated}


def member(rank: int, port: int, cases_file: str, result: str) -> None:
    groups = join(rank, port)
    answers = []
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        answers.append({"name": case["name"], **run(Case(**case))})
        if rank == 0:
            Path(result).write_text(json.dumps(answers), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.training"))
