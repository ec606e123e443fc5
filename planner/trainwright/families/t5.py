"""T5: an encoder, and a decoder that attends to the encoder's output."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, ClassVar, Final, Literal

from trainwright.bounds import OMITTED_DEFAULT
from trainwright.families.blocks import (
    EMBEDDING,
    HEAD,
    AttentionShape,
    attention_branch,
    divide_vocabulary,
    gated_branch,
    layer,
    relu_branch,
    token_embedding_layer,
)
from trainwright.families.fields import (
    HEADS_OF_OWN_SIZE,
    MAX_LAYERS,
    Bounds,
    Doc,
    Dropout,
    Entries,
    FeedForwardWidth,
    FieldRule,
    Heads,
    HeadSize,
    Layers,
    TiedEmbeddings,
    Tokens,
    Width,
    check,
)
from trainwright.families.operators import (
    all_reduced_segment,
    cross_entropy,
    dropout,
    element_wise,
    lookup,
    matmul,
    position_biases,
    residual,
    rms_norm,
)
from trainwright.layer import Attention, LayerKind, LayerList, Operator, Segment, Split

ENCODER: Final = "encoder"
DECODER: Final = "decoder"
DECODER_EMBEDDING: Final = "decoder_embedding"


@dataclass(frozen=True, slots=True)
class T5:
    """T5: RMSNorm, no biases, and one embedding for encoder and decoder.

    By default T5 1.0, with a ReLU in its feed-forward, whose final projection is the embedding. T5 1.1 and Flan-T5 are `gated`, and
    their projection is not tied. The encoder's blocks share one table of relative positions, and so do the decoder's. After the
    encoder a boundary has two tensors: the decoder's state, and the encoder's output, which every decoder block attends to and
    passes on. A row is one pair of sequences.
    """

    layers: Annotated[int, Bounds(1, 512, limit=MAX_LAYERS), Doc("Blocks of the encoder.")]
    hidden_size: Width
    heads: Heads
    sequence_length: Annotated[Tokens, Doc("Tokens of a row that the encoder reads; a row is a pair of sequences.")] = (
        512
    )
    vocabulary_size: Annotated[Entries, Doc("Entries of the token embedding, which encoder and decoder share.")] = 32128
    decoder_layers: Annotated[Layers | None, Doc("Blocks of the decoder. Absent: as many as the encoder's.")] = None
    decoder_sequence_length: Annotated[
        Tokens | None, Doc("Tokens of a row that the decoder reads. Absent: as many as the encoder.")
    ] = None
    intermediate_size: FeedForwardWidth = None
    position_buckets: Annotated[
        int, Bounds(1, 65_536), Doc("Classes of distances between positions that have a bias of their own.")
    ] = 32
    head_size: HeadSize = None
    gated: Annotated[
        bool,
        Doc(
            "Whether the feed-forward is a GEGLU of three products, as in T5 1.1, or two products with a ReLU between them."
        ),
        OMITTED_DEFAULT,
    ] = False
    tied_embeddings: TiedEmbeddings = True
    dropout: Dropout = False
    family: Annotated[Literal["t5"], Doc("A T5 of any size.")] = "t5"
    rules: ClassVar[tuple[FieldRule[T5], ...]] = (
        HEADS_OF_OWN_SIZE,
        FieldRule(
            "!has(self.decoder_layers) || self.layers + self.decoder_layers <= 1024",
            lambda t5: t5.decoder_layers is None or t5.layers + t5.decoder_layers <= 1024,
            "layers and decoder_layers must sum to 1024 at most; lower one of the two",
        ),
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.heads * (self.head_size or self.hidden_size // self.heads)

    @property
    def decoder_tokens(self) -> int:
        """Tokens per row of the decoder."""
        return self.decoder_sequence_length or self.sequence_length

    @property
    def _boundary(self) -> int:
        """Elements per row of the decoder's state and of the encoder's output."""
        return (self.decoder_tokens + self.sequence_length) * self.hidden_size

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, encoder × layers, decoder_embedding, decoder × decoder_layers, head]`."""
        embedding = token_embedding_layer(
            self.sequence_length, self.hidden_size, self.vocabulary_size, tied=True, drops=self.dropout
        )
        kinds = (embedding, self._encoder(attention), self._turn(), self._decoder(attention), self._head())
        decoders = self.decoder_layers or self.layers
        layers = (EMBEDDING, *[ENCODER] * self.layers, DECODER_EMBEDDING, *[DECODER] * decoders, HEAD)
        largest = gcd(self.heads, self.feed_forward_size)
        source, both = (self.sequence_length,), (self.decoder_tokens, self.sequence_length)
        sequences = {EMBEDDING: source, ENCODER: source, DECODER_EMBEDDING: both, DECODER: both, HEAD: both}
        return divide_vocabulary(LayerList(kinds, layers, largest, sequences=sequences), self.vocabulary_size)

    def _dropout(self, name: str, tokens: int) -> tuple[Operator, ...]:
        return (dropout(name, tokens, self.hidden_size),) if self.dropout else ()

    def _encoder(self, attention: Attention) -> LayerKind:
        tokens = self.sequence_length
        return LayerKind(
            name=ENCODER,
            segments=(self._self_attention(tokens, attention), self._feed_forward(tokens)),
            output_elements_per_row=tokens * self.hidden_size,
            shared_weight="encoder_position_biases",
            shared_parameters=self.position_buckets * self.heads,
        )

    def _turn(self) -> LayerKind:
        """Return the layer between both: the encoder's final normalisation and the decoder's embedding."""
        hidden, vocabulary = self.hidden_size, self.vocabulary_size
        return layer(
            DECODER_EMBEDDING,
            rms_norm("encoder_normalisation", self.sequence_length, hidden),
            *self._dropout("encoder_dropout", self.sequence_length),
            lookup("decoder_tokens", self.decoder_tokens, hidden, vocabulary),
            *self._dropout("decoder_embedding_dropout", self.decoder_tokens),
            boundary=self._boundary,
            token_embedding=vocabulary * hidden,
        )

    def _decoder(self, attention: Attention) -> LayerKind:
        tokens = self.decoder_tokens
        return LayerKind(
            name=DECODER,
            segments=(
                self._self_attention(tokens, attention),
                self._cross_attention(attention),
                self._feed_forward(tokens),
            ),
            output_elements_per_row=self._boundary,
            shared_weight="decoder_position_biases",
            shared_parameters=self.position_buckets * self.heads,
        )

    def _self_attention(self, tokens: int, attention: Attention) -> Segment:
        hidden = self.hidden_size
        return all_reduced_segment(
            rms_norm("attention_normalisation", tokens, hidden),
            *attention_branch(
                AttentionShape.of_itself(tokens, self.attention_width, self.heads),
                attention,
                hidden=hidden,
                bias=False,
                drops=self.dropout,
                score_biases=self.heads * tokens**2,
            ),
            # Every rank has the full table, which stages share as well.
            position_biases(self.position_buckets * self.heads, split=Split.NONE),
            *self._dropout("attention_dropout", tokens),
            residual("attention_residual", tokens, hidden, bias=False),
            elements=tokens * hidden,
        )

    def _cross_attention(self, attention: Attention) -> Segment:
        """Return cross-attention; its backward reduces gradients of the decoder's state and of the encoder's output."""
        tokens, sources = self.decoder_tokens, self.sequence_length
        hidden, width = self.hidden_size, self.attention_width
        shape = AttentionShape(tokens, sources, sources, self.heads, width, width)
        return all_reduced_segment(
            rms_norm("cross_attention_normalisation", tokens, hidden),
            matmul("cross_query", tokens, hidden, width, bias=False, split=Split.COLUMN),
            matmul("cross_key_value", sources, hidden, 2 * width, bias=False, split=Split.COLUMN),
            *shape.operators(attention, drops=self.dropout, prefix="cross_"),
            matmul("cross_attention_output", tokens, width, hidden, bias=False, split=Split.ROW),
            *self._dropout("cross_attention_dropout", tokens),
            residual("cross_attention_residual", tokens, hidden, bias=False),
            elements=tokens * hidden,
            backward_elements=(tokens + sources) * hidden,
        )

    def _feed_forward(self, tokens: int) -> Segment:
        hidden, branch = self.hidden_size, gated_branch if self.gated else relu_branch
        return all_reduced_segment(
            rms_norm("feed_forward_normalisation", tokens, hidden),
            *branch(tokens, hidden, self.feed_forward_size, drops=self.dropout),
            *self._dropout("feed_forward_dropout", tokens),
            residual("feed_forward_residual", tokens, hidden, bias=False),
            elements=tokens * hidden,
        )

    def _head(self) -> LayerKind:
        """Return the decoder's final normalisation, the projection and the loss; the encoder's output ends here."""
        tokens, hidden, vocabulary = self.decoder_tokens, self.hidden_size, self.vocabulary_size
        scale = element_wise("scale", tokens, hidden)  # by 1/√hidden, which a tied projection requires
        return layer(
            HEAD,
            rms_norm("final_normalisation", tokens, hidden),
            *self._dropout("final_dropout", tokens),
            *((scale,) if self.tied_embeddings else ()),
            matmul("projection", tokens, hidden, vocabulary, bias=False),
            cross_entropy(tokens, vocabulary),
            boundary=1,
            token_embedding=vocabulary * hidden if self.tied_embeddings else 0,
        )
