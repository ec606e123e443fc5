"""Fields of families: their bounds and descriptions, and the rules that span them.

The planner checks them, and the operator derives the fields of a TrainingPlan and the checks of its API server from
them. Sentences name fields as the planner does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from trainwright.bounds import OMITTED_DEFAULT, OMITTED_NONE

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

LARGEST_SIZE: Final = 10**30
"""Maximum of any size; up to it no product of sizes overflows."""

MAX_LAYERS: Final = 100_000
"""Maximum number of layers of one kind, far above what is planned."""

Noun = TypeVar("Noun")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest value of a number.

    Attributes:
        most: in a TrainingPlan.
        limit: what the planner accepts at most; by default LARGEST_SIZE, named only where it is exceeded.
        words: predicate of the planner's refusal.
    """

    least: int
    most: float
    limit: int | None = None
    words: str = "be {}"

    def check(self, place: str, value: float) -> None:
        """Raise ValueError if a number is out of the planner's bounds."""
        limit = LARGEST_SIZE if self.limit is None else self.limit
        if not self.least <= value <= limit:
            exceeded = f"at least {self.least}" if value < self.least else f"at most {limit:g}"
            allowed = exceeded if self.limit is None else f"{self.least} … {limit:g}"
            shown = (
                f"a number of {value.bit_length()} bits"
                if isinstance(value, int) and abs(value) > LARGEST_SIZE
                else value
            )
            raise ValueError(f"{place} must {self.words.format(allowed)}, got {shown}")

    def check_most(self, place: str, value: float) -> None:
        """Raise ValueError if a number is above what a TrainingPlan holds."""
        if value > self.most:
            most = f"{self.most:,}" if isinstance(self.most, int) else f"{self.most:g}"
            raise ValueError(f"{place} must {self.words.format(f'at most {most}')}, got {value}")


@dataclass(frozen=True, slots=True)
class Length(Bounds):
    """Bounds of the length of a list or a text."""

    words: str = "have a length of {}"


@dataclass(frozen=True, slots=True)
class Doc:
    """Description of a field, or of a family at its field `family`.

    Attributes:
        is_offered: a TrainingPlan has the field.
        stores_default: the API server writes a default into the TrainingPlans that leave the field out.
    """

    text: str
    is_offered: bool = True
    stores_default: bool = True

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": self.text}


@dataclass(frozen=True, slots=True)
class FieldRule(Generic[Noun]):
    """Rule about a family's fields.

    Attributes:
        cel: for the API server, about `self`.
        check: the same for the planner.
        sentence: what must hold and what to change, for the API server's refusal.
        refusal: of the planner; by default the sentence.
        field: the one that the API server names; by default the whole family.
    """

    cel: str
    check: Callable[[Noun], bool]
    sentence: str
    refusal: Callable[[Noun], str] | None = None
    field: str | None = None


def multiple(name: str, of: str, why: str, *, is_optional: bool = False) -> FieldRule[Any]:
    """Return the rule that one field is a multiple of another, which may be absent if `is_optional`."""
    return FieldRule(
        f"!has(self.{of}) || self.{name} % self.{of} == 0" if is_optional else f"self.{name} % self.{of} == 0",
        lambda noun: getattr(noun, of) is None or getattr(noun, name) % getattr(noun, of) == 0,
        f"{name} must be a multiple of {of}, since {why}; change one of the two",
        lambda noun: (
            f"{noun.family}.{name} {getattr(noun, name)} must be a multiple of {noun.family}.{of} {getattr(noun, of)}: {why}"
        ),
    )


EQUAL_HEADS: Final = multiple("hidden_size", "heads", "every head takes an equal part")
HEADS_OF_OWN_SIZE: Final[FieldRule[Any]] = FieldRule(
    "has(self.head_size) || self.hidden_size % self.heads == 0",
    lambda noun: noun.head_size is not None or noun.hidden_size % noun.heads == 0,
    "hidden_size must be a multiple of heads, since every head takes an equal part; change one of the two, or give head_size",
    lambda noun: (
        f"{noun.family}.hidden_size {noun.hidden_size} must be a multiple of {noun.family}.heads {noun.heads}: every head takes "
        f"an equal part; or give {noun.family}.head_size"
    ),
)
EQUAL_GROUPS: Final = multiple("heads", "key_value_heads", "each of these serves equally many heads", is_optional=True)
NORM_WITH_EXTENT: Final[FieldRule[Any]] = FieldRule(
    "!has(self.query_key_norm_over) || (has(self.query_key_norm) && self.query_key_norm)",
    lambda noun: noun.query_key_norm_over is None or noun.query_key_norm,
    "query_key_norm_over needs query_key_norm; make that true, or leave both out",
    lambda noun: (
        f"{noun.family}.query_key_norm_over needs {noun.family}.query_key_norm, got {noun.query_key_norm_over} without; make that "
        "true, or leave both out"
    ),
)
WINDOW_BEFORE_EXCEPTIONS: Final[FieldRule[Any]] = FieldRule(
    "!has(self.full_attention_every) || has(self.attention_window)",
    lambda noun: noun.full_attention_every is None or noun.attention_window is not None,
    "full_attention_every needs attention_window, which the other blocks have; give both or neither",
    lambda noun: (
        f"{noun.family}.full_attention_every needs {noun.family}.attention_window, got {noun.full_attention_every} without; give "
        "both or neither"
    ),
)
WHOLE_PATCHES: Final = multiple("image_size", "patch_size", "patches tile the image")

Layers = Annotated[
    int, Bounds(1, 1024, limit=MAX_LAYERS), Doc("Transformer blocks; the embedding and the head come on top.")
]
Width = Annotated[int, Bounds(1, 1_048_576), Doc("Width of the model; a multiple of heads.")]
Heads = Annotated[int, Bounds(1, 1024), Doc("Attention heads; a tensor degree must divide them.")]
Tokens = Annotated[int, Bounds(1, 1_048_576), Doc("Tokens in a row; batches are counted in rows.")]
Entries = Annotated[int, Bounds(1, 4_194_304), Doc("Entries of the token embedding.")]
Classes = Annotated[int, Bounds(1, 4_194_304), Doc("Number of classes.")]
Pixels = Annotated[int, Bounds(1, 65_536)]
ImageSize = Annotated[Pixels, Doc("Side of the square image in pixels; a multiple of patch_size.")]
PatchSize = Annotated[Pixels, Doc("Side of a patch in pixels.")]
Channels = Annotated[int, Bounds(1, 65_536), Doc("Channels of the image.")]
FeedForwardWidth = Annotated[Width | None, Doc("Width of the feed-forward. Absent: 4 × hidden_size.")]
KeyValueHeads = Annotated[
    Heads | None, Doc("Heads of keys and values, each shared by equally many heads. Absent: as many as heads.")
]
HeadSize = Annotated[
    Annotated[int, Bounds(1, 65_536)] | None,
    Doc("Width of an attention head. Absent: hidden_size / heads."),
    OMITTED_DEFAULT,
]
QueryKeyNorm = Annotated[
    bool,
    Doc("Whether queries and keys are normalised before they are rotated, by default in every head."),
    OMITTED_DEFAULT,
]
QueryKeyNormOver = Annotated[
    Literal["head", "width"] | None,
    Doc("What query_key_norm normalises: every head by itself, or all heads together (OLMo 2). Absent: head."),
    OMITTED_NONE,
]
QueryKeyValueBias = Annotated[
    bool, Doc("Whether the projections to queries, keys and values have biases."), OMITTED_DEFAULT
]
AttentionWindow = Annotated[
    Annotated[int, Bounds(1, 1_048_576)] | None,
    Doc("Tokens that a token attends to: itself and those just before (sliding_window). Absent: all before."),
    OMITTED_DEFAULT,
]
FullAttentionEvery = Annotated[
    Annotated[int, Bounds(2, 1024)] | None,
    Doc(
        "One block in this many attends to all tokens before, the others within the window. Absent: every block has the window."
    ),
    OMITTED_DEFAULT,
]
BlockNorms = Annotated[
    Literal["before", "after", "both"] | None,
    Doc("Where a block has norms: before each of its two branches, after it, or both (Gemma 2 and 3). Absent: before."),
    OMITTED_NONE,
]
GateActivation = Annotated[
    Literal["silu", "gelu"] | None,
    Doc("Activation of the feed-forward's gate; gelu is its approximation by tanh (Gemma). Absent: silu."),
    OMITTED_NONE,
]
_Factor = Annotated[float, Bounds(0, 10**6)]
EmbeddingMultiplier = Annotated[
    _Factor | None,
    Doc("Factor of the token embedding; in Gemma the square root of hidden_size. Absent: 1."),
    OMITTED_NONE,
]
ResidualMultiplier = Annotated[
    _Factor | None,
    Doc("Factor of what each branch of a block adds (Granite). Absent: 1."),
    OMITTED_NONE,
]
LogitsMultiplier = Annotated[
    _Factor | None,
    Doc("Factor of the logits, of which Granite's logits_scaling is the inverse. Absent: 1."),
    OMITTED_NONE,
]
LogitsSoftCap = Annotated[
    Annotated[float, Bounds(1, 10**6)] | None,
    Doc("Bound c of the logits, which become c × tanh(logits / c). Absent: none."),
    OMITTED_NONE,
]
AttentionScale = Annotated[
    _Factor | None,
    Doc("Factor of attention's scores, which changes neither time nor memory. Absent: 1 / √head_size."),
    OMITTED_NONE,
]
WindowRotaryBase = Annotated[
    Annotated[float, Bounds(1, 10**12)] | None,
    Doc(
        "Base of the rotary angles in blocks that have the window, which are not scaled then (Gemma 3); it changes neither time nor "
        "memory. Absent: as in other blocks."
    ),
    OMITTED_NONE,
]
ROTARY_BASE: Final = 10_000.0
"""Base of rotary angles where a model does not state it."""
NORM_EPSILON: Final = 1e-6
"""Epsilon of RMSNorms where a model does not state it."""
RotaryBase = Annotated[
    Annotated[float, Bounds(1, 1e12)] | None,
    Doc(f"Base of the rotary angles (rope_theta), which changes neither time nor memory. Absent: {ROTARY_BASE:,.0f}."),
    OMITTED_NONE,
]


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Scaling of rotary angles for sequences longer than those of the first training, as transformers defines its kinds."""

    kind: Annotated[
        Literal["linear", "llama3"],
        Doc("linear divides all frequencies by the factor; llama3 the low ones, with a blend up to the high ones."),
    ]
    factor: Annotated[float, Bounds(1, 1e6), Doc("Divisor of frequencies.")]
    low_frequency_factor: Annotated[
        float,
        Bounds(0, 1e6),
        Doc("Turns over the original positions below which a frequency is low. Absent: 1.", stores_default=False),
    ] = 1.0
    high_frequency_factor: Annotated[
        float, Bounds(0, 1e6), Doc("Turns above which a frequency is high. Absent: 4.", stores_default=False)
    ] = 4.0
    original_positions: Annotated[
        int, Bounds(1, 2**30), Doc("Positions of the first training. Absent: 8192.", stores_default=False)
    ] = 8192

    def __post_init__(self) -> None:
        check(self, "rotary_scaling.{}".format)


RotaryScale = Annotated[
    RotaryScaling | None,
    Doc("Scaling of the rotary angles (rope_scaling), which changes neither time nor memory. Absent: none."),
    OMITTED_NONE,
]
ROTARY_BLEND: Final[FieldRule[Any]] = FieldRule(
    "!has(self.rotary_scaling) || "
    "(has(self.rotary_scaling.high_frequency_factor) ? self.rotary_scaling.high_frequency_factor : 4.0) > "
    "(has(self.rotary_scaling.low_frequency_factor) ? self.rotary_scaling.low_frequency_factor : 1.0)",
    lambda noun: (
        noun.rotary_scaling is None
        or noun.rotary_scaling.high_frequency_factor > noun.rotary_scaling.low_frequency_factor
    ),
    "high_frequency_factor of rotary_scaling must be above its low_frequency_factor, since frequencies between are blended; "
    "change one of the two",
    lambda noun: (
        f"rotary_scaling.high_frequency_factor must be above low_frequency_factor "
        f"{noun.rotary_scaling.low_frequency_factor:g}, got {noun.rotary_scaling.high_frequency_factor:g}"
    ),
)
NormEpsilon = Annotated[
    Annotated[float, Bounds(0, 1)] | None,
    Doc(f"Epsilon of the RMSNorms (rms_norm_eps), which changes neither time nor memory. Absent: {NORM_EPSILON:g}."),
    OMITTED_NONE,
]
TiedEmbeddings = Annotated[bool, Doc("Whether the projection onto the vocabulary is the token embedding.")]
Dropout = Annotated[
    bool,
    Doc(
        "Drop out after the embedding, the softmax and every branch (in T5 every product, too), as published. It costs "
        "memory: masks are saved, and with stored attention a second copy of its scores.",
        is_offered=False,
    ),
]


_FIELD_TYPES: Final[dict[type[Any], dict[str, Any]]] = {}


def field_types(noun: type[Any]) -> dict[str, Any]:
    """Return the annotated type of every field of a family or of a part of one."""
    if noun not in _FIELD_TYPES:
        hints = get_type_hints(noun, include_extras=True)
        _FIELD_TYPES[noun] = {field.name: hints[field.name] for field in fields(noun)}
    return _FIELD_TYPES[noun]


def check(noun: Any, place: Callable[[str], str] | None = None) -> None:
    """Raise ValueError in one sentence if a field is out of its bounds or a rule does not hold.

    `place` returns how the sentence names a field: by default with the family's tag.
    """
    for name, hint in field_types(type(noun)).items():
        _check_bounds(Bounds.check, place(name) if place else f"{noun.family}.{name}", hint, getattr(noun, name))
    for rule in getattr(noun, "rules", ()):
        if not rule.check(noun):
            raise ValueError(rule.refusal(noun) if rule.refusal else f"{noun.family}: {rule.sentence}")


def check_most(noun: Any, *but: str) -> None:
    """Raise ValueError in one sentence if a family's field, but for these, is above what a TrainingPlan holds."""
    for name, hint in field_types(type(noun)).items():
        if name not in but:
            _check_bounds(Bounds.check_most, f"{noun.family}.{name}", hint, getattr(noun, name))


def _check_bounds(check_bound: Callable[[Bounds, str, float], None], place: str, hint: Any, value: Any) -> None:
    if value is None:
        return
    kind, (inner, *others) = get_origin(hint), get_args(hint) or (hint,)
    if kind is Annotated:
        for bounds in others:
            if isinstance(bounds, Bounds):
                check_bound(bounds, place, len(value) if isinstance(bounds, Length) else value)
    if kind in (Annotated, Union, UnionType):  # an optional field's type stands before None
        _check_bounds(check_bound, place, inner, value)
    elif kind is tuple:
        for item in value:
            _check_bounds(check_bound, place, inner, item)
