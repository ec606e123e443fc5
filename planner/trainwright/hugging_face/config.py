"""Reader of a `config.json` that notes what it took, what it took for granted, and what no family has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

IGNORED: Final = frozenset(
    {
        "architectures", "model_type", "transformers_version", "auto_map", "torch_dtype", "dtype", "use_cache", "name_or_path",
        "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
        "mask_token_id", "decoder_start_token_id", "initializer_range", "initializer_factor", "initializer_cutoff_factor",
        "embedding_initializer_range", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
        "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "rotary_emb_base", "partial_rotary_factor",
        "original_max_position_embeddings", "pretraining_tp", "attn_implementation", "_attn_implementation", "output_attentions",
        "output_hidden_states", "output_past", "return_dict", "id2label", "label2id", "num_labels", "problem_type",
        "task_specific_params", "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "gradient_checkpointing", "is_decoder", "is_encoder_decoder", "tokenizer_class", "prefix",
        "reorder_and_upcast_attn", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "query_pre_attn_scalar",
        "max_window_layers", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "norm_topk_prob",
        "routed_scaling_factor", "scoring_func", "topk_method", "n_group", "topk_group", "aux_loss_alpha", "seq_aux",
        "initial_context_length", "swiglu_limit", "masked_softmax_fusion", "bias_dropout_fusion", "n_positions_extended",
        "apply_residual_connection_post_layernorm", "relative_attention_max_distance", "dense_act_fn", "cache_implementation",
        "encoder_stride", "qa_dropout", "seq_classif_dropout", "classifier_dropout", "position_embedding_type", "n_ctx",
        "moe_router_aux_loss_coef", "pruned_heads", "finetuning_task", "directionality", "unk_index", "language_model",
    }
)  # fmt: skip
"""Keys that change neither weights nor operators of a training: tokens, initial values, angles, outputs."""
_STRUCTURAL: Final = re.compile(
    "size|dim|head|layer|expert|rank|window|norm|bias|share|block|chunk|kernel|conv|state|rnn|lora|attn|attention|mlp|moe"
)
GELU: Final = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
"""Names of GELU and of its approximations."""
OTHERWISE: Final = "describe the model as custom (`trainwright describe`)"
"""Remedy for a model that no family has."""
_LIKENESS: Final = 0.8
"""Least ratio of difflib at which a key counts as misspelt: `num_decoders` is that close to `num_decoder_layers` (assumed)."""
_LIKENESS_TO_GIVEN: Final = 0.9
"""Least ratio where the right key is given, too: `attention_out_bias` is 0.875 alike to `attention_bias`, but another key (assumed)."""
_NO_MODEL: Final[tuple[Any, ...]] = (None, False, 0, [], {}, "")


@dataclass
class Config:
    """Keys of a `config.json`, and what its reader says of them.

    Attributes:
        keys: as in the file.
        head: class of transformers.
        tokens: of a sequence, which a file of Hugging Face does not say.
        defaults: sentences on keys that are absent.
        remarks: sentences on what the family leaves out, with what that changes.
        lacks: what no family of ours has, each with what to do; if there are any, the model is refused.
        missing: names of keys that are needed and absent, which count as 1; None: they are refused.
    """

    keys: Mapping[str, Any]
    model_type: str
    head: str
    tokens: int | None
    decoder_tokens: int | None = None
    defaults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    missing: list[str] | None = None
    _read: set[str] = field(default_factory=set)

    def value(self, *names: str, default: Any) -> Any:
        """Return the value of the first of these keys that is given, else the default of the class, which is noted."""
        self._read.update(names)
        for name in names:
            if self.keys.get(name) is not None:
                return self.keys[name]
        if default is not None:
            self.defaults.append(f"{names[0]} {_word(default)}")
        return default

    def number(self, *names: str, default: int | None = None) -> int:
        """Return a whole number. Raises ValueError where it is absent without a default, or is something else."""
        value = self.value(*names, default=default)
        if value is None and self.missing is not None:
            self.missing.append(names[0])
            return 1
        if value is None:
            written = [near for name in names for near in _nearest(name, self._unknown())]
            remedy = f"; did you mean {names[0]} for {written[0]}?" if written else ""
            raise ValueError(f"{' or '.join(names)} is missing, which {self.model_type} needs{remedy}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{names[0]} must be a whole number of at least 1, got {_shown(value)}")
        return value

    def numbers(self, *names: str, default: Iterable[int]) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        value = self.value(*names, default=tuple(default))
        if not isinstance(value, list | tuple) or not all(isinstance(number, int) and number > 0 for number in value):
            raise ValueError(f"{names[0]} must be a list of whole numbers, got {_shown(value)}")
        return tuple(value)

    def share(self, *names: str, default: float) -> float:
        """Return a number of at least 0, such as a dropout's."""
        value = self.value(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(f"{names[0]} must be a number of at least 0, got {_shown(value)}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self.value(*names, default=default)
        if value not in (True, False):
            raise ValueError(f"{names[0]} must be true or false, got {_shown(value)}")
        return bool(value)

    def demand(self, name: str, value: Any, *others: Any, lack: str) -> None:
        """Note a lack where a key is given and is none of these values; `lack` says what the family has."""
        self._read.add(name)
        given = self.keys.get(name)
        if given is not None and given not in (value, *others):
            self.lacks.append(f"{name} is {_word(given)}, but {lack}")

    def drops(self, *names: str, default: float) -> bool:
        """Return whether any of a class's dropouts is above 0; `default`: of each that is absent."""
        return max(self.share(name, default=default) for name in names) > 0

    def check_positions(self, entries: int) -> None:
        """Raise ValueError where sequences are longer than the learned positions."""
        if self.sequence() > entries:
            raise ValueError(
                f"it learns positions of {entries} tokens, got a --sequence-length of {self.sequence()}; give at most {entries}"
            )

    def note_dropout(self, *names: str) -> None:
        """Note the dropouts that a family does not have."""
        for name in names:
            if self.value(name, default=None):
                self.remarks.append(f"{name} {self.keys[name]} is not counted; its masks cost memory")

    def note_positions(self) -> None:
        """Note sequences that are longer than what the model was made for."""
        longest = self.value("max_position_embeddings", default=None)
        if isinstance(longest, int) and self.sequence() > longest:
            self.remarks.append(
                f"sequences of {self.sequence()} tokens are longer than max_position_embeddings {longest}"
            )

    def sequence(self) -> int:
        """Return the tokens of a sequence. Raises ValueError where they are not given."""
        if self.tokens is None:
            raise ValueError("a config of Hugging Face does not say how long sequences are; give --sequence-length")
        return self.tokens

    def _unknown(self) -> list[str]:
        """Return the names of the keys that nobody has read so far, and that mean something to nobody."""
        return sorted(name for name in self.keys if name not in self._read | IGNORED)

    def unread(self) -> None:
        """Note the keys that nobody read: a lack where some name parts of a model, else a remark on all of them.

        Raises ValueError for one that is close to a key of the class.
        """
        absent = [name for name in self._read if name not in self.keys]
        for name in self._unknown():
            for near in _nearest(name, absent) or _nearest(name, self._read, likeness=_LIKENESS_TO_GIVEN):
                raise ValueError(f"{name}: there is no such key in {self.head}; did you mean {near}?")
        structural = self.unknown_parts()
        if structural:
            parts = ", ".join(f"{name} {_word(self.keys[name])}" for name in structural)
            self.lacks.append(
                f"{parts} {'is' if len(structural) == 1 else 'are'} not known of {self.model_type}; leave out what changes no "
                f"layer, or {OTHERWISE}"
            )
        unknown = [name for name in self._unknown() if name not in structural and self.keys[name] not in _NO_MODEL]
        if unknown:
            self.remarks.append(f"not read: {', '.join(unknown)}")

    def unknown_parts(self) -> list[str]:
        """Return the names of keys that nobody has read and that name a part of a model which this one has."""
        unknown = (name for name in self._unknown() if self.keys[name] not in _NO_MODEL)
        return [name for name in unknown if _STRUCTURAL.search(name.lower())]

    def skip(self, *names: str) -> None:
        """Leave these keys out, whatever they say."""
        self._read.update(names)


def _nearest(name: str, names: Iterable[str], *, likeness: float = _LIKENESS) -> list[str]:
    """Return the name that is closest to this one, if one is close enough."""
    return get_close_matches(name, sorted(names), n=1, cutoff=likeness)


def _shown(value: Any) -> str:
    """Return a value as a refusal of its type shows it: text between quotes."""
    return repr(_word(value)) if isinstance(value, str) else _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
