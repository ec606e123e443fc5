"""Kernel settings of the machine that the cluster changes, kept so that `down` can put them back."""

from __future__ import annotations

import json
from pathlib import Path

from local_cluster.folders import write_if_changed

_WANTED = {"net.ipv4.ip_forward": "1"}
# The kubelet sets these at its start.
_SET_BY_KUBELET = (
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)


def remember_and_set(kept_in: Path) -> None:
    """Note the present values once, then set what the cluster needs."""
    if not kept_in.exists():
        names = (*_WANTED, *_SET_BY_KUBELET)
        write_if_changed(kept_in, json.dumps({name: _file(name).read_text().strip() for name in names}))
    for name, value in _WANTED.items():
        _file(name).write_text(value)


def restore(kept_in: Path) -> None:
    """Put the noted values back."""
    if not kept_in.exists():
        return
    for name, value in json.loads(kept_in.read_text()).items():
        if _file(name).read_text().strip() != value:
            _file(name).write_text(value)
    kept_in.unlink()


def _file(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")
