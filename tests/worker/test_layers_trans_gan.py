"""TransGAN's layers: they equal torch's own modules assembled as in the papers."""

from __future__ import annotations

import torch
from layer_runs import copy_linear, copy_norm, made, run
from torch import nn

from trainwright.families import TransGan
from trainwright.model import Model
from trainwright_worker.layers.registry import make_family_layers

# 4, 8, 16 and 32 positions per side, of which 16 and 32 use windows of 8.
GAN = TransGan((1, 1, 1, 2), 64, 2, bottom_width=4, latent_size=16, window_size=8)
MODEL = Model.of(GAN)
WIDTHS, SIDES = (64, 64, 64, 16), (4, 8, 16, 32)
ROWS = 3


class Block(nn.Module):
    """Torch's encoder layer, run on one window after another."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        width = WIDTHS[stage]
        self.side, self.window = SIDES[stage], min(8, SIDES[stage])
        self.inner = nn.TransformerEncoderLayer(
            width, 2, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        image = hidden.view(len(hidden), self.side, self.side, -1)
        made = torch.zeros_like(image)
        for top in range(0, self.side, self.window):
            for left in range(0, self.side, self.window):
                window = image[:, top : top + self.window, left : left + self.window]
                mixed = self.inner(window.reshape(len(hidden), self.window**2, -1)).view_as(window)
                made[:, top : top + self.window, left : left + self.window] = mixed
        return made.flatten(1, 2)

    def copy(self, ours) -> None:
        attention = self.inner.self_attn
        attention.in_proj_weight.copy_(ours.qkv_weight.flatten(0, 1))
        attention.in_proj_bias.copy_(ours.qkv_bias.flatten())
        copy_linear(attention.out_proj, ours.attention_weight, ours.attention_bias)
        copy_norm(self.inner.norm1, ours.first_norm_weight, ours.first_norm_bias)
        copy_norm(self.inner.norm2, ours.second_norm_weight, ours.second_norm_bias)
        copy_linear(self.inner.linear1, ours.expand_weight, ours.expand_bias)
        copy_linear(self.inner.linear2, ours.contract_weight, ours.contract_bias)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Linear(16, 4 * 4 * 64)
        self.positions = nn.ParameterList(
            torch.zeros(side**2, width) for side, width in zip(SIDES, WIDTHS, strict=True)
        )
        self.stages = nn.ModuleList(
            nn.ModuleList(Block(stage) for _ in range(count)) for stage, count in enumerate(GAN.layers)
        )
        self.grow = (nn.Upsample(scale_factor=2, mode="bicubic"),) * 2 + (nn.PixelShuffle(2),)
        self.to_image = nn.Conv2d(16, 3, 1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        hidden = self.latent(latents).view(-1, 16, 64)
        for stage, blocks in enumerate(self.stages):
            if stage:
                side = SIDES[stage - 1]
                image = hidden.transpose(1, 2).reshape(len(hidden), -1, side, side)
                hidden = self.grow[stage - 1](image).flatten(2).transpose(1, 2).contiguous()
            hidden = hidden + self.positions[stage]
            for block in blocks:
                hidden = block(hidden)
        return self.to_image(hidden.transpose(1, 2).reshape(len(hidden), 16, 32, 32))


def test_the_loss_and_the_gradients_are_those_of_torchs_modules() -> None:
    layers, theirs = made(MODEL), Generator()
    between = iter(layers[1:-1])
    with torch.no_grad():
        copy_linear(theirs.latent, layers[0].latent_weight.flatten(0, 1), layers[0].latent_bias.flatten())
        theirs.positions[0].copy_(layers[0].positions)
        for stage, blocks in enumerate(theirs.stages):
            if stage:
                theirs.positions[stage].copy_(next(between).positions)
            for block in blocks:
                block.copy(next(between))
        copy_linear(theirs.to_image, layers[-1].image_weight, layers[-1].image_bias)
    rows = make_family_layers(MODEL).rows(("latents", "images"), seed=1, iteration=0, first=0, count=ROWS)
    loss = run(layers, rows)
    expected = nn.functional.mse_loss(theirs(rows["latents"]), rows["images"]) * ROWS
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    grown = layers[4]
    last = theirs.stages[3][1].inner
    for ours, other in (
        (layers[0].latent_weight.grad.flatten(0, 1), theirs.latent.weight.grad),
        (grown.positions.grad, theirs.positions[2].grad),
        (layers[-2].qkv_weight.grad.flatten(0, 1), last.self_attn.in_proj_weight.grad),
        (layers[-2].attention_bias.grad, last.self_attn.out_proj.bias.grad),
    ):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)


def test_upsampled_image_is_contiguous() -> None:
    grow = made(MODEL)[2]
    (grown,) = grow((torch.randn(ROWS, 16, 64),), {}).boundary
    assert grown.is_contiguous()
