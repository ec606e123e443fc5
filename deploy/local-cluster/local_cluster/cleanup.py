"""Cleanup of files that the cluster's programs leave outside its folders."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from local_cluster.mounts import unmount_below

# Every kubelet creates this socket here, whatever its folders are.
_FILES = (Path("/var/lib/kubelet/device-plugins/kubelet.sock"),)
# Inner folders first; non-empty ones stay.
_FOLDERS = (
    "/run/containerd/s",
    "/run/containerd",
    "/var/lib/cni/results",
    "/var/lib/cni",
    "/etc/cni/net.d",
    "/etc/cni",
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)
_NAMESPACES = Path("/run/netns")
_BUILDERS_CACHE = Path("/var/lib/containers/cache/blob-info-cache-v1.boltdb")


def remove_leftovers() -> None:
    """Remove a cluster's leftovers that nothing else uses."""
    if _NAMESPACES.exists() and not any(_NAMESPACES.iterdir()):
        unmount_below(_NAMESPACES)  # `ip netns add` mounts the folder onto itself, and never unmounts it
        _NAMESPACES.rmdir()
    for file in _FILES:
        file.unlink(missing_ok=True)
    for folder in _FOLDERS:
        _remove_if_empty(Path(folder))


def remove_dead_sockets() -> None:
    """Remove the sockets of killed shims."""
    for file in dead_sockets(Path("/run/containerd/s")):
        file.unlink(missing_ok=True)


def dead_sockets(folder: Path) -> list[Path]:
    """Return sockets without a listener, left by killed shims. A live socket of any owner accepts a connection."""
    return [file for file in folder.iterdir() if file.is_socket() and _refuses(file)] if folder.exists() else []


def _refuses(file: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1)
        try:
            caller.connect(str(file))
        except ConnectionRefusedError:
            return True
        except OSError:  # busy, or gone meanwhile
            return False
    return False


def remove_builders_cache() -> None:
    """Remove skopeo's cache of copied layers."""
    _BUILDERS_CACHE.unlink(missing_ok=True)
    for folder in _BUILDERS_CACHE.parents[:2]:
        _remove_if_empty(folder)


def remove_links_into(target: Path, links: Path = Path("/var/log/containers")) -> None:
    """Remove container log links that point into a folder, except those that a kubelet removes meanwhile."""
    if not links.exists():
        return
    for link in links.iterdir():
        with suppress(FileNotFoundError):
            if link.is_symlink() and link.readlink().is_relative_to(target):
                link.unlink()


def _remove_if_empty(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
