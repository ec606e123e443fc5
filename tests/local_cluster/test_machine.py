"""Leftovers of the cluster on the machine are found by name and path."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from local_cluster import host_settings
from local_cluster.cleanup import dead_sockets, remove_links_into
from local_cluster.commands import ClusterError
from local_cluster.control_groups import control_groups
from local_cluster.images import check_free_disk
from local_cluster.mounts import mounts_below
from local_cluster.paths import Folders, fingerprint, write_if_changed

VERSION_1 = (
    "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\nproc /proc proc rw 0 0"
)
VERSION_2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"


def test_both_cgroup_versions_are_read() -> None:
    hybrid = control_groups("rehearsal", VERSION_1)
    assert not hybrid.unified
    assert hybrid.trees == (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified"))
    assert control_groups("rehearsal", VERSION_2).unified


def test_control_groups_are_created_filled_and_removed(tmp_path: Path) -> None:
    tree = tmp_path / "cpuset"
    tree.mkdir()
    groups = control_groups("rehearsal", f"cgroup {tree} cgroup rw 0 0")
    groups.create(["left"])
    groups.create(["left"])
    assert (tree / "rehearsal" / "left").is_dir()
    procs = tree / "rehearsal" / "left" / "cgroup.procs"
    procs.write_text("999999991\n999999992\n")
    assert groups.pids() == groups.pids("left") == {999999991, 999999992}
    assert groups.pids("system") == set()
    procs.unlink()
    groups.remove()
    assert not groups.exists()


def test_mounts_are_found_innermost_first() -> None:
    table = "\n".join(
        f"1 1 0:1 / {point} rw - tmpfs tmpfs rw"
        for point in ("/run/c", "/run/c/a\\040b/x", "/run/cc", "/run/c/a\\040b")
    )
    found = mounts_below(Path("/run/c"), table)
    assert found == [Path("/run/c/a b/x"), Path("/run/c/a b"), Path("/run/c")]


def test_socket_is_dead_only_when_nobody_listens(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as killed:
        living.bind(str(tmp_path / "living"))
        living.listen()
        killed.bind(str(tmp_path / "killed"))
        (tmp_path / "file").write_text("")
        assert dead_sockets(tmp_path) == [tmp_path / "killed"]


def test_kernel_settings_are_saved_once_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_settings, "_file", lambda name: tmp_path / name)
    for name in host_settings._SET_BY_KUBELET:
        (tmp_path / name).write_text("0\n")
    kept = tmp_path / "kept.json"
    host_settings.remember(kept)
    (tmp_path / "kernel.panic").write_text("10\n")
    host_settings.remember(kept)
    assert json.loads(kept.read_text())["kernel.panic"] == "0"
    host_settings.restore(kept)
    assert (tmp_path / "kernel.panic").read_text() == "0"
    assert not kept.exists()


def test_a_cache_too_deep_for_sockets_is_refused(folders: Folders, tmp_path: Path) -> None:
    deep = Folders(folders.project, tmp_path / ("x" * 80), "rehearsal")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        deep.check_socket_lengths(["node-1"])


def test_a_file_is_rewritten_only_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "settings"
    write_if_changed(file, "one", mode=0o600)
    before = file.stat().st_ino
    write_if_changed(file, "one", mode=0o600)
    assert file.stat().st_ino == before
    write_if_changed(file, "two", mode=0o600)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("two", 0o600)


def test_fingerprint_depends_on_part_boundaries() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint("ab") == fingerprint(b"ab")


def test_a_full_disk_is_told_before_images_are_built(tmp_path: Path) -> None:
    check_free_disk(tmp_path, needed_gb=0)
    with pytest.raises(
        ClusterError, match=r"images need 1000000 GB of disk, \d+ GB are free; free some, or set XDG_CACHE"
    ):
        check_free_disk(tmp_path, needed_gb=1e6)


def test_links_that_a_kubelet_removes_meanwhile_stop_no_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, links = tmp_path / "node", tmp_path / "containers"
    links.mkdir()
    for name in ("one.log", "gone.log", "two.log"):
        (links / name).symlink_to(target / name)
    (links / "other.log").symlink_to(tmp_path / "elsewhere" / "other.log")
    read = Path.readlink

    def read_late(link: Path) -> Path:
        if link.name == "gone.log":
            link.unlink()
        return read(link)

    monkeypatch.setattr(Path, "readlink", read_late)
    remove_links_into(target, links)
    assert [link.name for link in links.iterdir()] == ["other.log"]
