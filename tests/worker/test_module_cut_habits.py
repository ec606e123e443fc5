"""Code between the blocks of a forward: it is written as it was, or refused with its line."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from trainwright_worker.module_cut.written_layers import write_layers

pytestmark = [pytest.mark.timeout(120)]

START = """
import torch
from torch import Tensor, nn
from torch.nn import functional

OUTSIDE = torch.ones(6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, *more, **named):
        return x + self.inner(x).tanh()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.weight = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("table", torch.randn(4, 6))

    def forward(self, x):
        a, b, c = self.blocks
{body}


def build():
    return Whole()


def rows(*, seed, iteration, first, count):
    numbers = torch.arange(first, first + count)[:, None, None] + seed + iteration + torch.arange(24.0).view(4, 6)
    return {{"x": numbers.sin(), "targets": numbers.cos().sum((1, 2))}}


def loss(output, targets):
    return (output.flatten(1).sum(1) - targets).square()
"""
NUMBERS = count()


def cut(folder: Path, body: str, *, replaced: tuple[str, str] = ("", "")) -> tuple[str, list[str]]:
    """Write the layers of a module whose forward has this body; return their text and what was said."""
    path = folder / f"habit_{next(NUMBERS)}.py"
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    path.write_text(START.format(body=lines).replace(*replaced), encoding="utf-8")
    notes: list[str] = []
    write_layers(f"{path}:build", None, notes.append)
    return path.with_name(f"{path.stem}_layers.py").read_text(encoding="utf-8"), notes


WRITTEN = {
    "first dimension is the sequence's": (
        "x = x.transpose(0, 1)\nx = c(b(a(x)))\nreturn x.transpose(0, 1)",
        ["return x.movedim(1, 0)", "x = x.movedim(0, 1)"],
    ),
    "rows are flattened with the sequence": (
        "x = x.flatten(0, 1)\nx = c(b(a(x)))\nreturn x.view(-1, 4, 6)",
        ["x.unflatten(0, (-1, 4))", "x = x.flatten(0, 1)", "x.view(-1, 4, 6)"],
    ),
    "a number follows from the rows": (
        "n = x.shape[0]\nx = c(b(a(x)))\nreturn x.reshape(2 * n, 12).view(n, 24)",
        [".reshape(2 * rows, 12).view(rows, 24)", "rows = len(x)"],
    ),
    "a weight is used in two layers": (
        "s = self.scale.exp()\nx = a(x * s)\nx = b(x)\nreturn c(x * s)",
        ["self.scale = scale", "s = self.scale.exp()"],
    ),
    "one row for all": (
        "y = self.drop(self.table[None])\nx = a(x + y)\nx = b(x)\nreturn c(x + y)",
        ["y.expand(rows, -1, -1)", "return self.block(x + y)"],
    ),
    "a tensor of no rows": (
        "y = self.drop(self.table)\nx = a(x + y)\nx = b(x)\nreturn c(x + y)",
        ["y.expand(rows, -1, -1)", "y = y[0].detach()  # the same for all rows"],
    ),
    "a table is used in two layers": (
        "t = self.table.cos()\nx = a(x + t)\nx = b(x)\nreturn c(x + t)",
        ['self.register_buffer("table", table, persistent=False)', "self.table.cos()"],
    ),
    "dropout and random numbers": (
        "x = functional.dropout(a(x), 0.2, self.training)\nx = b(self.drop(x))\nreturn c(x + torch.rand_like(x))",
        ["functional.dropout(x, p=0.2)", "torch.rand_like(x)"],
    ),
    "changes in place": ("x = a(x)\nx = x * 2\nx += 1\nx[:, 0] = 3.0\nx = b(x)\nreturn c(x.relu_())", ["x[:, 0] = 3.0", "x.add_(1)"]),
    "no gradients": (
        "with torch.no_grad():\n    y = a(x).mean(1, keepdim=True)\nx = b(x)\nreturn c(x + y)",
        ["with torch.no_grad():"],
    ),
    "batch normalisation": ("x = a(x)\nx = self.norm(x.transpose(1, 2)).transpose(1, 2)\nreturn c(b(x))", ["self.norm(x.transpose(1, 2))"]),
    "numbers and collections for a block": (
        "x = a(x, [None, True], mode='tall')\nreturn c(b(x, (1, 2.5)))",
        ['self.block(x, [None, True], mode="tall")', "self.block(x, (1, 2.5))"],
    ),
    "values are read within a block": (
        "x = c(b(a(x)))\nreturn x",
        ["self.block(x)"],
    ),
    "one block twice": ("x = a(x)\nx = b(x)\nx = a(x)\nreturn c(x)", ["self.block(x)"]),
    "arithmetic": ("x = -a(x) / 2 + 1 - (1 - x) ** 2\nx = b(x)\nreturn c(x @ x.mT @ x)", ["((1 - x) ** 2)", "(x @ x.mT) @ x"]),
}  # fmt: skip


@pytest.mark.parametrize("habit", WRITTEN)
def test_forward_is_written_as_it_was(habit: str, tmp_path: Path) -> None:
    body, parts = WRITTEN[habit]
    replaced = ("self.inner(x).tanh()", "(self.inner(x) if x.sum() > 0 else x)") if "read" in habit else ("", "")
    text, notes = cut(tmp_path, body, replaced=replaced)
    for part in parts:
        assert part in text
    first, unused, *differences = notes
    assert "layers (" in first
    assert unused.startswith("not used by the forward")
    assert [note.partition(":")[0] for note in differences] == ["1 row", "2 rows", "3 rows"]


REFUSED = {
    "reads values": ("if x.sum() > 0:\n    x = -x\nreturn c(b(a(x)))", r"\.py:30: __bool__ reads a tensor's values .* a module of their own"),
    "an object": ("return c(b(a(x, object())))", r"\.py:30: blocks.0 takes a object, .* use_cache=False"),
    "a tensor from outside": ("return c(b(a(x * OUTSIDE)))", r"\.py:30: a tensor of shape \(6,\) .* register it as a buffer"),
    "other calls for more rows": (
        "x = a(x)\nx = x.exp() if len(x) > 5 else x.sin()\nreturn c(b(x))",
        r"\.py:31: the forward calls sin for 5 rows but exp for 7",
    ),
    "a number that jumps with the rows": ("x = a(x)\nx = x * (len(x) // 2)\nreturn c(b(x))", r"takes a number that is 2 for 5 rows and 3 for 7"),
    "a change through a view": (
        "x = a(x) * 1\ny = x[:, 0]\nz = b(x * 1)\ny.add_(5)\nreturn c(x + z)",
        r"1 row: .* differ by .*, so the forward does something that its calls do not show",
    ),
    "a failure": ("return c(b(a(x.view(7, 7))))", r"\.py:30: RuntimeError: shape '\[7, 7\]' is invalid"),
}  # fmt: skip


@pytest.mark.parametrize("habit", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_line(habit: str, tmp_path: Path) -> None:
    body, sentence = REFUSED[habit]
    with pytest.raises(ValueError, match=sentence):
        cut(tmp_path, body)


def test_modules_in_a_row_are_layers_where_no_block_repeats(tmp_path: Path) -> None:
    row = "self.row = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6))"
    _, notes = cut(tmp_path, "return self.row(x)", replaced=("self.drop = nn.Dropout(0.3)", row))
    assert notes[0].endswith("4 layers (Linear, 2 × Linear2, Last)")


def test_a_module_without_losses_is_told_to_have_a_function_of_them(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"returns tuple, not each row's loss; write a function loss\(output, targets\)"
    ):
        cut(tmp_path, "return c(b(a(x))), x", replaced=("def loss(output, targets)", "def other(output, targets)"))


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        (
            ('"targets": ', '"lengths": numbers[:, 0, 0].long(), "targets": '),
            r"habit_\d+:build: the fields of rows\(\) are x, lengths, targets, but forward takes \(x\).* into targets",
        ),
        (("loss(output, targets)", "loss(output, targets, lengths)"), r"loss\(output, targets, lengths\) is called with .* into targets"),
        (("return x + self.inner", "return {}[0] + self.inner"), r"\.py:\d+: KeyError: 0; correct it"),
    ],
)  # fmt: skip
def test_what_is_called_with_other_fields_is_refused_in_a_sentence(replaced, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        cut(tmp_path, "return c(b(a(x)))", replaced=replaced)
