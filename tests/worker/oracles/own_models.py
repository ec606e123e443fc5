"""Small models of kinds that no family covers, as their authors write them for Trainwright."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

WIDTH, PIXELS, TOKENS, WORDS = 16, 8, 8, 32


def drawn_rows(make, *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Stack the rows that `make` draws, each from a generator of its own number."""
    rows = [
        make(torch.Generator().manual_seed(1_000_003 * seed + 1009 * iteration + first + row)) for row in range(count)
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def image(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(3, PIXELS, PIXELS, generator=generator),
        "steps": torch.randint(1000, (), generator=generator),
        "targets": torch.randn(3, PIXELS, PIXELS, generator=generator),
    }


def sentence(generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(WORDS, (TOKENS + 1,), generator=generator)
    return {"tokens": words[:-1], "targets": words[1:]}


def pair(generator: torch.Generator) -> dict[str, Tensor]:
    images = {name: value for name, value in image(generator).items() if name == "images"}
    return {**images, **sentence(generator)}


def signal(generator: torch.Generator) -> dict[str, Tensor]:
    return {"signal": torch.randn(4, TOKENS, generator=generator), "targets": torch.randint(5, (), generator=generator)}


class PatchesAndSteps(nn.Module):
    """Patches of an image, and the embedding of a step of the diffusion, made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.steps = nn.Linear(8, WIDTH)

    def forward(self, images: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        angles = steps[:, None].float() * torch.exp(-torch.arange(4, device=steps.device))
        embedded = self.steps(torch.cat([angles.cos(), angles.sin()], 1).to(self.steps.weight.dtype))
        return self.patches(images).flatten(2).transpose(1, 2), embedded


class Modulated(nn.Module):
    """A diffusion transformer's block: attention and feed-forward, modulated by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, patches: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = self.modulation(functional.silu(step)).unsqueeze(1).chunk(3, -1)
        inner = self.norm(patches) * (1 + scale) + shift
        return patches + gate * self.attention(inner, inner, inner, need_weights=False)[0], step


class Noise(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 12)

    def forward(self, patches: Tensor, step: Tensor, targets: Tensor) -> Tensor:
        made = functional.fold(super().forward(patches).transpose(1, 2), PIXELS, 2, stride=2)
        return (made - targets).square().mean((1, 2, 3))


def diffusion_transformer() -> CustomModel:
    return CustomModel([PatchesAndSteps, Modulated, Modulated, Noise], partial(drawn_rows, image))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(4, WIDTH, 3, padding=1)

    def forward(self, signal: Tensor) -> Tensor:
        return self.inner(signal).transpose(1, 2)


class Recurrence(nn.Module):
    """A gated linear recurrence, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor) -> Tensor:
        state, states = torch.zeros_like(sequence[:, 0]), []
        for gate, value in zip(self.gate(sequence).sigmoid().unbind(1), self.value(sequence).unbind(1), strict=True):
            state = gate * state + (1 - gate) * value
            states.append(state)
        return sequence + torch.stack(states, 1)


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)


class Classes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 5)

    def forward(self, sequence: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(sequence.mean(1)), targets, reduction="none")


def convolution_attention_scan() -> CustomModel:
    return CustomModel([Convolved, Recurrence, attention, Recurrence, Classes], partial(drawn_rows, signal))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = nn.Conv2d(3, WIDTH, 2, 2), nn.Embedding(WORDS, WIDTH)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.images(images).flatten(2).transpose(1, 2), self.words(tokens)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = attention(), attention()

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.images(images), self.words(words)


class Contrast(nn.Module):
    def forward(self, images: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        images, words = (functional.normalize(one.mean(1), dim=-1) for one in (images, words))
        scores = 10 * images @ words.T
        return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="none")


def two_towers(**fields: bool) -> CustomModel:
    return CustomModel([Towers, Pair, Contrast], partial(drawn_rows, pair), **fields)


def two_towers_over_the_batch() -> CustomModel:
    return two_towers(whole_batch=True)


class Down(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, 2 * channels, 3, stride=2, padding=1)

    def forward(self, images: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        return super().forward(functional.silu(images)), *kept, images


class Up(nn.ConvTranspose2d):
    def __init__(self, channels: int) -> None:
        super().__init__(2 * channels, channels, 2, stride=2)

    def forward(self, images: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        *others, last = kept
        return (super().forward(images) + last, *others)


class First(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 4, 3, padding=1)

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        return super().forward(images)


class Last(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(4, 3, 3, padding=1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return (super().forward(images) - targets).square().mean((1, 2, 3))


def unet() -> CustomModel:
    layers = [First, partial(Down, 4), partial(Down, 8), partial(Up, 8), partial(Up, 4), Last]
    return CustomModel(layers, partial(drawn_rows, image))


class Embedding(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)


class Causal(nn.Module):
    """Attention with rotary positions, from tables that stay in float32."""

    def __init__(self, *, casts: bool) -> None:
        super().__init__()
        self.casts = casts
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        angles = torch.arange(TOKENS)[:, None] * torch.exp(-torch.arange(WIDTH // 2))
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], 1))

    def forward(self, words: Tensor) -> Tensor:
        query, key, value = self.inner(words).chunk(3, -1)
        table = self.table.to(words.dtype) if self.casts else self.table
        made = functional.scaled_dot_product_attention(query * table, key * table, value, is_causal=True)
        return words + self.outer(made)


class NextWord(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(words).transpose(1, 2), targets, reduction="none").mean(1)


def decoder(*, casts: bool = True) -> CustomModel:
    return CustomModel([Embedding, *[partial(Causal, casts=casts)] * 3, NextWord], partial(drawn_rows, sentence))


def decoder_in_float32() -> CustomModel:
    return decoder(casts=False)
