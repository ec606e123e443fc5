"""A recognizer of speech: convolutions, recurrent blocks over rows of their own lengths, and a loss over all alignments."""

from __future__ import annotations

from functools import partial

import torch
from own_models import drawn_rows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BANDS, FRAMES, WIDTH, LETTERS, TEXT = 8, 24, 16, 10, 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.norm(frames), lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=frames.shape[1])
        return frames + made


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shorter = nn.Conv1d(BANDS, WIDTH, 3, 2, 1)
        self.blocks = nn.ModuleList(Recurrent() for _ in range(3))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, lengths = self.shorter(audio).relu().transpose(1, 2), (lengths + 1) // 2
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(x), lengths


def build() -> nn.Module:
    return Recognizer()


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Return each row's loss; the last column of the targets is the length of the text."""
    letters, lengths = output
    log_probabilities = letters.log_softmax(-1, dtype=torch.float32).transpose(0, 1)
    text, text_lengths = targets[:, :-1], targets[:, -1]
    return functional.ctc_loss(log_probabilities, text, lengths, text_lengths, reduction="none", zero_infinity=True)


def recording(generator: torch.Generator) -> dict[str, Tensor]:
    length, letters = (
        int(torch.randint(low, most + 1, (), generator=generator)) for low, most in ((16, FRAMES), (1, TEXT))
    )
    text = torch.randint(1, LETTERS, (TEXT,), generator=generator)
    audio = torch.randn(BANDS, FRAMES, generator=generator) * (torch.arange(FRAMES) < length)
    return {"audio": audio, "lengths": torch.tensor(length), "targets": torch.cat([text, torch.tensor([letters])])}


rows = partial(drawn_rows, recording)
