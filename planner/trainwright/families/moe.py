"""Mixture of experts: Llama's attention, and a router before several feed-forwards (Mixtral, Switch)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from operator import itemgetter
from typing import Annotated, ClassVar, Final, Literal

from trainwright.bounds import OMITTED_NONE
from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    divide_vocabulary,
    gated_branch,
    relu_branch,
    token_embedding_layer,
    token_head_layer,
)
from trainwright.families.fields import (
    EQUAL_GROUPS,
    HEADS_OF_OWN_SIZE,
    ROTARY_BLEND,
    WINDOW_BEFORE_EXCEPTIONS,
    AttentionWindow,
    Bounds,
    Doc,
    Entries,
    FieldRule,
    FullAttentionEvery,
    Heads,
    HeadSize,
    KeyValueHeads,
    Layers,
    NormEpsilon,
    QueryKeyNorm,
    QueryKeyValueBias,
    RotaryBase,
    RotaryScale,
    TiedEmbeddings,
    Tokens,
    Width,
    check,
)
from trainwright.families.llama import gated_size, rotary_attention_segment, window_of, windowed_name
from trainwright.families.operators import INDEX_BYTES, all_reduced_segment, matmul, residual, rms_norm
from trainwright.layer import Attention, LayerKind, LayerList, Operator, OperatorKind, Segment

EXPERT_BLOCK: Final = "expert_block"
BALANCE_LOSS_WEIGHT: Final = 0.01
"""Weight of the balance loss where a model does not state it (Switch Transformers' α)."""
BalanceLossWeight = Annotated[
    Annotated[float, Bounds(0, 1e6)] | None,
    Doc(
        "Weight of the loss that spreads tokens over the experts (router_aux_loss_coef), which changes neither time nor memory. "
        f"Absent: {BALANCE_LOSS_WEIGHT}."
    ),
    OMITTED_NONE,
]


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixtral, and Switch Transformers with one expert per token.

    Tokens are assumed to be spread evenly over the experts, with none dropped. A tensor degree splits every expert's
    width; shardings of operators may put experts on devices of their own. A plain feed-forward is as wide as one expert.
    """

    layers: Layers
    hidden_size: Width
    heads: Heads
    sequence_length: Tokens
    vocabulary_size: Entries = 32000
    experts: Annotated[int, Bounds(1, 4096), Doc("Experts of a block that has them.")] = 8
    experts_per_token: Annotated[int, Bounds(1, 4096), Doc("Experts that each token passes through.")] = 2
    expert_every: Annotated[
        int, Bounds(1, 1024), Doc("One block in this many has experts, the others one plain feed-forward.")
    ] = 1
    intermediate_size: Annotated[
        Width | None, Doc("Width of one expert. Absent: 8/3 of hidden_size, rounded up to 256.")
    ] = None
    key_value_heads: KeyValueHeads = None
    head_size: HeadSize = None
    query_key_norm: QueryKeyNorm = False
    query_key_value_bias: QueryKeyValueBias = False
    attention_window: AttentionWindow = None
    full_attention_every: FullAttentionEvery = None
    gated: Annotated[
        bool, Doc("Whether an expert is a SwiGLU of three products, or two products with a ReLU between them.")
    ] = True
    tied_embeddings: TiedEmbeddings = False
    rotary_base: RotaryBase = None
    rotary_scaling: RotaryScale = None
    norm_epsilon: NormEpsilon = None
    balance_loss_weight: BalanceLossWeight = None
    family: Annotated[Literal["moe"], Doc("A mixture of experts.")] = "moe"
    # Fields of Llama that a mixture does not have; the code that both share reads them.
    query_key_norm_over: ClassVar[None] = None
    block_norms: ClassVar[None] = None
    activation: ClassVar[None] = None
    embedding_multiplier: ClassVar[None] = None
    residual_multiplier: ClassVar[None] = None
    logits_multiplier: ClassVar[None] = None
    logits_soft_cap: ClassVar[None] = None
    attention_scale: ClassVar[None] = None
    window_rotary_base: ClassVar[None] = None
    rules: ClassVar[tuple[FieldRule[Moe], ...]] = (
        HEADS_OF_OWN_SIZE,
        EQUAL_GROUPS,
        ROTARY_BLEND,
        WINDOW_BEFORE_EXCEPTIONS,
        FieldRule(
            "self.experts_per_token <= self.experts",
            lambda moe: moe.experts_per_token <= moe.experts,
            "experts_per_token cannot be more than experts; lower it, or raise experts",
            lambda moe: f"moe.experts_per_token {moe.experts_per_token} is more than moe.experts {moe.experts}",
        ),
        FieldRule(
            "self.expert_every <= self.layers",
            lambda moe: moe.expert_every <= moe.layers,
            "expert_every leaves no block with experts; lower it to layers at most",
            lambda moe: f"moe.expert_every {moe.expert_every} leaves no expert in moe.layers {moe.layers}",
        ),
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def feed_forward_size(self) -> int:
        """Width of one expert."""
        return self.intermediate_size or gated_size(self.hidden_size)

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block | expert_block × layers, head]`, where blocks with a window are window_block and so on."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        groups = self.key_value_heads or self.heads
        embedding = token_embedding_layer(tokens, hidden, vocabulary, tied=self.tied_embeddings)
        final = rms_norm("final_normalisation", tokens, hidden)
        head = token_head_layer(final, tokens, hidden, vocabulary, tied=self.tied_embeddings)
        places = [(window_of(self, number), number % self.expert_every == 0) for number in range(1, self.layers + 1)]
        blocks = {place: self._block(attention, *place) for place in sorted(dict.fromkeys(places), key=itemgetter(1))}
        # The loss of experts needs all of a row's choices.
        plain = [block.name for (_, has_experts), block in blocks.items() if not has_experts]
        sequences = dict.fromkeys((EMBEDDING, *plain, HEAD), (tokens,))
        largest = gcd(groups, self.feed_forward_size)
        names = (EMBEDDING, *(blocks[place].name for place in places), HEAD)
        layers = LayerList((embedding, *blocks.values(), head), names, largest, sequences=sequences)
        return divide_vocabulary(layers, vocabulary)

    def _block(self, attention: Attention, window: int | None, has_experts: bool) -> LayerKind:
        attend = rotary_attention_segment(self, attention, window)
        rest = self._experts() if has_experts else self._feed_forward()
        name = windowed_name(EXPERT_BLOCK if has_experts else BLOCK, window)
        return LayerKind(name, (attend, rest), self.sequence_length * self.hidden_size)

    def _feed_forward(self) -> Segment:
        tokens, hidden = self.sequence_length, self.hidden_size
        branch = gated_branch if self.gated else relu_branch
        return all_reduced_segment(
            rms_norm("feed_forward_normalisation", tokens, hidden),
            *branch(tokens, hidden, self.feed_forward_size),
            residual("feed_forward_residual", tokens, hidden, bias=False),
            elements=tokens * hidden,
        )

    def _experts(self) -> Segment:
        """Return the router, the experts' products on their tokens, and the weighted sum.

        In the backward, a tensor group reduces the gradients of the tokens and of the router's weights.
        """
        tokens, hidden, chosen = self.sequence_length, self.hidden_size, self.experts_per_token
        branch = gated_branch if self.gated else relu_branch
        experts = (_of_all(part, self.experts) for part in branch(tokens * chosen, hidden, self.feed_forward_size))
        return all_reduced_segment(
            rms_norm("feed_forward_normalisation", tokens, hidden),
            matmul("router", tokens, hidden, self.experts, bias=False),
            _choice(tokens, self.experts, chosen),
            _dispatch(tokens, hidden, chosen),
            *experts,
            _combination(tokens, hidden, chosen),
            residual("feed_forward_residual", tokens, hidden, bias=False),
            elements=tokens * hidden,
            backward_elements=tokens * (hidden + chosen),
        )


def _of_all(part: Operator, experts: int) -> Operator:
    """Return the operator with a weight for each expert; every token still uses one of them at a time."""
    return Operator(
        name=f"experts_{part.name}",
        kind=part.kind,
        forward_flops_per_row=part.forward_flops_per_row,
        input_elements_per_row=part.input_elements_per_row,
        output_elements_per_row=part.output_elements_per_row,
        positions_per_row=part.positions_per_row,
        weight_elements=experts * part.weight_elements,
        saved_elements_per_row=part.saved_elements_per_row,
        split=part.split,
    )


def _choice(tokens: int, experts: int, chosen: int) -> Operator:
    """Return the softmax over the experts, the choice of the best k, and the normalisation of their weights.

    It saves the probabilities and the indices of the best k, and for the normalisation their weights and sum.
    """
    return Operator(
        name="choice",
        kind=OperatorKind.ROUTING,
        forward_flops_per_row=0.0,
        input_elements_per_row=tokens * experts,
        output_elements_per_row=tokens * chosen,
        positions_per_row=tokens,
        saved_elements_per_row=tokens * (experts + chosen + 1),
        saved_bytes_per_row=INDEX_BYTES * tokens * chosen,
    )


def _dispatch(tokens: int, hidden: int, chosen: int) -> Operator:
    """Return the copy of each token to its experts, which saves the order of (token, expert) pairs."""
    return Operator(
        name="dispatch",
        kind=OperatorKind.ROUTING,
        forward_flops_per_row=0.0,
        input_elements_per_row=tokens * hidden,
        output_elements_per_row=tokens * chosen * hidden,
        positions_per_row=tokens * chosen,
        saved_bytes_per_row=INDEX_BYTES * tokens * chosen,
    )


def _combination(tokens: int, hidden: int, chosen: int) -> Operator:
    """Return the weighted sum of expert outputs by token, which saves both factors and the pairs' order."""
    return Operator(
        name="combination",
        kind=OperatorKind.ROUTING,
        forward_flops_per_row=0.0,
        input_elements_per_row=tokens * chosen * (hidden + 1),
        output_elements_per_row=tokens * hidden,
        positions_per_row=tokens * chosen,
        saved_elements_per_row=tokens * chosen * (hidden + 1),
        saved_bytes_per_row=INDEX_BYTES * tokens * chosen,
    )
