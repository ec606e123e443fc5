"""Train a model by a plan: `bash launch.sh --model model.yaml`, or `python train.py` where the plan has one device."""

from argparse import ArgumentParser
from functools import partial
from math import cos, pi

from torch.optim import AdamW

from trainwright_worker.training import Trainer

WARM_UP = 10
parser = ArgumentParser()
parser.add_argument("--plan", default="plan.json")
parser.add_argument("--model", default="model.yaml")
parser.add_argument("--dtype", help="number format, where the model file has none")
parser.add_argument("--checkpoints", default="checkpoints")
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
given = parser.parse_args()


def options(_name: str, shape: tuple[int, ...]) -> dict[str, float]:
    return {"weight_decay": 0.1 if len(shape) > 1 else 0.0}  # biases and norms do not decay


def schedule(iteration: int) -> float:
    done = max(iteration - WARM_UP, 0) / max(given.iterations - WARM_UP, 1)
    return min((iteration + 1) / WARM_UP, (1 + cos(pi * done)) / 2)


adam = partial(AdamW, lr=1e-3, fused=True)
with Trainer(
    given.plan, given.model, dtype=given.dtype, optimizer=adam, options=options, schedule=schedule, clip_norm=1.0
) as trainer:
    for iteration in range(trainer.resume(given.checkpoints), given.iterations):
        loss = trainer.step(iteration)
        is_saved = (iteration + 1) % given.every == 0 and trainer.save(given.checkpoints, iteration + 1)
        held_out = trainer.evaluate(given.iterations) if is_saved else loss  # rows of an iteration that is not trained
        if trainer.is_first_rank:
            print(f"{iteration} loss {loss:.6f}" + f" held out {held_out:.6f}" * bool(is_saved), flush=True)
