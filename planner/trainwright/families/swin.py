"""Swin Transformer: stages of window attention over patches that become fewer and wider."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, ClassVar, Literal

from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    AttentionShape,
    attention_branch,
    classifier,
    feed_forward_segment,
    layer,
    patches,
)
from trainwright.families.fields import (
    MAX_LAYERS,
    WHOLE_PATCHES,
    Bounds,
    Channels,
    Classes,
    Doc,
    FieldRule,
    ImageSize,
    Length,
    PatchSize,
    Pixels,
    Width,
    check,
)
from trainwright.families.operators import (
    all_reduced_segment,
    element_wise,
    layer_norm,
    matmul,
    position_biases,
    residual,
)
from trainwright.layer import Attention, LayerKind, LayerList, Split


@dataclass(frozen=True, slots=True)
class Swin:
    """Swin Transformer that classifies images; a row is one image.

    Between two stages each square of four patches becomes one of twice the width. Every block has a table of biases for
    the relative positions of two patches in a window.
    """

    layers: Annotated[
        tuple[Annotated[int, Bounds(1, 1024, limit=MAX_LAYERS)], ...],
        Length(1, 16, limit=16, words="give the blocks of {} stages"),
        Doc("Blocks of each stage."),
    ]
    hidden_size: Annotated[Width, Doc("Width in the first stage; twice as much in each further one.")]
    heads: Annotated[
        Annotated[tuple[Annotated[int, Bounds(1, 1024)], ...], Length(1, 16)] | None,
        Doc("Attention heads of each stage. Absent: one for every 32 values of its width."),
    ] = None
    image_size: ImageSize = 224
    patch_size: PatchSize = 4
    window_size: Annotated[Pixels, Doc("Side of a window in patches; windows tile every stage.")] = 7
    channels: Channels = 3
    classes: Classes = 1000
    family: Annotated[Literal["swin"], Doc("A Swin Transformer of any size.")] = "swin"
    rules: ClassVar[tuple[FieldRule[Swin], ...]] = (
        WHOLE_PATCHES,
        FieldRule(
            "!has(self.heads) || self.heads.size() == self.layers.size()",
            lambda swin: swin.heads is None or len(swin.heads) == len(swin.layers),
            "heads must give one number for each stage, as many as layers does; make the two lists equally long",
            lambda swin: f"swin.heads must give one number for each of {len(swin.layers)} stages",
        ),
        FieldRule(
            "self.layers.sum() <= 1024",
            lambda swin: sum(swin.layers) <= 1024,
            "layers must sum to 1024 at most; leave some out",
        ),
    )

    def __post_init__(self) -> None:
        check(self)
        for stage, heads in enumerate(self._heads):
            if self._width(stage) % heads:
                raise ValueError(
                    f"swin: stage {stage} is {self._width(stage)} wide, which {heads} heads do not share equally; "
                    "change swin.heads or swin.hidden_size"
                )
            self._check_windows(stage)

    def _check_windows(self, stage: int) -> None:
        patches_a_side = self.image_size // self.patch_size
        if patches_a_side % 2**stage or self._side(stage) % self._window(stage):
            raise ValueError(
                f"swin: windows of {self.window_size} patches do not tile stage {stage}, which has "
                f"{patches_a_side / 2**stage:g} patches a side; change swin.image_size, patch_size or window_size"
            )

    @property
    def _heads(self) -> tuple[int, ...]:
        return self.heads or tuple(max(1, self._width(stage) // 32) for stage in range(len(self.layers)))

    def heads_of(self, kind: str) -> int | None:
        """Return the attention heads of a kind of layers, None where it has none."""
        name, _, stage = kind.partition("_")
        return self._heads[int(stage)] if name == BLOCK else None

    def _width(self, stage: int) -> int:
        return int(self.hidden_size * 2**stage)

    def _side(self, stage: int) -> int:
        """Return the patches along the image's side."""
        return int(self.image_size // self.patch_size // 2**stage)

    def _window(self, stage: int) -> int:
        """Limit the window to the image's side."""
        return min(self.window_size, self._side(stage))

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block 0 × layers 0, merge 0, block 1 × …, head]`."""
        last = len(self.layers) - 1
        kinds, names = [self._embedding()], [EMBEDDING]
        for stage, count in enumerate(self.layers):
            kinds.append(self._block(stage, attention))
            names += [kinds[-1].name] * count
            if stage < last:
                kinds.append(self._merge(stage))
                names.append(kinds[-1].name)
        kinds.append(self._head())
        # The heads of a stage divide its width and so 4 × its width: heads alone limit the tensor degree.
        return LayerList(tuple(kinds), (*names, HEAD), gcd(*self._heads))

    def _embedding(self) -> LayerKind:
        positions, hidden = self._side(0) ** 2, self.hidden_size
        return layer(
            EMBEDDING,
            patches(self.image_size, self.patch_size, self.channels, hidden),
            layer_norm("embedding_normalisation", positions, hidden),
            boundary=positions * hidden,
        )

    def _block(self, stage: int, attention: Attention) -> LayerKind:
        positions, hidden, heads = self._side(stage) ** 2, self._width(stage), self._heads[stage]
        window = self._window(stage)
        shape = AttentionShape.of_itself(positions, hidden, heads, span=window**2)
        return LayerKind(
            name=f"{BLOCK}_{stage}",
            segments=(
                all_reduced_segment(
                    layer_norm("attention_normalisation", positions, hidden),
                    element_wise("into_windows", positions, hidden),
                    *attention_branch(shape, attention, score_biases=self._score_biases(stage)),
                    position_biases((2 * self.window_size - 1) ** 2 * heads, split=Split.WHOLE),
                    element_wise("out_of_windows", positions, hidden),
                    residual("attention_residual", positions, hidden, bias=True),
                    elements=positions * hidden,
                ),
                feed_forward_segment(positions, hidden, 4 * hidden),
            ),
            output_elements_per_row=positions * hidden,
        )

    def _score_biases(self, stage: int) -> float:
        """Return the biases of scores in a block, the mean over the stage's blocks.

        All windows share heads × window² × window² of them. Every second block shifts its windows if there are several:
        there each has its own, since pairs of patches from opposite edges of the image are masked.
        """
        window, blocks = self._window(stage), self.layers[stage]
        windows = (self._side(stage) // window) ** 2
        return self._heads[stage] * window**4 * (1 + (windows - 1) * (blocks // 2) / blocks)

    def _merge(self, stage: int) -> LayerKind:
        """Return the concatenation of four neighbours, a normalisation and a product that halves their joint width."""
        positions, joint = self._side(stage + 1) ** 2, 4 * self._width(stage)
        return layer(
            f"merge_{stage}",
            element_wise("neighbours", positions, joint),
            layer_norm("merge_normalisation", positions, joint),
            matmul("merge", positions, joint, joint // 2, bias=False),
            boundary=positions * joint // 2,
        )

    def _head(self) -> LayerKind:
        last = len(self.layers) - 1
        positions, hidden = self._side(last) ** 2, self._width(last)
        return layer(
            HEAD,
            layer_norm("final_normalisation", positions, hidden),
            element_wise("mean", positions, hidden),
            *classifier(hidden, self.classes),
            boundary=1,
        )
