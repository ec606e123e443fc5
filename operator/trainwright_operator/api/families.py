"""`spec.model`: the planner's families as parts of the resource, with bounds that the API server checks."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from trainwright import families
from trainwright_operator.api.section import Section, rules

Layers = Annotated[int, Field(ge=1, le=1024)]
StageLayers = Annotated[tuple[Layers, ...], Field(min_length=1, max_length=16)]
Heads = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=1_048_576)]
Tokens = Annotated[int, Field(ge=1, le=1_048_576)]
Entries = Annotated[int, Field(ge=1, le=4_194_304)]
Pixels = Annotated[int, Field(ge=1, le=65_536)]

KindName = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[float, Field(ge=0, le=1e18)]

Rule = tuple[str, str]

_HEADS: Final[Rule] = (
    "self.hiddenSize % self.heads == 0",
    "hiddenSize must be a multiple of heads, since every head takes an equal part; change one of the two",
)
_KEY_VALUE_HEADS: Final[Rule] = (
    "!has(self.keyValueHeads) || self.heads % self.keyValueHeads == 0",
    "heads must be a multiple of keyValueHeads, since each of these serves equally many heads; change one of the two",
)
_PATCHES: Final[Rule] = (
    "self.imageSize % self.patchSize == 0",
    "imageSize must be a multiple of patchSize, since patches tile the image; change one of the two",
)


def _ruled(*pairs: Rule) -> ConfigDict:
    return ConfigDict(json_schema_extra=rules(*pairs))


class FamilySpec(Section):
    """A family of models: the same fields as the planner's, and the same defaults."""

    noun: ClassVar[Any]
    """The planner's family."""

    def family(self) -> families.Family:
        """The same model as the planner's noun. Raises ValueError, in the resource's words, where sizes do not fit."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        try:
            return cast("families.Family", self.noun(**fields))
        except ValueError as error:
            raise ValueError(_in_camel_case(str(error))) from None


def _in_camel_case(sentence: str) -> str:
    """A sentence of the planner's, with fields named as in the resource."""
    return re.sub(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", lambda found: to_camel(found[0]), sentence)


class GptSpec(FamilySpec):
    """GPT-2: learned positions, pre-normalisation, tied embeddings."""

    noun = families.Gpt
    model_config = ConfigDict(json_schema_extra=rules(_HEADS, field_path=".hiddenSize"))

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; also the largest tensor degree that is tried."""
    sequence_length: Tokens
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries
    """Entries of the token embedding."""


class LlamaSpec(FamilySpec):
    """Llama 1–3, Mistral and their like."""

    noun = families.Llama
    model_config = _ruled(_HEADS, _KEY_VALUE_HEADS)

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries = 32000
    """Entries of the token embedding."""
    intermediate_size: Width | None = None
    """Width of the gated feed-forward. Absent: 8/3 of hiddenSize, rounded up to 256."""
    key_value_heads: Heads | None = None
    """Heads of keys and values, each shared by equally many heads. Absent: as many as heads."""
    tied_embeddings: bool = False
    """Whether the projection onto the vocabulary is the token embedding."""


class BertSpec(FamilySpec):
    """BERT, trained to fill in masked tokens and to tell whether two sentences follow each other."""

    noun = families.Bert
    model_config = _ruled(_HEADS)

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens = 512
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries = 30522
    """Entries of the token embedding."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Absent: 4 × hiddenSize."""
    token_types: Annotated[int, Field(ge=1, le=1024)] = 2
    """Segments that a token may belong to."""
    next_sentence: bool = True
    """Whether there is a pooler, with the second head that tells whether two sentences follow each other."""


class VitSpec(FamilySpec):
    """Vision Transformer that classifies images. A row is one image."""

    noun = families.Vit
    model_config = _ruled(_HEADS, _PATCHES)

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    image_size: Pixels = 224
    """Side of the square image in pixels; a multiple of patchSize."""
    patch_size: Pixels = 16
    """Side of a patch in pixels."""
    channels: Annotated[int, Field(ge=1, le=65_536)] = 3
    """Channels of the image."""
    classes: Entries = 1000
    """Classes that are told apart."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Absent: 4 × hiddenSize."""


class SwinSpec(FamilySpec):
    """Swin Transformer that classifies images: window attention over ever fewer and wider patches."""

    noun = families.Swin
    model_config = _ruled(
        _PATCHES,
        (
            "!has(self.heads) || self.heads.size() == self.layers.size()",
            "heads must give one number for each stage, as many as layers does; make the two lists equally long",
        ),
        ("self.layers.sum() <= 1024", "layers must sum to 1024 at most; leave some out"),
    )

    layers: StageLayers
    """Blocks of each stage."""
    hidden_size: Width
    """Width in the first stage; twice as much in each further one."""
    heads: Annotated[tuple[Heads, ...], Field(min_length=1, max_length=16)] | None = None
    """Attention heads of each stage. Absent: one for every 32 values of its width."""
    image_size: Pixels = 224
    """Side of the square image in pixels; a multiple of patchSize."""
    patch_size: Pixels = 4
    """Side of a patch in pixels."""
    window_size: Annotated[int, Field(ge=1, le=65_536)] = 7
    """Side of a window in patches; windows tile every stage."""
    channels: Annotated[int, Field(ge=1, le=65_536)] = 3
    """Channels of the image."""
    classes: Entries = 1000
    """Classes that are told apart."""


class T5Spec(FamilySpec):
    """T5: an encoder, and a decoder that attends to what the encoder made."""

    noun = families.T5
    model_config = _ruled(
        _HEADS,
        (
            "!has(self.decoderLayers) || self.layers + self.decoderLayers <= 1024",
            "layers and decoderLayers must sum to 1024 at most; lower one of the two",
        ),
    )

    layers: Annotated[int, Field(ge=1, le=512)]
    """Blocks of the encoder."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens = 512
    """Tokens of a row that the encoder reads; a row is a pair of sequences."""
    vocabulary_size: Entries = 32128
    """Entries of the token embedding, which encoder and decoder share."""
    decoder_layers: Layers | None = None
    """Blocks of the decoder. Absent: as many as the encoder's."""
    decoder_sequence_length: Tokens | None = None
    """Tokens of a row that the decoder reads. Absent: as many as the encoder."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Absent: 4 × hiddenSize."""
    position_buckets: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Classes of distances between positions that have a bias of their own."""
    tied_embeddings: bool = True
    """Whether the projection onto the vocabulary is the token embedding."""


class MoeSpec(FamilySpec):
    """A mixture of experts: Mixtral, or Switch Transformers' kind with one expert a token."""

    noun = families.Moe
    model_config = _ruled(
        _HEADS,
        _KEY_VALUE_HEADS,
        (
            "self.expertsPerToken <= self.experts",
            "expertsPerToken cannot be more than experts; lower it, or raise experts",
        ),
        ("self.expertEvery <= self.layers", "expertEvery leaves no block with experts; lower it to layers at most"),
    )

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries = 32000
    """Entries of the token embedding."""
    experts: Annotated[int, Field(ge=1, le=4096)] = 8
    """Experts of a block that has them."""
    experts_per_token: Annotated[int, Field(ge=1, le=4096)] = 2
    """Experts that each token passes through."""
    expert_every: Annotated[int, Field(ge=1, le=1024)] = 1
    """Every so manieth block has experts, the others one plain feed-forward."""
    intermediate_size: Width | None = None
    """Width of one expert. Absent: 8/3 of hiddenSize, rounded up to 256."""
    key_value_heads: Heads | None = None
    """Heads of keys and values, each shared by equally many heads. Absent: as many as heads."""
    gated: bool = True
    """Whether an expert is a SwiGLU of three products, or two products with a ReLU between them."""
    tied_embeddings: bool = False
    """Whether the projection onto the vocabulary is the token embedding."""


class WideResnetSpec(FamilySpec):
    """Wide-ResNet that classifies images. A row is one image. No tensor degree divides its layers."""

    noun = families.WideResnet
    model_config = _ruled(
        ("self.imageSize % 32 == 0", "imageSize must be a multiple of 32, since it is halved five times; change it"),
    )

    depth: Literal[50, 101, 152] = 50
    """Depth of the ResNet."""
    width_factor: Annotated[int, Field(ge=1, le=1024)] = 2
    """How much wider the inner convolutions are than ResNet's."""
    widened: Literal["both", "second"] = "both"
    """Both: what both inner convolutions make is wider; second: only what the 3 × 3 makes, as in Alpa's sizes."""
    base_channels: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Inner width of the first stage before it is widened; twice as much in each further one."""
    image_size: Pixels = 224
    """Side of the square image in pixels; a multiple of 32."""
    channels: Annotated[int, Field(ge=1, le=65_536)] = 3
    """Channels of the image."""
    classes: Entries = 1000
    """Classes that are told apart."""


class TransGanSpec(FamilySpec):
    """TransGAN's generator, trained alone. A row is one image."""

    noun = families.TransGan
    model_config = _ruled(
        ("self.layers.sum() >= 1 && self.layers.sum() <= 1024", "layers must sum to 1 … 1024; change some of them"),
    )

    layers: Annotated[tuple[Annotated[int, Field(ge=0, le=1024)], ...], Field(min_length=1, max_length=16)] = (
        families.TransGan().layers
    )
    """Blocks of each stage; each stage works on an image of twice the side of the one before."""
    hidden_size: Width = 1024
    """Width of the first stage; from the fourth stage on a quarter of the one before."""
    heads: Heads = 4
    """Attention heads; a tensor degree must divide them."""
    bottom_width: Pixels = 9
    """Side of the first stage's image."""
    latent_size: Width = 512
    """Values that an image is made from."""
    window_size: Pixels = 16
    """Side of a window; where the image is larger, attention stays in windows."""


class CustomKindSpec(Section):
    """What layers of the user's own model that are alike hold, compute, keep and hand on."""

    name: KindName
    """Name of the kind, unique in the model."""
    parameters: Annotated[int, Field(ge=0, le=1_000_000_000_000_000)]
    """Values of one layer's weights."""
    forward_flops_per_row: Count
    """FLOPs of its products, 2 for each multiply-add."""
    output_elements_per_row: Annotated[int, Field(ge=1, le=1_000_000_000_000_000)]
    """Values of the tensors that it hands on; 1 behind the last layer."""
    saved_elements_per_row: Count
    """Values of the number format that its forward keeps for its backward, its input included."""
    saved_bytes_per_row: Count = 0.0
    """Bytes that it keeps in other formats (indices, masks)."""


class CustomSpec(FamilySpec):
    """A model of your own, whose code is in the worker's image. No tensor degree divides its layers."""

    noun = families.Custom
    model_config = _ruled(
        (
            "self.entrypoint.matches('^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$')",
            "entrypoint must be written package.module:function, for example models.resnet:resnet18",
        )
    )

    entrypoint: Annotated[str, Field(min_length=3, max_length=256)]
    """The function, written package.module:function, that makes the model's layers. What python -m
    trainwright_worker.describe --training-plan ENTRYPOINT writes belongs here whole."""
    kinds: Annotated[tuple[CustomKindSpec, ...], Field(min_length=1, max_length=256)]
    """Kinds of layers, each once."""
    layers: Annotated[tuple[KindName, ...], Field(min_length=1, max_length=1026)]
    """The kind's name of every layer, in order."""

    def family(self) -> families.Family:
        try:
            kinds = tuple(families.CustomKind(**dict(kind)) for kind in self.kinds)
            return families.Custom(self.entrypoint, kinds, self.layers)
        except ValueError as error:
            raise ValueError(_in_camel_case(str(error))) from None


_NAMES: Final = ("gpt", "llama", "bert", "vit", "swin", "t5", "moe", "wideResNet", "transGan", "custom")


class ModelSpec(Section):
    """The model: exactly one family."""

    model_config = _ruled(
        (
            f"[{', '.join(f'has(self.{name})' for name in _NAMES)}].filter(given, given).size() == 1",
            f"model needs exactly one family; set one of {', '.join(f'model.{name}' for name in _NAMES)}",
        )
    )

    gpt: GptSpec | None = None
    """A GPT-2 of any size."""
    llama: LlamaSpec | None = None
    """A Llama, a Mistral or one of their like."""
    bert: BertSpec | None = None
    """A BERT of any size."""
    vit: VitSpec | None = None
    """A Vision Transformer of any size."""
    swin: SwinSpec | None = None
    """A Swin Transformer of any size."""
    t5: T5Spec | None = None
    """A T5 of any size."""
    moe: MoeSpec | None = None
    """A mixture of experts."""
    wide_res_net: WideResnetSpec | None = None
    """A Wide-ResNet."""
    trans_gan: TransGanSpec | None = None
    """TransGAN's generator."""
    custom: CustomSpec | None = None
    """A model of your own."""

    def family(self) -> families.Family:
        """The one family that is set. Raises ValueError where there is not one (the API server refuses that)."""
        found = [value for name in type(self).model_fields if (value := getattr(self, name)) is not None]
        if len(found) != 1:
            raise ValueError(f"model needs exactly one family, got {len(found)}; set one of {', '.join(_NAMES)}")
        family: families.Family = found[0].family()
        return family
