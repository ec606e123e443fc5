"""Page of an answer: complete, small, escaped, and without a network, on any cluster."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.answer import Answer
from trainwright.cli import app
from trainwright.cli.page import typed_command
from trainwright.cluster import Accelerator, Cluster, Link, Node, Port
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.report.iteration_chart import Activity, Span, Track
from trainwright.report.page.cluster_figures import node_groups
from trainwright.report.page.composition import html_page
from trainwright.report.page.content import PageCandidate, PageContent
from trainwright.report.page.timeline_figure import message_waits
from trainwright.search import Problem
from trainwright.search.candidates import candidate_of
from trainwright.strategy import Strategy
from trainwright.timeline import Action, Moment, RankTimeline, Timeline

MAX_BYTES = 200_000
GIBIBYTE = 2**30


class _Reader(HTMLParser):
    """Reader of a page: its tags, its texts by heading, and the attributes that could load or run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._tag = tag
        for name, value in attrs:
            if name in {"src", "href", "action", "style"} or name.startswith("on"):
                self.loads.append((name, value or ""))

    def handle_data(self, data: str) -> None:
        if self._tag == "h2" and data.strip():
            self.headings.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(
        "gpt: {layers: 4, hidden_size: 1024, heads: 8, sequence_length: 512, vocabulary_size: 8192}\n"
        "global_batch_size: 32\ndtype: float16\n"
    )
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster_of({"p3.8xlarge": 1, "g4dn.12xlarge": 1})))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--planner=amp", "--top=3", "--node-worth"),
        ("compare", "megatron", "amp"),
        ("explain", "--plan=pp2 dp4 mb1", "--against=heuristic"),
    ],
    ids=lambda words: words[0],
)
def test_commands_write_a_page_with_every_section(folder: Path, words: tuple[str, ...]) -> None:
    target = folder / "page.html"
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}", f"--report={target}"]
    result = CliRunner().invoke(app, [*words, *given])
    assert result.exit_code == 0, result.output
    page = target.read_text()
    reader = _Reader(page)
    worth = ["What each type of node is worth"] if "--node-worth" in words else []
    assert reader.headings == [
        "Model",
        "Placement",
        "One iteration over time",
        "Why is it faster?",
        "Where the time goes, and what would help most",
        "Memory",
        "Candidates",
        *worth,
        "Links between nodes",
        "Make this answer again",
    ]
    assert reader.loads == []
    assert "default-src 'none'" in page
    assert len(page.encode()) < MAX_BYTES


def test_a_page_is_refused_before_the_search_where_it_cannot_be_written(folder: Path) -> None:
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    result = CliRunner().invoke(app, ["plan", *given, f"--report={folder / 'missing' / 'page.html'}"])
    assert result.exit_code == 1
    assert "page.html" in result.output


def _problem(nodes: tuple[Node, ...], links: tuple[Link, ...] = (), batch: int = 64) -> Problem:
    model = Model.of(Gpt(14, 256, 8, sequence_length=128, vocabulary_size=1024))
    accelerators = tuple(Accelerator(name, 80 * GIBIBYTE) for name in dict.fromkeys(node.accelerator for node in nodes))
    profiles = estimate_profiles(model, [a.name for a in accelerators], tensor_degrees=(1, 2, 4, 8), rows=(1, 2, 4))
    return Problem(Cluster(accelerators, nodes, links), model, profiles, batch)


def _pipeline_plan(problem: Problem, stages: int, devices: int) -> Plan:
    """One pipeline of equal data parallel stages on the first devices."""
    layers = len(problem.model.layers)
    each, blocks = devices // stages, layers // stages
    made = []
    for number in range(stages):
        count = blocks if number < stages - 1 else layers - blocks * (stages - 1)
        run = LayerRun(number * blocks, count, Strategy(1, each), (1,) * each)
        made.append(Stage(problem.devices[number * each : (number + 1) * each], (run,)))
    return Plan(layers, problem.global_batch_size, (Pipeline(problem.global_batch_size // each, each, tuple(made)),))


def _content(problem: Problem, plan: Plan, measured: Timeline | None = None) -> PageContent:
    candidate = candidate_of(problem, plan)
    listed = (PageCandidate("1", candidate, candidate.estimate.iteration_seconds * 1.1, "Measured"),)
    return PageContent(Answer(problem, (candidate,)), listed, measured=measured)


def _nodes(count: int, size: int, accelerator: str = "NVIDIA-A100-SXM4-80GB", name: str = "node") -> tuple[Node, ...]:
    card, inside = Port(1e-5, 2.5e10), Port(3e-6, 2.4e11)
    return tuple(Node(f"{name}-{number}", accelerator, size, card, inside) for number in range(count))


def test_names_are_escaped() -> None:
    name = "<script>alert('1')</script>\"&"
    card = Port(1e-5, 1e9)
    problem = _problem((Node(name, "Tesla-T4", 2, card, card), Node("plain", "Tesla-T4", 2, card, card)))
    page = html_page(_content(problem, _pipeline_plan(problem, 2, 4)))
    reader = _Reader(page)
    assert reader.tags.count("script") == 1
    assert "&lt;script&gt;alert" in page
    assert reader.loads == []


def test_4096_devices_are_drawn_by_rack_and_stay_small() -> None:
    nodes = (*_nodes(300, 8), *_nodes(212, 8, "NVIDIA-H100-80GB-HBM3", "fast"))
    problem = _problem(nodes, batch=8192)
    page = html_page(_content(problem, _pipeline_plan(problem, 2, 4096)))
    assert len(page.encode()) < MAX_BYTES
    assert "by accelerator and rack" in page.lower()
    assert "node-0 … node-299" in page
    assert "fast-211" in page
    assert ">node-17<" not in page
    assert "The plan's document is left out" in page


def test_many_stages_and_micro_batches_stay_small_and_say_what_is_left_out() -> None:
    model = Model.of(Gpt(126, 256, 8, sequence_length=128, vocabulary_size=1024))
    small = _problem(_nodes(64, 2))
    problem = Problem(small.cluster, model, small.profiles, 512)
    page = html_page(_content(problem, _pipeline_plan(problem, 64, 64)))
    assert len(page.encode()) < MAX_BYTES
    assert "32 of 64 stages are left out." in page
    assert "24 of 64 groups of devices are left out, the emptiest." in page
    problem = Problem(small.cluster, model, small.profiles, 2048)
    assert "64 of 64 stages are left out, which have too many" in html_page(
        _content(problem, _pipeline_plan(problem, 64, 64))
    )


def test_a_measured_timeline_stands_on_the_scale_of_the_predicted_one() -> None:
    problem = _problem(_nodes(2, 2))
    plan = _pipeline_plan(problem, 2, 4)
    moments = (Moment(Action.FORWARD, 0, 0, 5_000_000), Moment(Action.UPDATE, -1, 5_000_000, 5_000_000))
    ranks = tuple(RankTimeline(device.node, device.slot, moments, 3) for device in plan.devices)
    page = html_page(_content(problem, plan, Timeline(10.0, ranks)))
    assert page.count("0 to 10 s") >= 2
    assert "M0 0h5000v20h-5000z" in page
    assert "12 moments were too many to report: gaps may be work." in page


def test_waits_for_messages_begin_when_the_sender_has_ended() -> None:
    first = Track(0, 0, 2.0, 0.0, 0.0, (Span(0, 1, Activity.FORWARD), Span(6, 7, Activity.BACKWARD)))
    second = Track(0, 1, 2.0, 0.0, 0.0, (Span(1.5, 3, Activity.FORWARD), Span(3, 5, Activity.BACKWARD)))
    assert message_waits((first, second)) == [
        [Span(5, 6, Activity.BACKWARD)],
        [Span(1, 1.5, Activity.FORWARD)],
    ]


def test_racks_are_joined_by_fast_links_alone() -> None:
    nodes = tuple(Node(f"n{number}", "Tesla-T4", 1) for number in range(4))
    speeds = {frozenset(pair): 1e9 for pair in ((0, 2), (0, 3), (1, 2), (1, 3))} | {
        frozenset(pair): 1e10 for pair in ((0, 1), (2, 3))
    }
    links = tuple(Link(f"n{a}", f"n{b}", 1e-5, speeds[frozenset((a, b))]) for a in range(4) for b in range(4) if a != b)
    groups = node_groups(Cluster((Accelerator("Tesla-T4", 16 * GIBIBYTE),), nodes, links))
    assert [[node.name for node in group.nodes] for group in groups] == [["n0", "n1"], ["n2", "n3"]]
    assert [group.name for group in groups] == ["T4 rack 1 (n0 … n1)", "T4 rack 2 (n2 … n3)"]


def test_the_command_is_shown_without_what_it_writes() -> None:
    typed = ["plan", "--cluster", "my cluster.yaml", "--report", "a.html", "--top=3", "--trace=t.json", "--seed", "1"]
    assert typed_command(typed) == "trainwright plan --cluster 'my cluster.yaml' --top=3 --seed 1"


def test_plan_writes_the_predicted_iteration_as_a_trace(folder: Path) -> None:
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    words = [
        "plan",
        "--planner=amp",
        *given,
        f"--trace={folder / 'trace.json'}",
        f"--write-plan={folder / 'plan.json'}",
    ]
    answer = json.loads(CliRunner().invoke(app, [*words, "--output=json"]).stdout)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    plan = documents.loads((folder / "plan.json").read_text(), Plan)
    timed = [event for event in events if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in timed)
    assert end == pytest.approx(1e6 * answer["candidates"][0]["predicted_seconds"], abs=2)
    for number, pipeline in enumerate(plan.pipelines):
        for stage in range(len(pipeline.stages)):
            names = [event["name"] for event in timed if (event["pid"], event["tid"]) == (number, stage)]
            for batch in range(pipeline.micro_batches):
                assert names.count(f"forward {batch}") == names.count(f"backward {batch}") == 1
