"""Reader of decoders with rotary positions: the keys that Llama, Mistral, Qwen, Mixtral and others share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainwright.families import Family, Llama, Moe
from trainwright.families.fields import RotaryScaling
from trainwright.hugging_face.config import Config
from trainwright.hugging_face.rotary_keys import FULL, WINDOWED, note_scaling, rotary_keys, scaling_kind

SILU: Final = ("silu", "swish")
GELU_BY_TANH: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_PATTERN: Final = "sliding_window_pattern", "_sliding_window_pattern"


@dataclass(frozen=True)
class RotaryDecoder:
    """Defaults of a decoder with rotary positions, and what it has beside Llama's attention.

    Attributes:
        key_value_heads: None: as many as heads.
        head_size: None: hidden size / heads.
        window: of attention, in tokens.
        window_needs_use: whether the window counts with `use_sliding_window` alone.
        window_from: block from which on there is the window, where `max_window_layers` is absent; None: in all blocks.
        full_attention_every: one block in this many has no window, where `sliding_window_pattern` is absent; None: every one has it.
        norm_over: what the norms of queries and keys are over, "head" or "width"; None: there are none.
        has_biases: whether queries, keys and values have biases, whatever `attention_bias` says.
        has_geglu: whether the gate's activation is GELU in place of SiLU.
        is_tied: whether the projection is the token embedding.
        base: of the rotary angles.
        window_base: of those in blocks with a window; None: likewise.
        epsilon: of the norms.
    """

    key_value_heads: int | None = None
    head_size: int | None = None
    window: int | None = None
    window_needs_use: bool = False
    window_from: int | None = None
    full_attention_every: int | None = None
    norm_over: Literal["head", "width"] | None = None
    has_biases: bool = False
    has_geglu: bool = False
    is_tied: bool = False
    base: float = 10_000.0
    window_base: float | None = None
    epsilon: float = 1e-6

    def fields(self, config: Config, family: str) -> dict[str, Any]:
        """Return the fields that `llama` and `moe` share."""
        hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
        names, lack = (
            (GELU_BY_TANH, f"{family} has GELU by tanh, or SiLU") if self.has_geglu else (SILU, f"{family} has SiLU")
        )
        config.demand("hidden_act", *(("gelu",) if self.has_geglu else ()), *names, lack=lack)
        config.demand("hidden_activation", *names, lack=lack)
        config.note_positions()
        layers, biases = config.number("num_hidden_layers"), config.value("attention_bias", default=None)
        if biases:
            config.remarks.append(f"biases of attention's outputs are not counted: {layers * hidden:,} parameters")
        return {
            "layers": layers,
            "hidden_size": hidden,
            "heads": heads,
            "sequence_length": config.sequence(),
            "vocabulary_size": config.number("vocab_size"),
            "key_value_heads": config.number("num_key_value_heads", default=self.key_value_heads or heads),
            "head_size": _head_size(config, hidden, heads, self.head_size),
            "query_key_norm": self.norm_over is not None,
            **({"query_key_norm_over": "width"} if self.norm_over == "width" else {}),
            "query_key_value_bias": self.has_biases or bool(biases),
            "tied_embeddings": config.flag("tie_word_embeddings", default=self.is_tied),
            **self._windows(config, layers),
            **_angles(config, self.base),
            "norm_epsilon": config.share("rms_norm_eps", default=self.epsilon),
        }

    def _windows(self, config: Config, layers: int) -> dict[str, Any]:
        """Return the window of attention and which blocks have none; nothing where no window is shorter than the sequence."""
        absent = self.window if config.keys.get("sliding_window", self.window) is not None else None
        is_used = config.value("use_sliding_window", default=None) or not self.window_needs_use
        config.skip("layer_types", *_PATTERN)
        kinds = self._kinds(config, layers) if is_used else None
        is_used = is_used and (kinds is None or WINDOWED in kinds)
        window: Any = config.value("sliding_window", default=absent if is_used else None)
        if not is_used or not isinstance(window, int):
            return {}
        base = None if self.window_base is None else _window_base(config, self.window_base)
        if window >= config.sequence() and base is None:
            return {}
        every = None if kinds is None else _full_every(config, kinds)
        return {
            "attention_window": window,
            "full_attention_every": every,
            **({} if base is None else {"window_rotary_base": base}),
        }

    def _kinds(self, config: Config, layers: int) -> Any:
        """Return the kind of each block, WINDOWED or FULL; None: all have the window."""
        kinds = config.value("layer_types", default=None)
        if kinds is not None:
            return kinds
        if self.window_from is not None:
            first: Any = config.value("max_window_layers", default=self.window_from)
            return [WINDOWED if number >= first else FULL for number in range(layers)]
        if self.full_attention_every is not None:
            every = config.number(*_PATTERN, default=self.full_attention_every)
            return [WINDOWED if number % every else FULL for number in range(1, layers + 1)]
        return None


def _window_base(config: Config, absent: float) -> float:
    """Return the base of rotary angles in blocks with a window."""
    by_kind = config.keys.get("rope_parameters")
    within = by_kind.get(WINDOWED) if isinstance(by_kind, Mapping) else None
    if isinstance(within, Mapping) and within.get("rope_theta") is not None:
        return float(within["rope_theta"])
    return config.share("rope_local_base_freq", default=absent)


def _full_every(config: Config, kinds: Any) -> int | None:
    """Return the n of which one block in n has full attention; None: no block has. Notes a lack where there is no such n."""
    if FULL not in kinds:
        return None
    every = list(kinds).index(FULL) + 1
    if every == 1 or list(kinds) != [WINDOWED if number % every else FULL for number in range(1, len(kinds) + 1)]:
        config.lacks.append(
            "layer_types, or max_window_layers, has full attention elsewhere than in one block of every n, the last of them"
        )
        return None
    return every


def _angles(config: Config, base: float) -> dict[str, Any]:
    """Return base and scaling of the rotary angles."""
    given = rotary_keys(config, "rope_theta")
    if given is None:
        return {}
    fields: dict[str, Any] = {"rotary_base": given.share("rope_theta", default=base)}
    config.defaults += given.defaults
    kind = scaling_kind(given)
    if kind == "linear":
        fields["rotary_scaling"] = RotaryScaling("linear", given.share("factor", default=1.0))
    elif kind == "llama3":
        fields["rotary_scaling"] = RotaryScaling(
            "llama3",
            given.share("factor", default=8.0),
            given.share("low_freq_factor", default=1.0),
            given.share("high_freq_factor", default=4.0),
            given.number("original_max_position_embeddings", default=8192),
        )
    else:
        note_scaling(config, kind)
    turned = given.share("partial_rotary_factor", default=0.0) or config.keys.get("partial_rotary_factor", 1.0)
    if turned != 1.0:
        config.remarks.append(f"partial_rotary_factor {turned} is left out: all values of a head are rotated")
    return fields


def llama_reader(
    rotary: RotaryDecoder = RotaryDecoder(),
    *,
    block_norms: Literal["after"] | None = None,
    has_multipliers: bool = False,
) -> Callable[[Config], Family]:
    """Return the reader of a Llama with these defaults; `has_multipliers`: those of Granite."""

    def read(config: Config) -> Family:
        fields, width = rotary.fields(config, "llama"), config.number("intermediate_size")
        multipliers = _multipliers(config, fields) if has_multipliers else {}
        family = Llama(**fields, **multipliers, intermediate_size=width, block_norms=block_norms)
        config.demand("mlp_bias", False, lack="llama has no biases in its feed-forward")
        config.note_dropout("attention_dropout", "resid_pdrop", "embd_pdrop")
        return family

    return read


def _multipliers(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """Return Granite's factors, but for those that change nothing."""
    size = _width_of_head(fields)
    scale = config.share("attention_multiplier", default=1.0)
    factors = {
        "embedding_multiplier": config.share("embedding_multiplier", default=1.0),
        "residual_multiplier": config.share("residual_multiplier", default=1.0),
        "logits_multiplier": 1 / (config.share("logits_scaling", default=1.0) or 1.0),
    }
    changing: dict[str, Any] = {name: factor for name, factor in factors.items() if factor != 1.0}
    return changing if scale == size**-0.5 else {**changing, "attention_scale": scale}


def gemma_reader(
    rotary: RotaryDecoder,
    *,
    block_norms: Literal["both"] | None,
    logits_soft_cap: float | None,
    score_soft_cap: float | None,
) -> Callable[[Config], Family]:
    """Return the reader of a Gemma, whose soft caps are those of absent keys."""

    def read(config: Config) -> Family:
        fields = rotary.fields(config, "llama")
        config.demand("use_bidirectional_attention", False, lack="llama's attention is causal")
        config.note_dropout("attention_dropout")
        size = _width_of_head(fields)
        scored = config.number("query_pre_attn_scalar", default=256) if block_norms else size
        score_cap = _soft_cap(config, "attn_logit_softcapping", score_soft_cap)
        if score_cap is not None:
            config.remarks.append(
                f"attn_logit_softcapping {score_cap:g} is left out, which FlashAttention from 2.6 on and FlexAttention compute in their "
                "kernels, but no kernel of torch's scaled_dot_product_attention, and so not our worker"
            )
        return Llama(
            **fields,
            intermediate_size=config.number("intermediate_size"),
            block_norms=block_norms,
            activation="gelu",
            embedding_multiplier=fields["hidden_size"] ** 0.5,
            logits_soft_cap=_soft_cap(config, "final_logit_softcapping", logits_soft_cap),
            attention_scale=None if scored == size else scored**-0.5,
        )

    return read


def _soft_cap(config: Config, name: str, absent: float | None) -> float | None:
    """Return a soft cap; null means none, as no cap is the default of a class that has one."""
    if name not in config.keys and absent is not None:
        return config.share(name, default=absent)
    given = config.value(name, default=None)
    return None if given is None else config.share(name, default=0.0)


def moe_reader(
    rotary: RotaryDecoder, *, experts: int, experts_per_token: int, width: str
) -> Callable[[Config], Family]:
    """Return the reader of a mixture of experts; `width`: key of an expert's width."""

    def read(config: Config) -> Family:
        config.demand("decoder_sparse_step", 1, lack="moe's plain blocks are as wide as one expert")
        config.demand("mlp_only_layers", [], lack="moe's plain blocks are as wide as one expert")
        if width != "intermediate_size":
            config.skip("intermediate_size")  # of plain blocks, which there are none of
        config.note_dropout("attention_dropout")
        return Moe(
            **rotary.fields(config, "moe"),
            experts=config.number("num_experts", "num_local_experts", default=experts),
            experts_per_token=config.number("num_experts_per_tok", default=experts_per_token),
            intermediate_size=config.number(width),
            balance_loss_weight=config.share("router_aux_loss_coef", default=0.001),
        )

    return read


def _width_of_head(fields: Mapping[str, Any]) -> int:
    """Return the width of a head by the fields of a family."""
    width: int = fields["head_size"] or fields["hidden_size"] // fields["heads"]
    return width


def _head_size(config: Config, hidden: int, heads: int, absent: int | None) -> int | None:
    """Return the width of a head; None where all heads share the width of the model."""
    if absent is None and config.keys.get("head_dim") is None:
        config.skip("head_dim")
        return None
    size = config.number("head_dim", default=absent)
    return None if size * heads == hidden else size
