"""Kernel settings that a kubelet changes at its start, stored so that `down` can restore them."""

from __future__ import annotations

import json
from pathlib import Path

from local_cluster.paths import write_if_changed

_SET_BY_KUBELET = (
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)


def remember(kept_in: Path) -> None:
    """Store the current values once for all clusters of this machine."""
    if not kept_in.exists():
        write_if_changed(kept_in, json.dumps({name: _file(name).read_text().strip() for name in _SET_BY_KUBELET}))


def restore(kept_in: Path) -> None:
    """Restore the stored values, if any."""
    if not kept_in.exists():
        return
    for name, value in json.loads(kept_in.read_text()).items():
        if _file(name).read_text().strip() != value:
            _file(name).write_text(value)
    kept_in.unlink()


def _file(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")
