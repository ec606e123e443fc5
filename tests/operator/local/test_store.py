"""ConfigMaps as files: written whole, torn ones ignored, shared ones seen."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.snapshot import StoredConfigMap
from trainwright_operator.local.store import FileStore

STORED = StoredConfigMap(
    "links", "links", StoredRole.RESULT, datetime(2026, 1, 1, tzinfo=UTC), {"a": "b"}, {"c": "d"}, uid="1"
)


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    FileStore(tmp_path).write(STORED)
    assert FileStore(tmp_path).all() == (STORED,)


def test_deleted_map_is_gone_and_deleting_it_again_is_no_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.write(STORED)
    store.delete("links")
    store.delete("links")
    assert FileStore(tmp_path).all() == store.all() == ()


def test_torn_and_foreign_files_are_ignored(tmp_path: Path) -> None:
    FileStore(tmp_path).write(STORED)
    whole = (tmp_path / "links.json").read_text()
    (tmp_path / "torn.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "renamed.json").write_text(whole)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / ".links.json.part").write_text("")
    assert FileStore(tmp_path).all() == (STORED,)


def test_shared_store_sees_what_another_program_writes(tmp_path: Path) -> None:
    store = FileStore(tmp_path, is_shared=True)
    FileStore(tmp_path).write(STORED)
    assert store.all() == (STORED,)
