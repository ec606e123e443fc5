"""Decisions on large plans: made in a process of their own, as the operator's loop would make them."""

from __future__ import annotations

import asyncio
import io
import pickle
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from flow_world import World

from trainwright_operator import decision_process
from trainwright_operator.api.model import ModelSpec
from trainwright_operator.decision_process import LENGTH_BYTES, DecisionRequest, packed_nodes
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.quarantine import DecisionError
from trainwright_operator.kube import decision_runner
from trainwright_operator.kube.child_process import start_module
from trainwright_operator.kube.decision_runner import DecisionRunner, is_large


def request_of(world: World) -> DecisionRequest:
    snapshot = world.snapshot()
    return DecisionRequest.of(snapshot, packed_nodes(snapshot), world.now)


@pytest.mark.parametrize("family", ModelSpec.model_fields)
def test_model_of_each_family_can_be_sent_to_another_process(family: str) -> None:
    hint = ModelSpec.model_fields[family].annotation
    (model,) = (member for member in get_args(hint) if member is not type(None))
    assert pickle.loads(pickle.dumps(model)) is model


def test_process_answers_each_request_in_turn() -> None:
    world = World()
    world.run(until=lambda: bool(world.jobs))
    requests = io.BytesIO(b"".join(pickle.dumps(request_of(world)) for _ in range(2)))
    answers = io.BytesIO()
    decision_process.serve(requests, answers)
    answers.seek(0)
    for _ in range(2):
        length = int.from_bytes(answers.read(LENGTH_BYTES), "big")
        assert pickle.loads(answers.read(length)) == world.decide()
    assert answers.read() == b""


def test_errors_are_answered_with_their_place_and_lack_of_memory_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_of(World())
    broken = request._replace(snapshot=replace(request.snapshot, plan=None))  # type: ignore[arg-type]
    assert "(in trainwright_operator/flow/" in decision_process.answer(broken)

    def exhausted(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(decision_process, "decide", exhausted)
    with pytest.raises(MemoryError):
        decision_process.answer(request)


def test_runner_decides_as_the_loop_does_and_replaces_a_process_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.run(until=lambda: bool(world.jobs))
    snapshot = world.snapshot()

    async def run() -> None:
        runner = DecisionRunner()
        assert await runner.decide(snapshot, world.now) == decide(snapshot, world.now)
        fewer = replace(snapshot, nodes=snapshot.nodes[:1])
        assert await runner.decide(fewer, world.now) == decide(fewer, world.now)
        with pytest.raises(DecisionError, match=r"AttributeError.*in trainwright_operator/flow"):
            await runner.decide(replace(snapshot, plan=None), world.now)  # type: ignore[arg-type]
        assert runner._process is not None
        runner._process.kill()
        assert await runner.decide(snapshot, world.now) == decide(snapshot, world.now)
        await runner.stop()
        monkeypatch.setattr(decision_runner, "start_module", lambda _, errors: start_module("this", errors=errors))
        with pytest.raises(DecisionError, match=re.escape("resources.limits.memory")):
            await runner.decide(snapshot, world.now)

    asyncio.run(run())


def test_plan_is_large_by_its_stored_documents() -> None:
    world = World()
    world.run(until=lambda: bool(world.jobs))
    snapshot = world.snapshot()
    assert not is_large(snapshot)
    (first, *others) = snapshot.stored
    assert is_large(replace(snapshot, stored=(replace(first, data={"document.json": "x" * 100_000}), *others)))
