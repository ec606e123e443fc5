"""Debian packages that the cluster needs: installed where missing, without starting their services."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from local_cluster.commands import ClusterError, run

# Files that show that a package is installed.
_PACKAGES = {
    "containerd": ("/usr/bin/containerd",),
    "runc": ("/usr/sbin/runc", "/usr/bin/runc"),
    "containernetworking-plugins": ("/usr/lib/cni/bridge",),
    "buildah": ("/usr/bin/buildah",),
    "skopeo": ("/usr/bin/skopeo",),
    "mmdebstrap": ("/usr/bin/mmdebstrap",),
    "iptables": ("/usr/sbin/iptables",),
    "iproute2": ("/usr/sbin/ip", "/sbin/ip", "/bin/ip"),
    "prometheus": ("/usr/bin/prometheus",),  # scrapes the operator in the end-to-end tests
    "util-linux": ("/usr/bin/nsenter",),
    "ca-certificates": ("/etc/ssl/certs/ca-certificates.crt",),
}
_REFUSE_SERVICES = Path("/usr/sbin/policy-rc.d")


def missing_packages() -> list[str]:
    return [name for name, files in _PACKAGES.items() if not any(Path(file).exists() for file in files)]


def install(packages: list[str]) -> None:
    """Install Debian packages without starting their services: the cluster runs its own instances."""
    if shutil.which("apt-get") is None:
        raise ClusterError(f"this machine lacks {', '.join(packages)} and has no apt-get; install them by hand")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], what="reading Debian's package lists", deadline_seconds=300)
    refuse = not _REFUSE_SERVICES.exists()
    try:
        if refuse:
            _REFUSE_SERVICES.write_text("#!/bin/sh\nexit 101\n")
            _REFUSE_SERVICES.chmod(0o755)
        run(
            ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *packages],
            what=f"installing {', '.join(packages)}",
            deadline_seconds=900,
            environment=environment,
        )
    finally:
        if refuse:
            _REFUSE_SERVICES.unlink(missing_ok=True)
