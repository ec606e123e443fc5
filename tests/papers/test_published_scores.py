"""Command `trainwright bench published`: rows of a table, their plans, and agreement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.strategy import Sharding
from trainwright_papers.published_agreement import Agreement, PlanOrder
from trainwright_papers.published_rows import PublishedRow, read_table
from trainwright_papers.published_scores import score

ROW = PublishedRow(
    source="someone",
    model="GPT3-1.3B",
    gpu="a100_80gb",
    gpus=16,
    machine="dgx-a100",
    tp=2,
    pp=2,
    dp=4,
    sharding=Sharding.NONE,
    micro_batch=2,
    global_batch=64,
    sequence=1024,
    dtype="bfloat16",
    recompute=0.5,
    compiled="eager",
    measured_tokens_per_second_per_gpu=9000.0,
)
HEADER = (
    "source,url,model,gpu,gpus,machine,tp,pp,dp,sharding,micro_batch,global_batch,sequence,dtype,recompute,compiled,"
    "measured_tokens_per_second_per_gpu,note"
)
LINE = "someone,u,GPT3-1.3B,a100_80gb,16,dgx-a100,2,2,4,none,2,64,1024,bfloat16,0.5,eager,9000,"


@pytest.fixture
def table(tmp_path):
    def write(*lines, columns=""):
        path = tmp_path / "table.csv"
        path.write_text("\n".join((HEADER + columns, *lines)) + "\n")
        return path

    return write


def published(*options):
    result = CliRunner().invoke(app, ["bench", "published", *map(str, options), "--output", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_table_names_the_columns_that_nothing_reads(table):
    read = read_table(table(LINE))
    assert read.rows == (ROW,)
    assert read.unread_columns == ("url",)
    assert "Columns that are not read: 1: url." in published("--table", table(LINE))["notes"]


def test_plan_has_the_degrees_and_the_recomputed_share_of_its_row():
    cluster = ROW.cluster()
    plan = ROW.plan(26, cluster)
    assert plan.summary() == "pp2 dp4 tp2 mb2×8 [13 13]"
    assert [sum(run.count for run in stage.layers if run.strategy.recompute) for stage in plan.stages] == [6, 6]
    assert len(cluster.devices) == 16


def test_cluster_has_the_memory_that_the_name_of_the_card_states():
    usual, larger = (replace(ROW, gpu=name, machine="dgx-h100") for name in ("h100_80gb", "h100_96gb_500W"))
    assert larger.cluster().accelerators[0].memory_bytes == usual.cluster().accelerators[0].memory_bytes * 96 // 80
    assert larger.power_watts == 500
    assert usual.power_watts is None


def test_score_grows_with_the_published_throughput_alone_in_its_error():
    slower = replace(ROW, measured_tokens_per_second_per_gpu=4500.0)
    found, other = score(ROW), score(slower)
    assert found.estimated == other.estimated > 0
    assert 1 + other.error == pytest.approx(2 * (1 + found.error))


def test_agreement_averages_absolute_errors():
    found = score(ROW)
    rows = [
        replace(found, row=replace(ROW, measured_tokens_per_second_per_gpu=found.estimated / ratio))
        for ratio in (0.9, 1.0, 1.2)
    ]
    agreement = Agreement.of(rows)
    assert agreement.mean_error == pytest.approx(0.1)
    assert agreement.bias == pytest.approx(0.1 / 3)
    assert agreement.largest_error == pytest.approx(0.2)


def test_memory_error_is_signed_and_of_the_rows_that_state_it():
    scored = score(ROW)
    gib = scored.peak_memory_bytes / 2**30
    rows = [replace(scored, row=replace(ROW, measured_memory_gib=gib * ratio)) for ratio in (1.25, 1.6)]
    assert Agreement.of([*rows, scored]).memory_error == pytest.approx((-0.2 - 0.375) / 2)
    assert Agreement.of([scored]).memory_error is None


@pytest.mark.parametrize(
    ("published_rates", "estimated_rates", "rank", "regret"),
    [
        ((10, 20, 40), (1, 2, 3), 1.0, 0.0),
        ((10, 20, 40), (1, 3, 2), 0.5, 0.5),
        ((40, 20, 10), (1, 2, 3), -1.0, 0.75),
    ],
)
def test_order_of_plans_is_of_rows_that_differ_in_their_plans_alone(published_rates, estimated_rates, rank, regret):
    scored = score(ROW)
    rows = [
        replace(scored, estimated=float(estimated), row=replace(ROW, measured_tokens_per_second_per_gpu=float(rate)))
        for rate, estimated in zip(published_rates, estimated_rates, strict=True)
    ]
    other_model = [replace(rows[0], row=replace(rows[0].row, model="GPT3-2.7B"))] * 3
    order = PlanOrder.of([*rows, *other_model])
    assert (order.groups, order.rank, order.regret) == (1, pytest.approx(rank), pytest.approx(regret))
    assert PlanOrder.of(other_model) is None  # three runs of one plan


def test_runs_of_one_plan_count_as_their_mean():
    scored = score(ROW)
    rows = [
        replace(scored, estimated=estimated, row=replace(ROW, measured_tokens_per_second_per_gpu=rate))
        for rate, estimated in ((40.0, 3.0), (20.0, 3.0), (25.0, 2.0), (10.0, 1.0))
    ]
    order = PlanOrder.of(rows)
    assert (order.rank, order.regret) == (pytest.approx(1.0), pytest.approx(0.0))


def test_command_leaves_out_and_counts_rows_that_it_cannot_estimate(table):
    answer = published("--table", table(LINE, LINE.replace("GPT3-1.3B", "GPT9")))
    assert len(answer["records"]) == 1
    assert "Rows left out: 1: model: the sizes of 'GPT9' are not known" in answer["notes"][-1]


def test_command_reads_several_tables(table, tmp_path):
    first = table(LINE)
    second = tmp_path / "second.csv"
    second.write_text(f"{HEADER}\n{LINE.replace('someone', 'other')}\n")
    assert set(published("--table", first, "--table", second)["agreement"]["by source"]) == {"someone", "other"}


def test_command_groups_rows_by_source_gpu_and_kind_of_plan(table):
    other = LINE.replace("someone", "other").replace("2,2,4,none", "1,1,16,zero3")
    result = CliRunner().invoke(app, ["bench", "published", "--table", str(table(LINE, other)), "--output", "json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["origin"] == "estimated"
    assert set(answer["agreement"]["by source"]) == {"someone", "other"}
    assert set(answer["agreement"]["by kind of plan"]) == {"tp+pp+dp", "fsdp"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LINE.replace("GPT3-1.3B", "GPT9"), ["GPT9", "not known"]),
        (LINE.replace(",16,dgx", ",15,dgx"), ["tp × pp × dp", "15"]),
        (LINE.replace("none", "zero9"), ["line 2", "sharding", "zero9"]),
    ],
)
def test_command_refuses_a_row_in_one_sentence(table, line, words):
    result = CliRunner().invoke(app, ["bench", "published", "--table", str(table(line))])
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stderr.count("\n") == 1
