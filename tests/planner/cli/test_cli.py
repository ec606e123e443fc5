"""The command line, as a program that somebody else calls."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quick_planner import quickly
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import SEARCHES, Candidate, NoFeasiblePlan, Problem, SearchControl, run
from trainwright.search.amp import amp

MODEL = """
gpt: {layers: 12, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}
global_batch_size: 16
"""

runner = CliRunner()


@pytest.fixture
def files(tmp_path: Path, make_problem: Callable[..., Problem]) -> Path:
    """Return a folder with matching cluster.json, model.yaml, profiles.json and plan.json."""
    return write(tmp_path, make_problem())


def write(folder: Path, problem: Problem) -> Path:
    (folder / "cluster.json").write_text(documents.dumps(problem.cluster))
    (folder / "model.yaml").write_text(MODEL)
    (folder / "profiles.json").write_text(documents.dumps(problem.profiles))
    return folder


def call(folder: Path, command: str, *more: str) -> Result:
    given_files = ["--cluster", "cluster.json", "--model", "model.yaml", "--profiles", "profiles.json"]
    arguments = [str(folder / a) if a.endswith((".json", ".yaml")) else a for a in (*given_files, *more)]
    return runner.invoke(app, [*quickly(command), *arguments])


def refused(result: Result, code: int = 2) -> str:
    """Return the sentence on standard error, the only output."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert not result.stdout
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("trainwright: ")
    return result.stderr


@pytest.mark.parametrize("planner", ["amp", "megatron"])
def test_plan_writes_readable_candidates_best_first(
    files: Path, planner: str, make_problem: Callable[..., Problem]
) -> None:
    result = call(files, "plan", "--planner", planner, "--top", "3", "--output", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    head = ["planner", "search_seconds", "work_bound_seconds", "mean_error"]
    heuristic = [] if planner == "megatron" else ["heuristic", "difference"]
    assert list(answer) == [*head, *heuristic, "candidates"]
    assert answer["planner"] == planner
    expected = run(planner, make_problem(), top=3)
    assert [c["rank"] for c in answer["candidates"]] == [1, 2, 3]
    for found, candidate in zip(answer["candidates"], expected, strict=True):
        figures = ["tokens_per_second_per_device", "model_flop_utilisation", "memory_limit_bytes", "fits"]
        assert list(found) == ["rank", "predicted_seconds", "peak_memory_bytes", *figures, "plan"]
        assert found["predicted_seconds"] == candidate.estimate.iteration_seconds
        assert found["peak_memory_bytes"] == candidate.estimate.peak_memory_bytes
        assert documents.parse(found["plan"], Plan).in_any_format == candidate.plan


def test_estimate_agrees_with_plan(files: Path) -> None:
    answer = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)
    best = answer["candidates"][0]
    (files / "plan.json").write_text(json.dumps(best["plan"]))
    result = call(files, "estimate", "--plan", "plan.json", "--output", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["predicted_seconds"] == best["predicted_seconds"]
    assert found["peak_memory_bytes"] == best["peak_memory_bytes"]
    assert found["feasible"] is True
    assert sum(found["breakdown"].values()) == pytest.approx(found["predicted_seconds"])
    amp = json.loads(call(files, "estimate", "--plan", "plan.json", "--output", "json", "--cost-model", "amp").stdout)
    assert (amp["cost_model"], amp["exact_seconds"]) == ("amp", found["predicted_seconds"])
    assert amp["predicted_seconds"] != found["predicted_seconds"]
    assert amp["breakdown"] == found["breakdown"]


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_plan_that_leaves_too_little_memory_is_shown_and_ends_with_code_3(
    tmp_path: Path, make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], command: str
) -> None:
    plan = run("megatron", make_problem(), top=1)[0]
    # The plan takes 95 % of the memory.
    folder = write(tmp_path, make_problem(make_cluster(memory=int(plan.estimate.peak_memory_bytes / 0.95))))
    (folder / "plan.json").write_text(documents.dumps(plan.plan))
    options = [command, "--planner", "auto"] if command == "explain" else [command]
    found = call(folder, *options, "--plan", "plan.json", "--output", "json")
    assert found.exit_code == 3
    answer = json.loads(found.stdout)
    assert (answer["feasible"], answer["memory_headroom_ratio"]) == (False, 0.08)
    assert answer["reason"].startswith("device node-")
    shown = call(folder, *options, "--plan", "plan.json")
    assert shown.exit_code == 3
    assert "not fit" in shown.stdout
    assert "with 8% of it left free" in " ".join(shown.stdout.split())
    whole = call(folder, *options, "--plan", "plan.json", "--memory-headroom", "0", "--output", "json")
    assert whole.exit_code == 0
    fitting = json.loads(whole.stdout)
    differing = {"fits"} | ({"sentences"} if command == "explain" else set())
    expected = {**answer, "feasible": True, "reason": None, "memory_headroom_ratio": 0.0}
    assert fitting == expected | {name: fitting[name] for name in differing & fitting.keys()}
    assert fitting.get("fits", 1) > answer.get("fits", 0)


def test_tables_mark_emulated_devices(files: Path) -> None:
    result = call(files, "plan", "--planner", "megatron")
    assert result.exit_code == 0
    assert "Candidates of megatron (device times emulated)" in result.stdout
    answer = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)
    (files / "plan.json").write_text(json.dumps(answer["candidates"][0]["plan"]))
    result = call(files, "estimate", "--plan", "plan.json")
    assert "device times emulated" in result.stdout
    assert "gradient sync" in result.stdout


def test_name_that_looks_like_markup_is_shown_verbatim(files: Path) -> None:
    best = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)["candidates"][0]["plan"]
    for file, content in (("plan.json", json.dumps(best)), ("cluster.json", (files / "cluster.json").read_text())):
        (files / file).write_text(re.sub(r"node-(\d)", r"[/\1]:smile:", content))
    result = call(files, "estimate", "--plan", "plan.json")
    assert result.exit_code == 0, result.output
    assert re.search(r"time: of \[/\d\]:smile::\d", " ".join(result.stdout.split()))


def test_command_ends_in_one_sentence_when_the_answer_cannot_be_written(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trainwright.cli.plan.show_json", full)
    sentence = refused(call(files, "plan", "--output", "json"), 1)
    assert "the answer cannot be written: No space left on device" in sentence


def test_command_ends_in_one_sentence_when_sizes_exceed_any_memory(files: Path) -> None:
    (files / "model.yaml").write_text(MODEL.replace("hidden_size: 128", "hidden_size: 1000000000000000000"))
    assert "no plan fits into memory" in refused(call(files, "plan"), 3)


EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples" / "planner"


def test_example_files_give_a_plan_that_estimate_reads(tmp_path: Path) -> None:
    given_files = [
        f"--{file.stem}={file}" for file in (EXAMPLES / n for n in ("cluster.yaml", "model.yaml", "profiles.json"))
    ]
    planned = runner.invoke(app, ["plan", *given_files, "--output", "json"])
    best = json.loads(planned.stdout)["candidates"][0]
    assert len(best["plan"]["pipelines"][0]["stages"]) > 1
    (tmp_path / "plan.json").write_text(json.dumps(best["plan"]))
    result = runner.invoke(app, ["estimate", *given_files, "--plan", str(tmp_path / "plan.json"), "--output", "json"])
    assert json.loads(result.stdout)["predicted_seconds"] == best["predicted_seconds"]
    assert "device times emulated" in runner.invoke(app, ["plan", "--planner", "megatron", *given_files]).stdout


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("cluster.json", None, "cluster.json: cannot be read: No such file or directory"),
        ("model.yaml", "gpt: 3\nglobal_batch_size: 2", "model.yaml: gpt: "),
        ("model.yaml", "gpt: [", "model.yaml: neither YAML nor JSON"),
        ("profiles.json", '{"layers": []}', "there is no profile of layer kind embedding on emulated-fast"),
        ("cluster.json", '{"accelerators": [], "nodes": [], "links": []}', "a cluster needs at least one node"),
    ],
)
def test_bad_file_ends_in_one_sentence_and_code_2(files: Path, file: str, content: str | None, message: str) -> None:
    (files / file).unlink() if content is None else (files / file).write_text(content)
    assert message in refused(call(files, "plan"))


def test_other_bad_input_ends_in_one_sentence_and_code_2(files: Path, tmp_path: Path) -> None:
    assert "choose one of amp, " in refused(call(files, "plan", "--planner", "best"))
    assert ": --top must be at least 1" in refused(call(files, "plan", "--top", "0"))
    assert ": --max-tensor-degree must be at least 1" in refused(call(files, "plan", "--max-tensor-degree", "0"))
    assert "--budget-seconds must be at least 0, got nan" in refused(call(files, "plan", "--budget-seconds", "nan"))
    for effort in ("0", "nan", "1001"):
        assert f"--effort must be 0.1 to 1,000, got {effort}" in refused(call(files, "plan", "--effort", effort))
    for command in (("plan",), ("explain",), ("compare", "amp", "megatron")):
        assert "--effort needs the planner auto" in refused(call(files, *command, "--effort", "2"))
    assert "choose one of cluster, model, profiles, plan, runtime, trials" in refused(
        runner.invoke(app, ["schema", "nothing"])
    )
    without = runner.invoke(
        app, ["plan", "--cluster", str(files / "cluster.json"), "--model", str(files / "model.yaml")]
    )
    assert "--profiles is needed" in refused(without)
    (files / "folder.json").mkdir()
    assert "Is a directory" in refused(call(files, "plan", "--cluster", "folder.json"))


def test_estimate_refuses_a_plan_for_another_batch(files: Path) -> None:
    answer = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)
    (files / "plan.json").write_text(json.dumps(answer["candidates"][0]["plan"]))
    (files / "model.yaml").write_text(MODEL.replace("16", "32"))
    assert "a global batch of 16 rows" in refused(call(files, "estimate", "--plan", "plan.json"))


def test_no_feasible_plan_ends_in_one_sentence_and_code_3(
    tmp_path: Path, make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]
) -> None:
    folder = write(tmp_path, make_problem(make_cluster(memory=2**20)))
    assert "no plan fits into memory with 8% of it left free; the closest is" in refused(call(folder, "plan"), 3)
    assert "no plan fits into memory; the closest is" in refused(call(folder, "plan", "--memory-headroom", "0"), 3)


def test_shown_plans_keep_the_limits(files: Path) -> None:
    limits = ["--max-tensor-degree", "1", "--max-data-degree", "2", "--max-pipeline-degree", "4", "--spare", "node-4"]
    shown = json.loads(call(files, "plan", *limits, "--use-nodes", "node-1,node-2", "--output", "json").stdout)
    for candidate in shown["candidates"]:
        plan = documents.parse(candidate["plan"], Plan)
        assert set(plan.nodes) <= {"node-1", "node-2"}
        for pipeline in plan.pipelines:
            assert len(pipeline.stages) <= 4
            assert all(
                run.strategy.tensor == 1 and run.strategy.data <= 2 for stage in pipeline.stages for run in stage.layers
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spare", "node-9"], "unknown node or accelerator node-9; the cluster has the nodes node-1, "),
        (["--use-nodes", "emulated-fast"], "unknown node emulated-fast; the cluster has node-1, "),
        (["--use-nodes", " ,"], "--use-nodes needs at least one name, got ' ,'; leave the option out"),
        (["--memory-headroom", "8%"], "'--memory-headroom': expected a share below 1, got '8%'; write 0.08 for 8%"),
        (["--memory-headroom", "-0.5"], ": --memory-headroom must be"),
        (["--tolerance", "3%"], "'--tolerance': expected a share below 1, got '3%'; write 0.03 for 3%"),
        (["--tolerance", "little"], "'--tolerance': expected a share such as 0.03 for 3%, got 'little'"),
        (["--budget-seconds", "-1"], "--budget-seconds must be at least 0"),
        (["--keep-weight", "3"], "--keep-weight needs --keep"),
    ],
)
def test_plan_refuses_limits_that_mean_nothing(files: Path, options: list[str], message: str) -> None:
    assert message in refused(call(files, "plan", *options))


@pytest.mark.parametrize("options", [["--seed", "3"], ["--planner", "amp"], ["--tolerance", "0.1"]])
def test_explain_refuses_search_options_beside_a_plan(files: Path, options: list[str]) -> None:
    assert "--plan explains the given plan" in refused(call(files, "explain", "--plan", "plan.json", *options))


def test_merge_keys_may_be_repeated() -> None:
    text = "sizes: &sizes {layers: 2, heads: 4}\nmore: &more {hidden_size: 8}\ngpt: {<<: *sizes, <<: *more}\n"
    with pytest.raises(documents.DocumentError) as refused_for_another_reason:
        documents.loads(text, Plan)
    assert "twice" not in str(refused_for_another_reason.value)


def test_repeated_key_is_refused_with_its_lines(files: Path) -> None:
    model = files / "again.yaml"
    model.write_text("global_batch_size: 8\ngpt: {layers: 2}\nglobal_batch_size: 16\n", encoding="utf-8")
    told = refused(runner.invoke(app, ["plan", f"--cluster={files / 'cluster.json'}", f"--model={model}"]))
    assert "the key 'global_batch_size' is given twice, in lines 1 and 3; keep one" in told


def test_batch_size_option_overrides_the_model_file(files: Path) -> None:
    shown = json.loads(call(files, "plan", "--global-batch-size", "32", "--top", "1", "--output", "json").stdout)
    assert shown["candidates"][0]["plan"]["global_batch_size"] == 32
    assert "must be a number of rows or `search`, got 'many'" in refused(
        call(files, "plan", "--global-batch-size", "many")
    )
    assert "--global-batch-size must be 1" in refused(call(files, "plan", "--global-batch-size", "0"))


@pytest.mark.parametrize("rows", ["16", "search"])
def test_batch_size_option_is_used_when_the_model_file_has_none(files: Path, rows: str) -> None:
    def found() -> str:
        more = ("--planner", "megatron", "--global-batch-size", rows, "--output", "json")
        return json.loads(call(files, "plan", *more).stdout)["candidates"]

    named = found()
    (files / "model.yaml").write_text(MODEL.replace("global_batch_size: 16", ""))
    assert found() == named
    assert "global_batch_size: Field required: add it" in refused(call(files, "plan"))
    told = refused(call(files, "plan", "--global-batch-size", "0"))
    assert "--global-batch-size must be 1 … 1000000, got 0" in told
    assert "model.yaml" not in told
    (files / "model.yaml").write_text(MODEL.replace("global_batch_size", "globalBatchSize"))
    assert "did you mean global_batch_size?" in refused(call(files, "plan", "--global-batch-size", "16"))


def test_searched_batch_has_at_least_the_throughput_of_the_given_batch(files: Path) -> None:
    def throughput(*more: str) -> float:
        answer = json.loads(
            call(files, "plan", "--planner", "megatron", "--top", "1", "--output", "json", *more).stdout
        )
        best = answer["candidates"][0]
        return best["plan"]["global_batch_size"] / best["predicted_seconds"]

    assert throughput("--global-batch-size", "search") >= throughput()
    table = call(files, "plan", "--planner", "megatron", "--global-batch-size", "search").stdout
    assert "batch" in next(line for line in table.splitlines() if line.split()[:1] == ["rank"])


def test_best_plan_is_written_and_read_again(files: Path) -> None:
    written = files / "best.json"
    answer = json.loads(call(files, "plan", "--output", "json", "--write-plan", str(written)).stdout)
    assert json.loads(written.read_text()) == answer["candidates"][0]["plan"]
    seconds = json.loads(call(files, "estimate", "--plan", "best.json", "--output", "json").stdout)["predicted_seconds"]
    assert seconds == answer["candidates"][0]["predicted_seconds"]
    assert "cannot be written into" in refused(call(files, "plan", "--write-plan", str(files / "no" / "p")), 1)
    (files / "answer.json").write_text(json.dumps(answer))
    assert "give what is under candidates[0].plan" in refused(call(files, "estimate", "--plan", "answer.json"))


def test_a_runtime_document_changes_the_estimate(files: Path) -> None:
    (files / "runtime.yaml").write_text("constant_seconds: 10")
    slower = json.loads(call(files, "plan", "--top", "1", "--output", "json", "--runtime", "runtime.yaml").stdout)
    plain = json.loads(call(files, "plan", "--top", "1", "--output", "json").stdout)
    extra = slower["candidates"][0]["predicted_seconds"] - plain["candidates"][0]["predicted_seconds"]
    assert extra == pytest.approx(10)


@pytest.mark.parametrize("cost_model", ["amp", "galvatron"])
def test_estimate_supports_the_cost_models_of_papers(files: Path, cost_model: str) -> None:
    call(files, "plan", "--write-plan", str(files / "plan.json"))
    result = call(files, "estimate", "--plan", "plan.json", "--cost-model", cost_model)
    assert result.exit_code == 0, result.output
    assert "predicts" in result.stdout
    assert "choose one of exact, amp, galvatron" in refused(
        call(files, "estimate", "--plan", "plan.json", "--cost-model", "guess")
    )


def test_compare_relates_planners_to_the_first(files: Path, make_problem: Callable[..., Problem]) -> None:
    answer = json.loads(call(files, "compare", "megatron", "amp", "--output", "json").stdout)
    assert answer["baseline"] == "megatron"
    assert [found["planner"] for found in answer["planners"]] == ["megatron", "amp"]
    expected = [run(name, make_problem(), top=1)[0].estimate.iteration_seconds for name in ("megatron", "amp")]
    assert [found["predicted_seconds"] for found in answer["planners"]] == expected
    assert [found["relative_seconds"] for found in answer["planners"]] == pytest.approx([1, expected[1] / expected[0]])
    table = call(files, "compare", "megatron", "amp").stdout
    assert "device times emulated" in table
    assert "100.0%" in table


def test_compare_names_the_batch_that_a_single_planner_found(files: Path) -> None:
    assert " batch " not in call(files, "compare", "megatron").stdout
    found = call(files, "compare", "megatron", "--global-batch-size", "search", "--output", "json").stdout
    batch = json.loads(found)["planners"][0]["plan"]["global_batch_size"]
    table = call(files, "compare", "megatron", "--global-batch-size", "search").stdout
    assert re.search(rf"megatron .* {batch} ", table)


@pytest.mark.parametrize("columns", ["20", "60", "200"])
def test_narrow_terminal_shows_every_name_and_unit(files: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = call(files, "compare", "megatron", "amp").stdout
    cells = " ".join(re.findall(r"^megatron +(.*?) *$", table, re.MULTILINE))
    assert re.match(r"\S+ m?s +[\d,.]+ +[\d.]+% +[\d.]+/[\d.]+ ", cells)
    assert "tok/s/GPU" in table
    assert " memory" in table


def test_compare_shows_a_row_when_a_planner_finds_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> list[object]:
        raise NoFeasiblePlan("nothing here")

    monkeypatch.setitem(SEARCHES, "megatron", nothing)
    table = call(files, "compare", "megatron", "amp").stdout
    assert re.search(r"megatron +no plan", table)
    assert "megatron: nothing here" in table
    assert re.search(r"amp .*100.0%", table)


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        (("no memory; the closest is A", "no memory; the closest is A"), "no memory; the closest is A"),
        (
            ("no memory; the closest is A", "no memory; the closest is B"),
            "no memory; megatron: the closest is A; amp: the closest is B",
        ),
        (("no memory", "no devices; add some"), "megatron: no memory; amp: no devices; add some"),
    ],
)
def test_compare_says_once_why_no_planner_found_a_plan(
    files: Path, monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, str], told: str
) -> None:
    def refusing(reason: str) -> Callable[..., list[object]]:
        def search(*_: object) -> list[object]:
            raise NoFeasiblePlan(reason)

        return search

    for name, reason in zip(("megatron", "amp"), reasons, strict=True):
        monkeypatch.setitem(SEARCHES, name, refusing(reason))
    sentence = refused(call(files, "compare", "megatron", "amp"), 3)
    assert sentence == f"trainwright: no planner found a plan: {told}\n"


def test_ctrl_c_ends_without_a_traceback(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setitem(SEARCHES, "amp", interrupted)
    assert "trainwright: interrupted" in refused(call(files, "plan"), 130)


@pytest.fixture
def usual_ctrl_c() -> Iterator[None]:
    """Python's own effect of Ctrl-C, which a shell takes from programs that it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
def test_ctrl_c_shows_the_best_plans_so_far(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        signal.raise_signal(signal.SIGINT)
        assert control.expired()
        return amp(problem, control, top)

    monkeypatch.setitem(SEARCHES, "amp", interrupted)
    for command in ("plan", "explain"):
        shown = call(files, command)
        assert shown.exit_code == 130
        assert "The search was interrupted; it may have left better plans out." in " ".join(shown.stdout.split())
    compared = call(files, "compare", "amp", "megatron")
    assert compared.exit_code == 130
    assert "amp" in compared.stdout
    assert "megatron  " not in compared.stdout
    (row,) = json.loads(call(files, "compare", "amp", "megatron", "--output=json").stdout)["planners"]
    assert (row.get("interrupted"), row.get("stopped_by_budget")) == (True, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("usual_ctrl_c")
def test_second_ctrl_c_ends_at_once(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[object]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setitem(SEARCHES, "amp", interrupted)
    assert "interrupted before there was a plan" in refused(call(files, "plan"), 130)


def test_options_that_do_not_exist_are_refused_in_one_sentence() -> None:
    assert "No such option" in refused(runner.invoke(app, ["plan", "--bad"]))
    assert "Missing option '--cluster'" in refused(runner.invoke(app, ["plan"]))
    assert "No such command 'best'" in refused(runner.invoke(app, ["best"]))


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(["schema"], "schema"), (["plan", "--top", "x"], "plan"), (["bench", "paper"], "bench"), (["best"], "")],
)
def test_wrong_options_point_to_the_help_of_their_command(arguments: list[str], command: str) -> None:
    told = refused(runner.invoke(app, arguments, prog_name="trainwright"))
    assert told.endswith(f"; see `{f'trainwright {command}'.strip()} --help`\n")
