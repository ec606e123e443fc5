"""Kinds of documents: what stored objects carry, whatever classes are called."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import dataclass, fields, make_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import trainwright
import trainwright_operator
import trainwright_worker
from trainwright import documents
from trainwright.cli.schema import DOCUMENTS
from trainwright.document_kind import KINDS, document
from trainwright.worker_api import Progress

GOLDEN = Path(__file__).parents[1] / "golden"
STORED = sorted((GOLDEN / "stored_documents").glob("*.json"))
"""Objects as version 0.1.0 wrote them: ConfigMaps, a checkpoint's state, lines of workers' logs."""
NEWER = {
    "dtype": [None],
    "slow_format": [""],
    "process_bytes": [None, []],
    "overlap_dtype": ["float32"],
    "formats": [[]],
    "hides_transfers": [True],
    "copied_bytes_per_parameter": [0.0],
    "inside_link_ratio": [None],
    "saved_elements_per_micro_batch": [0.0],
    "is_causal": [False],
    "power_watts": [None],
    "reduces_every_micro_batch": [False],
    "kernels": ["eager"],
    "attention_library": ["pytorch"],
    "fuses_loss": [False],
    "overlaps_tensor_sync": [False],
    "virtual_stages": [1],
    "host_seconds_per_operator": [60e-6],
    "selective_recompute": [None],
    "gathers_inputs_again": [False],
    "syncs_every_micro_batch": [False],
    "keeps_gathered_weights": [True],
    "sequence_parallel": [True],
    "skipped_updates": [0],
}
"""Fields that version 0.1.0 did not write, with the values that stand for their absence."""


def _declared(package: ModuleType) -> dict[str, type]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    own = [noun for noun in KINDS if noun.__module__.startswith(f"{package.__name__}.")]
    assert len({KINDS[noun] for noun in own}) == len(own), "two nouns of one kind"
    return {KINDS[noun]: noun for noun in own}


@pytest.fixture(scope="module")
def nouns() -> dict[str, type]:
    found = [_declared(package) for package in (trainwright, trainwright_operator, trainwright_worker)]
    kinds = [kind for one in found for kind in one]
    assert len(set(kinds)) == len(kinds), "two nouns of one kind"
    return {kind: noun for one in found for kind, noun in one.items()}


def test_kinds_and_their_fields_are_those_of_the_golden_file(nouns: dict[str, type]) -> None:
    found = {kind: sorted(documents.schema(noun)["properties"]) for kind, noun in sorted(nouns.items())}
    assert found == json.loads((GOLDEN / "kinds.json").read_text())


@pytest.mark.parametrize("file", STORED, ids=[file.stem for file in STORED])
def test_a_stored_document_of_the_last_release_is_read_and_written_alike(file: Path, nouns: dict[str, type]) -> None:
    text = file.read_text()
    found = documents.loads(text, nouns[file.stem])
    assert json.loads(documents.dumps(found), object_hook=_without_newer_fields) == json.loads(text)


def _without_newer_fields(body: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in body.items() if value not in NEWER.get(name, [])}


def test_the_documents_of_the_command_line_have_kinds(nouns: dict[str, type]) -> None:
    assert set(DOCUMENTS.values()) <= set(nouns.values())


def test_a_document_reads_the_same_when_its_class_has_another_name() -> None:
    text = documents.dumps(Progress(1, 3, "rounds"))
    renamed = document("Progress")(
        make_dataclass("StepsDone", [(field.name, type(value)) for field, value in _values(Progress(1, 3, "rounds"))])
    )
    try:
        found = documents.loads(text, renamed)
        assert (type(found).__name__, found.done, found.total, found.what) == ("StepsDone", 1, 3, "rounds")
        assert documents.dumps(found) == text
        assert documents.schema(renamed)["properties"]["document"] == {"const": "Progress"}
    finally:
        del KINDS[renamed]


def _values(noun: Progress) -> list[tuple]:
    return [(field, getattr(noun, field.name)) for field in fields(noun)]


def test_a_class_without_a_kind_is_refused_even_if_its_parent_has_one() -> None:
    @dataclass(frozen=True)
    class Faster(Progress):
        pass

    noun = Faster(1, 3, "rounds")
    for use in (lambda: documents.dump(noun), lambda: documents.parse({}, Faster), lambda: documents.schema(Faster)):
        with pytest.raises(TypeError, match="Faster: no document kind; put @document above its @dataclass"):
            use()
