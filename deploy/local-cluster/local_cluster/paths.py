"""Paths of the local cluster: cached files, files of a running cluster, the checkout."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_LONGEST_SOCKET_PATH_CHARACTERS = 107  # sun_path of unix(7), less its closing zero


@dataclass(frozen=True, slots=True)
class Folders:
    """Paths of one cluster, as seen from one checkout."""

    project: Path
    cache: Path
    cluster_name: str

    @property
    def sources(self) -> Path:
        return self.project / "deploy" / "local-cluster"

    @property
    def binaries(self) -> Path:
        return self.cache / "binaries"

    @property
    def images(self) -> Path:
        """Return the folder of the builder's storage, the image layout and the seed store."""
        return self.cache / "images"

    @property
    def cluster(self) -> Path:
        """Return the folder of certificates, etcd data, node stores and logs, which `down` removes."""
        return self.cache / "clusters" / self.cluster_name

    @property
    def run(self) -> Path:
        """Return the folder of sockets and process files, valid for one boot."""
        return Path("/run") / f"{self.cluster_name}-local-cluster"

    @property
    def host_settings(self) -> Path:
        """Return the file of the machine's kernel settings before its first cluster."""
        return self.cache / "host-settings.json"

    @property
    def logs(self) -> Path:
        return self.cluster / "logs"

    @property
    def certificates(self) -> Path:
        return self.cluster / "certificates"

    @property
    def checkout(self) -> Path:
        """Return the checkout's folder with the kubeconfig and a link to the logs."""
        return self.project / ".local-cluster"

    @property
    def kubeconfig(self) -> Path:
        return self.checkout / "kubeconfig"

    def node(self, name: str) -> Path:
        return self.cluster / "nodes" / name

    def node_run(self, name: str) -> Path:
        return self.run / name

    def check_socket_lengths(self, node_names: list[str]) -> None:
        """Raise ValueError if the cache folder is too deep for the kubelet's sockets, with the folder to move."""
        longest = max(len(str(self.node(name) / "kubelet" / "pod-resources" / "kubelet.sock")) for name in node_names)
        if longest > _LONGEST_SOCKET_PATH_CHARACTERS:
            raise ValueError(
                f"the cache folder {self.cache} is too deep: a socket's path would have {longest} characters, Linux "
                f"allows {_LONGEST_SOCKET_PATH_CHARACTERS}; set XDG_CACHE_HOME to a shorter path"
            )


def default_cache() -> Path:
    """Return the cache folder shared by all checkouts of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "trainwright"


def project_root() -> Path:
    """Return the checkout that contains this code."""
    return Path(__file__).resolve().parents[3]


def fingerprint(*parts: str | bytes) -> str:
    """Return twelve characters that change with any part."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(str(len(data)).encode() + b":" + data)
    return digest.hexdigest()[:12]


def write_if_changed(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically, unless it already has this content and mode."""
    if file.exists() and file.read_text() == text and file.stat().st_mode & 0o777 == mode:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(text)
    partial.rename(file)
