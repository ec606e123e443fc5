"""Abort signal: only who has the gang's secret can raise it or tell why."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainwright import documents
from trainwright.cluster import Device
from trainwright.worker_api import SECRET_FILE, Cause, FailureReason
from trainwright_worker.gang.abort import AbortListener, ForgedMessageError, GangSecret, StatusBoard

SECRET, OTHER = GangSecret(b"of the gang"), GangSecret(b"of another gang")
CAUSE = Cause(FailureReason.CRASHED, "the process crashed", "node-a", 0)
DEVICES = (Device("node-a", 0), Device("node-b", 0))
SOON = timedelta(milliseconds=300)


@pytest.fixture
def store() -> dist.TCPStore:
    """Host a gang's store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def heard(store: dist.TCPStore) -> Iterator[queue.Queue[Cause]]:
    """Listen with the gang's secret; return the causes of aborts."""
    causes = queue.Queue[Cause]()
    listener = AbortListener("127.0.0.1", store.port, SECRET)
    listener.listen(causes.put)
    yield causes
    listener.close()


def board_of(store: dist.TCPStore, secret: GangSecret) -> StatusBoard:
    return AbortListener("127.0.0.1", store.port, secret, DEVICES).connect_board()


def test_peer_with_another_secret_cannot_stop_the_gang_and_one_with_the_same_can(store, heard) -> None:
    assert board_of(store, OTHER).raise_abort(CAUSE), "nobody aborted with that secret before"
    with pytest.raises(queue.Empty):
        heard.get(timeout=SOON.total_seconds())
    assert board_of(store, SECRET).raise_abort(CAUSE)
    assert heard.get(timeout=5) == CAUSE


def test_unsigned_message_at_the_signals_own_place_is_ignored(store, heard) -> None:
    place = dist.PrefixStore(SECRET.digest("bell"), store)
    place.set("alarm", documents.dumps(CAUSE))
    with pytest.raises(ForgedMessageError, match="not signed with the gang's secret"):
        board_of(store, SECRET).wait_for_abort(SOON)
    with pytest.raises(queue.Empty):
        heard.get(timeout=SOON.total_seconds())


def test_status_that_is_not_signed_for_its_place_does_not_count(store) -> None:
    board, place = board_of(store, SECRET), dist.PrefixStore(SECRET.digest("bell"), store)
    board.report_pod_failure(CAUSE)
    place.set("node node-b", place.get("node node-a"))
    assert board.gather_statuses(is_enough=lambda _: True).pod_causes == (CAUSE,)


def test_secret_lies_beside_the_task_or_is_empty(tmp_path) -> None:
    task = tmp_path / "order.json"
    assert GangSecret.beside(task) == GangSecret(b"")
    (tmp_path / SECRET_FILE).write_text("5e")
    assert GangSecret.beside(task) == GangSecret(b"5e")
    assert "5e" not in repr(GangSecret.beside(task)), "a traceback would show it"
    assert GangSecret.new() != GangSecret.new()
