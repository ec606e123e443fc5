"""Published figures of the papers, as printed."""

from __future__ import annotations

import pytest

from trainwright_papers.published import Throughput, amp_figures, galvatron_figures


def test_amp_search_seconds_are_as_printed():
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
def test_amp_methods_are_as_printed(setting, method, least, mean, spread):
    found = amp_figures().methods[setting][method]
    assert (found.least, found.mean, found.spread) == (least, mean, spread)


def test_amp_appendix_has_27_plans_whose_best_are_in_the_main_tables():
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
def test_galvatron_throughputs_are_as_printed(table, budget, strategy, model, printed):
    assert getattr(galvatron_figures(), table).cell(budget, strategy, model) == Throughput(*printed)


def test_illegible_cell_is_not_out_of_memory():
    assert galvatron_figures().sixty_four_a100.cell(16, "Megatron (TP)", "BERT-xHuge") is None


def test_throughput_tables_are_complete_and_bmw_is_best_in_every_column():
    figures = galvatron_figures()
    for table in (figures.eight_titan, figures.sixteen_titan, figures.sixteen_a100, figures.sixty_four_a100):
        for budget, strategies in table.budgets.items():
            assert len(strategies) == 11
            for model in table.models:
                cells = {name: table.cell(budget, name, model) for name in strategies}
                rates = {name: cell.samples_per_second or 0.0 for name, cell in cells.items() if cell is not None}
                assert rates["Galvatron-BMW"] == max(rates.values())


def test_throughput_of_refuses_malformed_cells():
    with pytest.raises(ValueError, match="no cell"):
        Throughput.of("16.16")
