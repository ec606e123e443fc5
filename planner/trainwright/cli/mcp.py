"""`trainwright mcp`: the commands that answer questions, as tools of a language model."""

from __future__ import annotations

import typer

from trainwright.cli import mcp_server
from trainwright.cli.framework import command, load_module

PACKAGE = "mcp"
REMEDY = "install the Model Context Protocol's SDK with `pip install '.[mcp]'`"

app = typer.Typer(add_completion=False, help="Serve plan, estimate, explain, size, export and the plans of a cluster.")


@app.command()
@command
def mcp() -> None:
    """Serve the Model Context Protocol on standard input and output: plan, estimate, explain, size, export, plans of a cluster.

    All tools only read. A client starts this command itself; docs/mcp.md has its configuration.
    """
    load_module(PACKAGE, (PACKAGE,), REMEDY)
    mcp_server.serve()
