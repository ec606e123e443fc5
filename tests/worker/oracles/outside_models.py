"""Entry points as a user writes them: other libraries' models, split into layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock
from transformers import DistilBertConfig
from transformers.models.distilbert.modeling_distilbert import Embeddings, TransformerBlock

from trainwright_worker.layers.custom import CustomModel

SMALL_BERT = DistilBertConfig(
    vocab_size=50, max_position_embeddings=12, dim=32, hidden_dim=64, n_heads=4, n_layers=2, dropout=0.0,
    attention_dropout=0.0, attn_implementation="sdpa",
)  # fmt: skip


class Stem(nn.Sequential):
    def __init__(self) -> None:
        convolution = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.fc(images.mean((2, 3))), targets, reduction="none")


def widening(channels: int) -> BasicBlock:
    around = nn.Sequential(nn.Conv2d(channels // 2, channels, 1, 2, bias=False), nn.BatchNorm2d(channels))
    return BasicBlock(channels // 2, channels, 2, around)


def images(seed: int, iteration: int, first: int, count: int) -> dict[str, torch.Tensor]:
    generators = [torch.Generator().manual_seed(hash((seed, iteration, first + row))) for row in range(count)]
    return {
        "images": torch.stack([torch.randn(3, 64, 64, generator=generator) for generator in generators]),
        "targets": torch.stack([torch.randint(0, 10, (), generator=generator) for generator in generators]),
    }


def resnet18() -> CustomModel:
    blocks = [partial(BasicBlock, 64, 64)] * 2
    for channels in (128, 256, 512):
        blocks += [partial(widening, channels), partial(BasicBlock, channels, channels)]
    return CustomModel([Stem, *blocks, Head], images, min_rows=2)


class BertEmbeddings(nn.Module):
    """BERT's embeddings, which also pass the mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Embeddings(SMALL_BERT)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.inner(tokens)
        return hidden, mask.to(hidden.dtype)


class BertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TransformerBlock(SMALL_BERT)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(hidden, mask[:, None, None].bool()), mask


class BertHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(32, 3)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.classes(hidden[:, 0]), targets, reduction="none")


def sentences(seed: int, iteration: int, first: int, count: int) -> dict[str, torch.Tensor]:
    place = torch.arange(12)
    numbers = torch.arange(first, first + count)[:, None] + seed + iteration
    return {
        "tokens": (numbers * 7 + place) % 50,
        "mask": (place < 12 - numbers % 4).long(),
        "targets": numbers[:, 0] % 3,
    }


def distilbert() -> CustomModel:
    return CustomModel([BertEmbeddings, *[BertBlock] * SMALL_BERT.n_layers, BertHead], sentences)
