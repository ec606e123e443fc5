"""Error bands that published runs make, and their test on each source left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.error_bands import MIN_SOURCES
from trainwright_papers.published_bands import bands_of, left_out_sources
from trainwright_papers.published_rows import PublishedRow, read_table
from trainwright_papers.published_scores import ScoredRow, score

HEADER = (
    "source,model,gpu,gpus,machine,tp,pp,dp,sharding,micro_batch,global_batch,sequence,dtype,recompute,"
    "measured_tokens_per_second_per_gpu"
)
LINE = "someone,GPT3-1.3B,a100_80gb,16,dgx-a100,2,2,4,none,2,64,1024,bfloat16,0.5,9000"


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> ScoredRow:
    path = tmp_path_factory.mktemp("table") / "table.csv"
    path.write_text(f"{HEADER}\n{LINE}\n")
    (row,) = read_table(path).rows
    assert isinstance(row, PublishedRow)
    return score(row)


def rows_of(scored: ScoredRow, source: str, ratios: Sequence[float], framework: str | None = None) -> list[ScoredRow]:
    """Return rows of a source whose measured over estimated seconds are `ratios`."""
    rates = [scored.estimated / ratio for ratio in ratios]
    return [
        replace(
            scored, framework=framework, row=replace(scored.row, source=source, measured_tokens_per_second_per_gpu=rate)
        )
        for rate in rates
    ]


def test_every_source_weighs_the_same(scored: ScoredRow) -> None:
    large = rows_of(scored, "large", [1.0] * 300)
    small = [row for name in "abc" for row in rows_of(scored, name, [1.5, 1.6])]
    band = bands_of([*large, *small])[0]
    assert (band.framework, band.generation, band.sources, band.runs) == (None, None, 4, 306)
    assert band.least_ratio == pytest.approx(1.0)
    assert band.greatest_ratio > 1.55


def test_bands_are_by_framework_and_generation(scored: ScoredRow) -> None:
    rows = [*rows_of(scored, "a", [1.1], "megatron"), *rows_of(scored, "b", [0.9])]
    keys = {(band.framework, band.generation): band.runs for band in bands_of(rows)}
    assert keys == {(None, None): 2, (None, "ampere"): 2, ("megatron", None): 1, ("megatron", "ampere"): 1}


def test_sources_that_err_alike_leave_little_within_one(scored: ScoredRow) -> None:
    alike = [row for name, ratio in (("a", 0.8), ("b", 1.0), ("c", 1.2)) for row in rows_of(scored, name, [ratio] * 4)]
    different = [row for name in "abc" for row in rows_of(scored, name, [0.8, 1.0, 1.2])]
    assert bands_of(alike)[0].within_ratio == pytest.approx(0, abs=0.01)
    assert bands_of(different)[0].within_ratio == pytest.approx(1)


def test_a_left_out_source_is_tested_by_the_bands_of_the_others(scored: ScoredRow) -> None:
    others = [row for name in "abc" for row in rows_of(scored, name, [0.9, 1.0, 1.1])]
    tested = {each.source: each for each in left_out_sources([*others, *rows_of(scored, "odd", [1.0, 2.0])])}
    assert (tested["odd"].rows, tested["odd"].inside) == (2, 1)
    assert tested["a"].inside == 3
    assert left_out_sources(rows_of(scored, "alone", [1.0])) == []


def test_own_trials_narrow_the_band_of_a_left_out_source_to_its_spread(scored: ScoredRow) -> None:
    others = [row for name in "abc" for row in rows_of(scored, name, [0.6, 0.8, 1.0, 1.3, 1.6])]
    slow, few = rows_of(scored, "slow", [2.09, 2.1, 2.11, 2.12] * 3), rows_of(scored, "few", [2.0] * 9)
    tested = {each.source: each for each in left_out_sources([*others, *slow, *few])}
    assert tested["slow"].inside == 0
    assert tested["slow"].inside_after == 1
    assert 0 < (tested["slow"].narrowing or 0) < 0.8
    assert tested["few"].inside_after is None


def test_a_framework_of_few_other_sources_has_the_wide_band(scored: ScoredRow) -> None:
    own = [row for number in range(MIN_SOURCES) for row in rows_of(scored, f"own {number}", [1.0, 1.01], "megatron")]
    wide = [row for name in "abcd" for row in rows_of(scored, name, [0.7, 1.4])]
    narrow = left_out_sources([*own, *rows_of(scored, "own", [1.0, 1.01], "megatron"), *wide])
    assert next(each for each in narrow if each.source == "own").bands == "1.00–1.01"
    few = next(each for each in left_out_sources([*own, *wide]) if each.source == "own 0")
    assert few.bands == "0.70–1.40"


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "table.csv"
        path.write_text("\n".join((HEADER, *lines)) + "\n")
        return path

    return write


def test_command_writes_bands_and_tests_them(table: Callable[..., Path], tmp_path: Path) -> None:
    bands = tmp_path / "bands.json"
    lines = [LINE.replace("someone", name).replace("9000", rate) for name in "abc" for rate in ("9000", "6000")]
    options = ["--table", str(table(*lines)), "--write-bands", str(bands), "--leave-out", "--output", "json"]
    result = CliRunner().invoke(app, ["bench", "published", *options])
    assert result.exit_code == 0, result.output
    overall = json.loads(bands.read_text())[0]
    assert (overall["framework"], overall["generation"], overall["sources"], overall["runs"]) == (None, None, 3, 6)
    assert overall["greatest_ratio"] > 1.3 * overall["least_ratio"]
    agreement = json.loads(result.stdout)["agreement"]
    assert [(each["source"], each["rows"]) for each in agreement["sources_left_out"]] == [("a", 2), ("b", 2), ("c", 2)]
