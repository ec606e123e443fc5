"""`python -m local_cluster`: up, down, build, load, status, env."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from local_cluster.binaries import API_SERVER_PROGRAMS, KUEUE_RELEASE, KUEUES, GoModule
from local_cluster.cluster import LocalCluster
from local_cluster.commands import ClusterError
from local_cluster.config import read_config
from local_cluster.paths import Folders, default_cache, project_root
from local_cluster.progress import Steps
from local_cluster.status import component_table, node_table

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
_console = Console()
_errors = Console(stderr=True)

ShapeFile = Annotated[Path | None, typer.Option("--file", help="The cluster's description (default: cluster.yaml).")]

WithKueue = Annotated[bool, typer.Option("--kueue", help="With Kueue, for plans with queueName: 10 minutes to build.")]
KueueRelease = Annotated[
    str, typer.Option("--kueue-release", help=f"Its release: {' or '.join(KUEUES)}.", envvar="KUEUE_RELEASE")
]


@app.command()
def up(file: ShapeFile = None, kueue: WithKueue = False, kueue_release: KueueRelease = KUEUE_RELEASE) -> None:
    """Bring the cluster up, or bring the running one to what the file says. Kueue stays until the cluster is down."""
    with _open_cluster(file, kueue_release if kueue else None) as cluster:
        started_seconds = time.monotonic()
        with cluster.steps.shown():
            cluster.up()
        _console.print(
            f"the cluster '{cluster.config.name}' is up after {time.monotonic() - started_seconds:.0f} s; "
            f"export KUBECONFIG={cluster.folders.kubeconfig}",
            soft_wrap=True,
            highlight=False,
        )


@app.command()
def down(
    file: ShapeFile = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove kept programs, images and stores too.")] = False,
) -> None:
    """Remove every trace of the cluster from this machine."""
    with _open_cluster(file) as cluster, cluster.steps.shown():
        cluster.down(purge=purge)


@app.command()
def build(
    file: ShapeFile = None,
    kueue: WithKueue = False,
    kueue_release: KueueRelease = KUEUE_RELEASE,
    api_server: Annotated[
        bool, typer.Option("--api-server", help=f"Only {', '.join(API_SERVER_PROGRAMS)}, for tests without nodes.")
    ] = False,
) -> None:
    """Build the cluster's programs that are missing."""
    with _open_cluster(file, kueue_release if kueue else None) as cluster, cluster.steps.shown():
        cluster.build(API_SERVER_PROGRAMS if api_server else None)


@app.command()
def load(file: ShapeFile = None) -> None:
    """Bring the worker's and the operator's code as it is now onto the running nodes."""
    with _open_cluster(file) as cluster, cluster.steps.shown():
        cluster.load()


@app.command()
def status(file: ShapeFile = None) -> None:
    """Show the components, the nodes, their devices and the rates of their links; exit 1 when something is not well."""
    with _open_cluster(file) as cluster:
        components, components_well = component_table(cluster)
        _console.print(components)
        nodes, nodes_well = node_table(cluster)
        _console.print(nodes)
        if not (components_well and nodes_well):
            raise typer.Exit(1)


@app.command()
def env(file: ShapeFile = None) -> None:
    """Print what a shell needs: eval "$(python -m local_cluster env)"."""
    with _open_cluster(file) as cluster:
        folders = ":".join(str(folder) for folder in cluster.binaries.search_path())
        sys.stdout.write(f'export PATH="{folders}:$PATH"\nexport KUBECONFIG="{cluster.folders.kubeconfig}"\n')


@contextmanager
def _open_cluster(file: Path | None, kueue_release: str | None = None) -> Iterator[LocalCluster]:
    """Open the configured cluster for a command, and report its failures as one message with exit code 1 or 2."""
    project = project_root()
    try:
        shape = read_config(file or project / "deploy" / "local-cluster" / "cluster.yaml")
        folders = Folders(project, default_cache(), shape.name)
        os.umask(0o022)
        yield LocalCluster(folders, shape, Steps(_console), _kueue(kueue_release))
    except ValueError as error:
        _errors.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except ClusterError as error:
        _errors.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _kueue(release: str | None) -> GoModule | None:
    if release is not None and release not in KUEUES:
        raise ValueError(f"--kueue-release: must be one of {', '.join(KUEUES)}, got {release!r}")
    return KUEUES[release] if release is not None else None
