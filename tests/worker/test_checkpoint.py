"""Checkpoints that one plan wrote: any other plan loads them, and training continues unchanged."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from gang_answers import answers_of
from nightly import quick_first
from one_process import OneProcess
from random_plans import random_plan
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read

from trainwright import documents
from trainwright.training import Training

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(600)]

GANG = Path(__file__).with_name("checkpoint_gang.py")
GPT = {"gpt": {"layers": 4, "hidden_size": 32, "heads": 8, "sequence_length": 8, "vocabulary_size": 37}}
LARGER = {"gpt": {"layers": 4, "hidden_size": 128, "heads": 8, "sequence_length": 8, "vocabulary_size": 1024}}
T5 = {
    "t5": {
        "layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 8, "decoder_sequence_length": 6,
        "vocabulary_size": 32, "position_buckets": 8,
    }
}  # fmt: skip
MOE = {
    "moe": {
        "layers": 3, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 32, "experts": 4,
        "intermediate_size": 32, "expert_every": 2,
    }
}  # fmt: skip
RATES = {"sgd": 0.05, "adam": 1e-3}
ERRORS = {"sgd": 1e-5, "adam": 1e-3}
"""Adam's steps follow the sign of rounding where gradients are almost zero, which slightly affects the others."""
FIRST_SEED, SECOND_SEED = 5100, 6200


def plan_for(model: dict, seed: int) -> dict:
    built = documents.parse({"dtype": "float32", **model, "global_batch_size": 1}, Training).model
    degrees = tuple(degree for degree in (1, 2, 4, 8) if built.max_tensor_degree % degree == 0)
    return json.loads(documents.dumps(random_plan(seed, layers=len(built.layers), tensor_degrees=degrees, devices=8)))


def change(name: str, model: dict, seed: int, optimizer: str, **fields) -> dict:
    return {
        "name": name,
        "model": model,
        "first": plan_for(model, FIRST_SEED + seed),
        "second": plan_for(model, SECOND_SEED + seed),
        "optimizer": optimizer,
        "learning_rate": RATES[optimizer],
        **fields,
    }


def straight(model: dict, ways: list[tuple[int, int]], sharding: str) -> dict:
    """Return a plan of one pipeline over eight devices, with one stage per (tensor degree, data degree)."""
    layers = len(documents.parse({"dtype": "float32", **model, "global_batch_size": 1}, Training).model.layers)
    places = iter({"node": f"node-{place // 2}", "slot": place % 2} for place in range(8))
    stages, first = [], 0
    for number, (tensor, data) in enumerate(ways):
        end = round(layers * (number + 1) / len(ways))
        devices = [next(places) for _ in range(tensor * data)]
        run = {"first": first, "count": end - first, "tensor": tensor, "data": data, "rows": [8 // data] * data}
        stages.append({"devices": devices, "layers": [{**run, "sharding": sharding}]})
        first = end
    pipeline = {"micro_batches": 2, "micro_batch_size": 8, "stages": stages}
    return {"model_layers": layers, "global_batch_size": 16, "pipelines": [pipeline], "schedule": "1f1b"}


FLOAT32 = [
    *(change(f"gpt-{seed}", GPT, seed, ("sgd", "adam")[seed % 2]) for seed in range(14)),
    *(change(f"t5-{seed}", T5, 20 + seed, ("sgd", "adam")[seed % 2]) for seed in range(4)),
    *(change(f"moe-{seed}", MOE, 30 + seed, ("sgd", "adam")[seed % 2]) for seed in range(2)),
    change("small chunks", GPT, 14, "adam", chunk_values=100),
    {
        **change("larger", LARGER, 0, "adam"),
        "first": straight(LARGER, [(2, 2), (1, 4)], "zero2"),
        "second": straight(LARGER, [(2, 1), (1, 2), (1, 2), (2, 1)], "zero3"),
    },
]
HALF = [
    change(f"{first}-{second}", GPT, 40 + number, optimizer, dtypes=[first, second])
    for number, (first, second, optimizer) in enumerate(
        [("float16", "float16", "adam"), ("float16", "float32", "sgd"), ("float32", "bfloat16", "adam")]
    )
]
QUICK = {
    *("gpt-0", "gpt-1", "gpt-4", "gpt-5", "gpt-8", "gpt-11", "t5-0", "t5-1", "moe-0", "small chunks", "larger"),
    *(case["name"] for case in HALF),
}
"""Changes that run outside the nightly run: they cover everything that decides a rank's state."""
WIDER = {"gpt": {**GPT["gpt"], "hidden_size": 64}}
REFUSED = {
    "other family": ({"model": T5}, "it holds a model of family gpt, but this run trains t5"),
    "wider": ({"model": WIDER}, "gpt.hidden_size is 32 in the checkpoint's model, but 64 in this run's; load it into"),
    "other heads": (
        {"model": {"gpt": {**GPT["gpt"], "heads": 4}}},
        "gpt.heads is 8 in the checkpoint's model, but 4 in this run's; load it into the model that it was saved from",
    ),
    "other optimizer": (
        {"optimizer": "adam"},
        "it was saved by optimizer sgd, and the state of adam is not in it; go on with sgd",
    ),
    "nothing there": ({"folder": "nowhere"}, "is not a readable checkpoint: training.json: No such file"),
    "saved twice": ({"saves": True}, "already exists; save each checkpoint to a folder of its own"),
    "saved under a file": ({"saves": True, "folder": "gpt-0/training.json/here"}, "Not a directory"),
    "file removed": ({"damage": "removed"}, "No such file or directory"),
    "file cut": ({"damage": "cut"}, "rank"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def refusal(folder: Path, name: str) -> dict:
    fields = {"model": GPT, "folder": "gpt-0", **REFUSED[name][0]}
    fields["folder"] = str(folder / fields["folder"])
    return {"name": name, "plan": plan_for(fields["model"], SECOND_SEED), **fields}


class Answers:
    """Results of the cases, by name.

    One gang of eight processes runs all quick cases, a second one all others, since starting a gang is expensive. The
    second starts when its first result is requested.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = self._ask(is_quick=True)

    def __getitem__(self, name: str) -> dict:
        if name not in self.found:
            self.found |= self._ask(is_quick=False)
        return self.found[name]

    def _ask(self, *, is_quick: bool) -> dict[str, dict]:
        chosen = [case for case in (*FLOAT32, *HALF) if (case["name"] in QUICK) == is_quick]
        changes = [{**case, "folder": str(self.folder / case["name"])} for case in chosen]
        refusals = [refusal(self.folder, name) for name in REFUSED] if is_quick else []
        return answers_of(GANG, self.folder, [*changes, *refusals])


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    left = folder / "gpt-0.partial"  # left by a run that ended while saving
    left.mkdir()
    (left / "junk").write_text("", encoding="utf-8")
    return Answers(folder)


def names(cases: list[dict]) -> list[str]:
    return [case["name"] for case in cases]


def test_plans_cover_every_feature_that_changes_resident_state() -> None:
    def ways(plan: dict) -> list[list]:
        runs = [run for pipeline in plan["pipelines"] for stage in pipeline["stages"] for run in stage["layers"]]
        return [[run["first"], run["count"], run["tensor"], run["data"], run["sharding"]] for run in runs]

    pairs = [(case["first"], case["second"]) for case in FLOAT32 if case["name"] in QUICK]
    assert all(ways(first) != ways(second) for first, second in pairs)
    for side in zip(*pairs, strict=True):
        assert {way[4] for plan in side for way in ways(plan) if way[3] > 1} == {"none", "zero1", "zero2", "zero3"}
        assert {way[2] for plan in side for way in ways(plan)} >= {1, 2, 4}
        assert {len(plan["pipelines"]) for plan in side} == {1, 2, 3}


@pytest.mark.parametrize("name", quick_first(names([*FLOAT32, *HALF]), QUICK))
def test_loading_into_another_plan_is_bit_identical(answers: Answers, name: str) -> None:
    answer = answers[name]
    assert answer["iterations"] == [3]
    assert answer["missing"] == []
    assert answer["difference"] == 0.0


@pytest.mark.parametrize("name", quick_first(names(FLOAT32), QUICK))
def test_training_continues_as_in_one_uninterrupted_process(answers: Answers, name: str) -> None:
    (case,) = (case for case in FLOAT32 if case["name"] == name)
    answer = answers[name]
    states = {"sgd": {"momentum"}, "adam": {"mean", "square"}}[case["optimizer"]]
    assert set(answer["errors"]) == {"weights", *states}
    assert max(answer["errors"].values()) < ERRORS[case["optimizer"]]
    assert answer["loss_error"] < 1e-6


@pytest.mark.parametrize("name", names(HALF))
def test_other_number_format_continues_from_float32_weights(answers: Answers, name: str) -> None:
    assert answers[name]["loss_error"] < 0.01


@pytest.mark.parametrize("name", quick_first(names(FLOAT32), QUICK))
def test_adam_step_count_is_restored(answers: Answers, name: str) -> None:
    assert [updates for updates, _, _ in answers[name]["scalars"]] == [3, 3]


def test_loss_scale_is_restored_when_present(answers: Answers) -> None:
    before, behind = answers["float16-float16"]["scalars"]
    assert behind == before == [3, 2.0**16, 3]
    assert answers["float16-float32"]["scalars"][1] == [3, 1.0, 0]


@pytest.mark.parametrize("name", REFUSED)
def test_incompatible_checkpoint_is_refused_in_one_sentence_on_every_rank(
    answers: Answers, folder: Path, name: str
) -> None:
    (told,) = answers[name]["told"]
    assert told.startswith(str(folder))
    assert REFUSED[name][1] in told
    assert "\n" not in told


def test_every_value_is_stored_once(answers: Answers, folder: Path) -> None:
    """Expect three 4-byte values per parameter under Adam, plus at most 5 % for index and chunk headers."""
    model = documents.parse({"dtype": "float32", **LARGER, "global_batch_size": 1}, Training).model
    stored = sum(file.stat().st_size for file in (folder / "larger").iterdir())
    state = 3 * 4 * model.parameters
    assert state < stored < 1.05 * state


def test_a_rank_writes_and_reads_about_its_share(answers: Answers, folder: Path) -> None:
    files = [file.stat().st_size for file in (folder / "larger").glob("*.distcp")]
    assert len(files) == 8
    assert max(files) < 0.2 * sum(files)
    for read_bytes, held_bytes in answers["larger"]["bytes"]:
        assert read_bytes < 2.5 * held_bytes + 0.05 * sum(files)


def test_no_chunk_is_larger_than_asked(answers: Answers, folder: Path) -> None:
    index = FileSystemReader(folder / "small chunks").read_metadata()
    sizes = [prod(chunk.sizes) for tensor in index.state_dict_metadata.values() for chunk in tensor.chunks]
    assert 50 < max(sizes) <= 100


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_tools_read_full_weights_by_name(answers: Answers, folder: Path) -> None:
    case = FLOAT32[0]
    one = OneProcess(documents.parse({"dtype": "float32", **GPT, "global_batch_size": 1}, Training).model, seed=3)
    named = one.named()
    optimizer = torch.optim.SGD(named.values(), lr=RATES["sgd"], momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        one.loss(step, case["first"]["global_batch_size"]).backward()
        optimizer.step()
    found = {f"weights/{name}": torch.empty_like(parameter) for name, parameter in named.items()}
    read(found, storage_reader=FileSystemReader(folder / "gpt-0"), no_dist=True)
    for name, parameter in named.items():
        torch.testing.assert_close(found[f"weights/{name}"], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_the_document_beside_the_tensors_can_be_read_without_torch(answers: Answers, folder: Path) -> None:
    document = json.loads((folder / "gpt-0" / "training.json").read_text(encoding="utf-8"))
    assert document["iteration"] == 3
    assert document["optimizer"] == "sgd"
    assert document["family"] == {"family": "gpt", "layers": 4} | document["family"]


def test_save_leaves_no_partial_files(answers: Answers, folder: Path) -> None:
    assert not list(folder.glob("*.partial"))
    assert not (folder / "gpt-0" / "junk").exists()
