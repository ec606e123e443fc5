"""Wide-ResNet's layers: they equal torchvision's wide_resnet50_2 with the same weights."""

from __future__ import annotations

import pytest
import torch
from layer_runs import copy_linear, copy_norm, made, run
from torch import nn
from torchvision.models import resnet

from trainwright.families import WideResnet
from trainwright.model import Model
from trainwright_worker.layers import image_models
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

MODEL = Model.of(WideResnet(50, 2, "both", base_channels=8, image_size=64, classes=10))
ROWS = 3


class Narrow(resnet.ResNet):
    """Torchvision's wide_resnet50_2 with an eighth of its channels."""

    def __init__(self) -> None:
        super().__init__(resnet.Bottleneck, [3, 4, 6, 3], num_classes=10, width_per_group=128)
        self.conv1 = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(2048 // 8, 10)

    def _make_layer(self, block, planes, *others, **more):
        if planes == 64:
            self.inplanes = 8
        return super()._make_layer(block, planes // 8, *others, **more)


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_models, "convolves_channels_last", lambda *_: True)


def trained(layers: list[Layer], *, seed: int = 1) -> list[torch.Tensor]:
    """Return the loss and all gradients."""
    rows = make_family_layers(MODEL).rows(("images", "targets"), seed=seed, iteration=0, first=0, count=ROWS)
    loss = run([layer.double() for layer in layers], {**rows, "images": rows["images"].double()})
    return [loss, *torch.autograd.grad(loss, [weight for layer in layers for weight in layer.parameters()])]


def test_channels_last_changes_no_result(request: pytest.FixtureRequest) -> None:
    layers = made(MODEL)
    expected = trained(layers)
    request.getfixturevalue("channels_last")
    for found, one in zip(trained(layers), expected, strict=True):
        torch.testing.assert_close(found, one)


def test_layers_pass_channels_last_on_without_a_copy(channels_last: None) -> None:
    family = make_family_layers(MODEL)
    boundary, layers = (), made(MODEL)
    for layer in layers[:-1]:
        boundary = layer(boundary, family.rows(layer.reads, seed=1, iteration=0, first=0, count=ROWS)).boundary
        assert boundary[0].is_contiguous(memory_format=torch.channels_last)
        assert layers[1].lay_out(boundary)[0] is boundary[0]


def test_a_received_boundary_is_laid_out_before_it_is_stored(channels_last: None) -> None:
    received = torch.randn(ROWS, 32, 16, 16)
    (laid_out,) = made(MODEL)[2].lay_out((received,))
    assert laid_out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid_out, received)


@pytest.mark.parametrize(
    ("device_type", "dtype", "expected"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.bfloat16, False),
    ],
)
def test_gpus_convolve_half_formats_channels_last(device_type: str, dtype: torch.dtype, expected: bool) -> None:
    assert image_models.convolves_channels_last(device_type, dtype) is expected


def copy_normed(convolution, norm, ours) -> None:
    copy_linear(convolution, ours.weight, None)
    copy_norm(norm, ours.norm_weight, ours.norm_bias)


def test_the_loss_and_the_gradients_are_torchvisions_in_training() -> None:
    """In float64, since normalising by a handful of values amplifies rounding from layer to layer."""
    layers = [layer.double() for layer in made(MODEL)]
    theirs = Narrow().double()
    stem, *ours, head = layers
    blocks = [*theirs.layer1, *theirs.layer2, *theirs.layer3, *theirs.layer4]
    with torch.no_grad():
        copy_normed(theirs.conv1, theirs.bn1, stem.first)
        for block, layer in zip(blocks, ours, strict=True):
            copy_normed(block.conv1, block.bn1, layer.reduce)
            copy_normed(block.conv2, block.bn2, layer.convolve)
            copy_normed(block.conv3, block.bn3, layer.expand)
            assert (block.downsample is None) == (layer.project is None)
            if layer.project is not None:
                copy_normed(*block.downsample, layer.project)
        copy_linear(theirs.fc, head.class_weight, head.class_bias)
    rows = make_family_layers(MODEL).rows(("images", "targets"), seed=1, iteration=0, first=0, count=ROWS)
    rows["images"] = rows["images"].double()
    loss = run(layers, rows) / ROWS
    expected = torch.nn.functional.cross_entropy(theirs.train()(rows["images"]), rows["targets"])
    torch.testing.assert_close(loss, expected.float())
    loss.backward()
    expected.backward()
    for convolution, layer in (
        (theirs.conv1, stem.first),
        (blocks[3].downsample[0], ours[3].project),
        (blocks[7].conv2, ours[7].convolve),
        (blocks[15].conv1, ours[15].reduce),
    ):
        torch.testing.assert_close(layer.weight.grad, convolution.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_single_row_of_a_single_pixel_is_trained_on() -> None:
    """The last stage of a 32-pixel image has one pixel, which is normalised to the bias."""
    model = Model.of(WideResnet(50, 1, base_channels=4, image_size=32, classes=10))
    rows = make_family_layers(model).rows(("images", "targets"), seed=1, iteration=0, first=0, count=1)
    loss = run(made(model), rows)
    loss.backward()
    assert loss.isfinite()


def test_only_the_three_by_three_convolution_is_widened() -> None:
    model = Model.of(WideResnet(50, 3, "second", base_channels=4, image_size=32, classes=10))
    block = make_family_layers(model).make(2, seed=1, shard=TensorShard(), shared={})
    assert block.convolve.weight.shape == (12, 4, 3, 3)
