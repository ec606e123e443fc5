"""Image stores of the nodes: one seed, cloned by hard links, with thin layers for running nodes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from local_cluster.commands import ClusterError, run, succeeds, tail, wait_until
from local_cluster.images import SEEDED, Images
from local_cluster.paths import Folders, fingerprint
from local_cluster.processes import Processes, Program
from local_cluster.progress import Steps

_BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")
# containerd writes these in place, so a clone needs copies; everything else is written once.
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")
_LONGEST_IMPORT_SECONDS = 900
_FORMAT = "uncompressed layers"  # of the store; a store of another format is recreated
_SEED_PROGRAM = "seed-containerd"
_PLUGINS_WITHOUT_USE = ("aufs", "btrfs", "devmapper", "zfs")


@dataclass(frozen=True, slots=True)
class SeedStore:
    """containerd store with all images except the thin code layers."""

    folders: Folders
    images: Images

    @property
    def key(self) -> str:
        return fingerprint(_FORMAT, *(self.images.digest(image) for image in SEEDED))

    @property
    def root(self) -> Path:
        return self.folders.images / f"seed-{self.key}"

    def ensure(self, steps: Steps, processes: Processes) -> Path:
        """Create the seed store if missing (about two minutes: torch's layer is 5 GB)."""
        root = self.root
        if root.exists():
            return root
        partial = self.folders.images / "seed.partial"
        shutil.rmtree(partial, ignore_errors=True)
        for old in self.folders.images.glob("seed-*"):
            shutil.rmtree(old)  # the nodes' clones keep what they use
        state = self.folders.run / "seed"
        with steps.step("unpack the images for the nodes", total=2 * len(SEEDED)) as step:
            socket = state / "containerd.sock"
            processes.stop(_SEED_PROGRAM)
            shutil.rmtree(state, ignore_errors=True)
            program = seed_program(partial, state, socket)
            processes.ensure(program)
            try:
                wait_for_containerd(socket, processes.log(program.name))
                for image in SEEDED:
                    self.images.export(image)
                    step.advance(f"{image} written")
                    import_image(self.images, image, partial, socket)
                    step.advance(f"{image} unpacked")
            finally:
                processes.stop(program.name)
                shutil.rmtree(state, ignore_errors=True)
        self._share_blobs(partial)
        partial.rename(root)
        return root

    def _share_blobs(self, store: Path) -> None:
        """Store blobs of both layout and seed store once, by hard links."""
        for file in (self.images.layout / "blobs" / "sha256").iterdir():
            twin = store / _BLOBS / file.name
            if twin.exists() and not file.samefile(twin):
                file.unlink()
                os.link(twin, file)


def clone(seed: Path, store: Path) -> None:
    """Clone the seed store for a node: hard links, and copies of the two databases."""
    partial = store.with_name(f"{store.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    store.parent.mkdir(parents=True, exist_ok=True)
    run(["cp", "-al", seed, partial], what=f"cloning the image store to {store}", deadline_seconds=300)
    for database in _DATABASES:
        (partial / database).unlink()
        shutil.copy2(seed / database, partial / database)
    partial.rename(store)


def import_image(images: Images, image: str, store: Path, socket: Path) -> None:
    """Import an exported image into a running containerd, without the layers that its store holds.

    Raises ClusterError with containerd's message.
    """
    present = {file.name for file in (store / _BLOBS).iterdir()} if (store / _BLOBS).exists() else set()
    digests = images.blobs(image)
    layers = [digest for digest in digests[2:] if digest.removeprefix("sha256:") not in present]
    with tempfile.TemporaryFile() as words:
        importer = subprocess.Popen(
            [*_ctr(socket), "images", "import", "--snapshotter", "overlayfs", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=words,
        )
        if importer.stdin is None:
            raise ClusterError("ctr was started without a pipe")
        with contextlib.suppress(BrokenPipeError), importer.stdin as stream:  # if ctr ends early, its output says why
            write_archive(stream, images, image, [*digests[:2], *layers])
        try:
            status = importer.wait(_LONGEST_IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            importer.kill()
            raise ClusterError(f"importing {image}: not done in {_LONGEST_IMPORT_SECONDS} s") from None
        words.seek(0)
        if status != 0:
            raise ClusterError(f"importing {image} failed:\n{tail(words.read().decode(errors='replace'))}")


def write_archive(stream: IO[bytes], images: Images, image: str, digests: Iterable[str]) -> None:
    """Write an OCI archive of these blobs only."""
    descriptor = images.manifest(image)
    named = {**descriptor, "annotations": {"io.containerd.image.name": image}}
    index = {"schemaVersion": 2, "manifests": [named]}
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        _add_text(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
        _add_text(archive, "index.json", json.dumps(index))
        for digest in digests:
            archive.add(images.blob(digest), f"blobs/sha256/{digest.removeprefix('sha256:')}")


def seed_program(root: Path, state: Path, socket: Path) -> Program:
    """Return a containerd without a node, which only unpacks images."""
    config = state / "containerd.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        containerd_basics(root, state / "state", socket, [*unused_plugins(), "io.containerd.grpc.v1.cri"])
    )
    return Program(_SEED_PROGRAM, ("containerd", "--config", str(config)))


def unused_plugins() -> list[str]:
    """Return containerd's unused plug-ins; `opt` would create a folder in /opt."""
    snapshotters = [f"io.containerd.snapshotter.v1.{name}" for name in _PLUGINS_WITHOUT_USE]
    return [*snapshotters, "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing"]


def containerd_basics(root: Path, state: Path, socket: Path, disabled: list[str]) -> str:
    """Return the head of a containerd configuration (TOML)."""
    return (
        f"version = 2\nroot = {json.dumps(str(root))}\nstate = {json.dumps(str(state))}\n"
        f"disabled_plugins = {json.dumps(disabled)}\n[grpc]\naddress = {json.dumps(str(socket))}\n"
    )


def wait_for_containerd(socket: Path, log: Path) -> None:
    wait_until(
        lambda: socket.exists() and succeeds([*_ctr(socket), "version"]),
        what=f"containerd at {socket} to answer",
        deadline_seconds=60,
        log=log,
        pause_seconds=0.2,
    )


def _ctr(socket: Path) -> list[str]:
    return ["ctr", "--address", str(socket), "--namespace", "k8s.io"]


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    data = text.encode()
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))
