"""The published figures are there as printed, and what is measured against them is measured rightly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.bench.agreement import MemoryAgreement, inversions, mean_ratio, spearman
from trainwright.bench.figures import Throughput, amp_figures, galvatron_figures
from trainwright.bench.orderings import inversions_of, told


def test_amp_prints_these_search_times():
    printed = {(figure.nodes, figure.devices_per_node): figure.seconds for figure in amp_figures().search_seconds}
    assert printed == {(2, 2): 58.0, (4, 4): 325.6, (8, 8): 890.3, (16, 16): 1627.4}


@pytest.mark.parametrize(
    ("setting", "method", "least", "mean", "spread"),
    [
        ("homogeneous", "Megatron", 1.32, 2.41, 1.29),
        ("homogeneous", "SA", 1.57, 1.82, 0.17),
        ("mixed_cluster", "RS", 1.71, 3.04, 0.82),
        ("mixed_cluster", "AMP", 1.28, 1.73, 0.43),
        ("mixed_model", "ours w/ parameter", 2.19, 2.19, 0.0),
        ("mixed_model", "AMP", 1.07, 1.66, 0.67),
    ],
)
def test_amp_prints_these_methods(setting, method, least, mean, spread):
    found = amp_figures().methods[setting][method]
    assert (found.least, found.mean, found.spread) == (least, mean, spread)


def test_amps_appendix_has_twenty_seven_plans_and_the_best_of_each_method_is_in_the_main_tables():
    figures = amp_figures()
    assert [sum(plan.table == table for plan in figures.trials) for table in ("6", "7", "8", "9", "10", "11")] == [
        5, 5, 5, 5, 2, 5,
    ]  # fmt: skip
    for setting, methods in figures.methods.items():
        for method in ("Megatron", "AMP"):
            plans = [plan for plan in figures.trials if (plan.setting, plan.method) == (setting, method)]
            assert min(plan.seconds for plan in plans) == methods[method].least


@pytest.mark.parametrize(
    ("table", "budget", "strategy", "model", "printed"),
    [
        ("eight_titan", 8, "Megatron (TP)", "ViT-Huge-32", (16.16, 24)),
        ("eight_titan", 8, "Galvatron-Base", "Swin-Huge-48", (25.69, 292)),
        ("eight_titan", 12, "Megatron (TP)", "BERT-Huge-32", (5.72, 8)),
        ("eight_titan", 16, "PyTorch DDP (DP)", "BERT-Huge-48", (None, 0)),
        ("eight_titan", 20, "Galvatron-BMW", "BERT-Huge-32", (29.08, 256)),
        ("sixteen_titan", 8, "Galvatron-Base", "ViT-Huge-32", (111.21, 672)),
        ("sixteen_titan", 16, "Galvatron-BMW", "T5-512/4-48", (80.53, 448)),
        ("sixteen_a100", 8, "PyTorch GPipe (PP)", "BERT-Huge-48", (14.74, 8)),
        ("sixteen_a100", 16, "FSDP/ZeRO-3 (SDP)", "ViT-Huge-48", (274.47, 224)),
        ("sixty_four_a100", 32, "Galvatron-BMW", "ViT-xHuge", (330.30, 1744)),
    ],
)
def test_galvatron_prints_these_throughputs(table, budget, strategy, model, printed):
    assert getattr(galvatron_figures(), table).cell(budget, strategy, model) == Throughput(*printed)


def test_what_cannot_be_read_is_not_taken_for_out_of_memory():
    assert galvatron_figures().sixty_four_a100.cell(16, "Megatron (TP)", "BERT-xHuge") is None


def test_every_throughput_table_is_whole_and_bmw_is_the_best_strategy_of_every_column():
    figures = galvatron_figures()
    for table in (figures.eight_titan, figures.sixteen_titan, figures.sixteen_a100, figures.sixty_four_a100):
        for budget, strategies in table.budgets.items():
            assert len(strategies) == 11
            for model in table.models:
                cells = {name: table.cell(budget, name, model) for name in strategies}
                rates = {name: cell.samples_per_second or 0.0 for name, cell in cells.items() if cell is not None}
                assert rates["Galvatron-BMW"] == max(rates.values())


def test_a_cell_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no cell"):
        Throughput.of("16.16")


def test_spearman_is_of_ranks_alone_and_shares_ranks_of_equal_values():
    assert spearman([1, 2, 3, 4], [10, 100, 1000, 1e9]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5 over √(4.5 · 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_there_is_no_rank_correlation_of_two_values_or_of_equal_ones():
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 2, 3], [5, 5, 5]) is None


@given(st.permutations(range(6)))
def test_pairs_are_inverted_exactly_where_ranks_cross(order):
    names = [str(value) for value in range(6)]
    crossed = {(str(a), str(b)) for a in range(6) for b in range(a + 1, 6) if order[a] > order[b]}
    assert set(inversions(names, list(range(6)), order)) == crossed


def test_memory_agreement_tells_both_errors_apart():
    found = MemoryAgreement.of([True, True, False, False, True], [True, False, True, False, True])
    assert (found.plans, found.agreeing, found.wrongly_fitting, found.wrongly_failing) == (5, 3, 1, 1)


def test_the_mean_ratio_is_geometric():
    assert mean_ratio([1.0, 1.0], [2.0, 0.5]) == pytest.approx(1)
    assert mean_ratio([], []) is None


def test_inverted_strategies_are_counted_over_columns_and_told_with_their_reason():
    columns = [
        {"A": (10.0, 1.0), "B": (5.0, 4.0)},  # the other way round, far
        {"A": (10.0, 5.0), "B": (9.5, 6.0)},  # within 10 % in the paper
        {"A": (10.0, 8.0), "B": (5.0, 4.0)},  # as in the paper
    ]
    (found,) = inversions_of(columns)
    assert (found.better, found.worse, found.columns, found.of, found.close) == ("A", "B", 2, 3, 1)
    assert "cannot tell apart" in told([found], {}, most=1)[0]
    far = inversions_of(columns[:1])
    assert told(far, {"B": "B is flattered"}, most=1)[0].endswith("B is flattered.")
    assert "1 further pairs" in told(far, {}, most=0)[0]
