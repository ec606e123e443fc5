"""Server of the Model Context Protocol. Its tools are commands, so that their answers are those of the command line.

A command runs as a process: one that is cancelled, or that takes too much memory, ends alone.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

from pydantic import Field

from trainwright.cli.framework import load_module
from trainwright.cli.watch import PACKAGE, REMEDY

_INSTRUCTIONS: Final = """Finds the placement and the parallel degrees that train a model fastest on mixed GPUs, and predicts \
iteration seconds and memory. Nothing is measured or started: times are predictions unless an answer says that they were measured. \
A cluster, a model, profiles and plans are documents of trainwright, given as the path of a file or as the document itself."""
_NAME: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")

_Document = str | dict[str, Any]
Cluster = Annotated[_Document, Field(description="Accelerators, nodes and links (`trainwright cluster` writes one).")]
Model = Annotated[
    _Document,
    Field(description="Model family with sizes, global_batch_size, dtype, optimizer; or Hugging Face's config.json."),
]
SequenceLength = Annotated[
    int | None, Field(ge=1, description="Tokens in a row, which a config.json of Hugging Face does not say.")
]
Rows = Annotated[int | None, Field(ge=1, description="Rows of an iteration, in place of the model's.")]
Profiles = Annotated[
    _Document | None, Field(description="Measured layer profiles; without them they are estimated from data sheets.")
]
Runtime = Annotated[_Document | None, Field(description="Training runtime: the name of a preset, or a document.")]
Plan = Annotated[_Document, Field(description="Plan, or its shorthand: pp2 dp2 tp2 mb1 zero1 recompute bf16.")]
Budget = Annotated[float, Field(ge=0, description="Seconds of search, then the best plans so far are the answer.")]
_BUDGET_SECONDS: Final = 30.0
"""Default budget: clients give up on a tool after a minute or so."""


async def plan(  # noqa: PLR0913 - options of the command
    *,
    cluster: Cluster,
    model: Model,
    profiles: Profiles = None,
    runtime: Runtime = None,
    planner: Annotated[str, Field(description="auto, or a published search: amp, galvatron, alpa, megatron.")] = "auto",
    top: Annotated[int, Field(ge=1, le=50, description="Number of plans.")] = 3,
    expressible_by: Annotated[str | None, Field(description="Only plans that this trainer can run.")] = None,
    sequence_length: SequenceLength = None,
    global_batch_size: Annotated[str | None, Field(description="Rows of an iteration, or `search`.")] = None,
    node_worth: Annotated[bool, Field(description="Also search without each type of node.")] = False,
    budget_seconds: Budget = _BUDGET_SECONDS,
) -> dict[str, Any]:
    """Find the plans that train a model fastest on a cluster, with predicted seconds and memory, beside Megatron's heuristic."""
    options = {
        "planner": planner,
        "top": top,
        "expressible-by": expressible_by,
        "sequence-length": sequence_length,
        "global-batch-size": global_batch_size,
        "node-worth": node_worth,
        "budget-seconds": budget_seconds,
    }
    return await _answer(
        "plan", {"cluster": cluster, "model": model, "profiles": profiles, "runtime": runtime}, options
    )


async def estimate(  # noqa: PLR0913 - options of the command
    *,
    cluster: Cluster,
    model: Model,
    plan: Plan,
    profiles: Profiles = None,
    runtime: Runtime = None,
    sequence_length: SequenceLength = None,
    global_batch_size: Rows = None,
) -> dict[str, Any]:
    """Predict the iteration seconds and the memory of a given plan, and say whether it fits."""
    documents = {"cluster": cluster, "model": model, "plan": plan, "profiles": profiles, "runtime": runtime}
    options = {"sequence-length": sequence_length, "global-batch-size": global_batch_size}
    return await _answer("estimate", documents, options)


async def explain(  # noqa: PLR0913 - options of the command
    *,
    cluster: Cluster,
    model: Model,
    plan: Annotated[
        _Document | None, Field(description="Plan or its shorthand; without one, the best that is found.")
    ] = None,
    against: Annotated[
        _Document | None, Field(description="Plan to compare with, its shorthand, or `heuristic`.")
    ] = None,
    profiles: Profiles = None,
    runtime: Runtime = None,
    sequence_length: SequenceLength = None,
    global_batch_size: Rows = None,
    budget_seconds: Budget = _BUDGET_SECONDS,
) -> dict[str, Any]:
    """Say where the time of a plan goes (bottleneck, bubbles, communication, memory), and why it is faster than another one."""
    documents = {
        "cluster": cluster,
        "model": model,
        "plan": plan,
        "against": against,
        "profiles": profiles,
        "runtime": runtime,
    }
    options = {
        "sequence-length": sequence_length,
        "global-batch-size": global_batch_size,
        "budget-seconds": budget_seconds if plan is None else None,
    }
    return await _answer("explain", documents, options)


async def size(  # noqa: PLR0913 - options of the command
    *,
    model: Model,
    accelerators: Annotated[list[str], Field(min_length=1, description="Data sheets, such as A100-80 and H100.")],
    runtime: Runtime = None,
    sequence_length: SequenceLength = None,
    global_batch_size: Rows = None,
    tokens: Annotated[float | None, Field(description="Tokens of a whole run, for its time and price.")] = None,
    within: Annotated[float | None, Field(description="Days that the run of these tokens may take.")] = None,
    budget_seconds: Budget = _BUDGET_SECONDS,
) -> dict[str, Any]:
    """Find how many accelerators of each kind a model needs, what decides the number, and the time and price of a run."""
    options = {
        "accelerators": ",".join(accelerators),
        "sequence-length": sequence_length,
        "global-batch-size": global_batch_size,
        "tokens": tokens,
        "within": within,
        "budget-seconds": budget_seconds,
    }
    return await _answer("size", {"model": model, "runtime": runtime}, options)


async def export(  # noqa: PLR0913 - options of the command
    *,
    plan: Plan,
    to: Annotated[str, Field(description="Trainer, such as megatron, torchtitan, deepspeed.")],
    cluster: Annotated[_Document | None, Field(description="With a model, the loss of the export is priced.")] = None,
    model: Annotated[_Document | None, Field(description="Model, whose sizes the export names.")] = None,
    profiles: Profiles = None,
    runtime: Runtime = None,
    sequence_length: SequenceLength = None,
    global_batch_size: Rows = None,
) -> dict[str, Any]:
    """Return a plan as the configuration files of another trainer, with what that cannot express and what it costs."""
    documents = {"cluster": cluster, "model": model, "profiles": profiles, "runtime": runtime}
    options = {"to": to, "sequence-length": sequence_length, "global-batch-size": global_batch_size}
    return await _answer("export", documents, options, argument=plan)


async def plan_status(
    name: Annotated[str | None, Field(description="TrainingPlan; without a name, all of the namespace.")] = None,
    namespace: Annotated[str | None, Field(description="Namespace; by default the kubeconfig's.")] = None,
    context: Annotated[str | None, Field(description="Context of the kubeconfig; by default its present one.")] = None,
) -> dict[str, Any]:
    """Return the status of TrainingPlans in a Kubernetes cluster, read by kubectl with the user's own rights."""
    for what, given in (("name", name), ("namespace", namespace)):
        if given is not None and _NAME.fullmatch(given) is None:  # kubectl would read a leading hyphen as an option
            raise ValueError(f"{what} must be lower-case letters, digits, hyphens and dots, got {given!r}")
    client = load_module("trainwright_operator.kubectl.client", (PACKAGE,), REMEDY)
    kubectl = client.Kubectl(context, namespace)
    if name is not None:
        return _shown(await asyncio.to_thread(kubectl.get_plan, name))
    listed = await asyncio.to_thread(kubectl.get, client.PLANS)
    return {"items": [_shown(resource) for resource in listed["items"]]}


def _shown(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan as kubectl shows it, without who wrote which field."""
    metadata = {key: value for key, value in resource["metadata"].items() if key != "managedFields"}
    return {**resource, "metadata": metadata}


async def _answer(
    command: str,
    documents: Mapping[str, _Document | None],
    options: Mapping[str, object] | None = None,
    *,
    argument: _Document | None = None,
) -> dict[str, Any]:
    """Return the JSON of a command. Raise ValueError with the sentence with which it refuses.

    Every value stands in the same word as its option, so that none is taken for another option.
    """
    with TemporaryDirectory(prefix="trainwright-mcp-") as folder:

        def path(name: str, document: _Document) -> str:
            if isinstance(document, str):
                return document
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(document), encoding="utf-8")
            return str(file)

        words = [f"--{name}={path(name, document)}" for name, document in documents.items() if document is not None]
        for name, value in (options or {}).items():
            if value is True:
                words.append(f"--{name}")
            elif value not in (None, False):
                words.append(f"--{name}={value}")
        if argument is not None:
            words += ["--", path("plan", argument)]
        program = [sys.executable, "-m", "trainwright", command, "--output=json", *words]
        output, errors = await _run(program)
        try:  # a plan that does not fit has an answer, too, with another exit code
            answer: dict[str, Any] = json.loads(output)
        except ValueError:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"{command} ended without an answer"
            raise ValueError(last.removeprefix("trainwright: ").replace(f"{folder}/", "")) from None
        return answer


async def _run(program: list[str]) -> tuple[bytes, bytes]:
    """Return what a process wrote to standard output and standard error; it ends with a call that is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        return await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()


def make_server() -> Any:
    """Return the server with its tools. Raises ModuleNotFoundError without the SDK."""
    from mcp.server.mcpserver import MCPServer  # noqa: PLC0415 - an extra, which may be missing
    from mcp.server.mcpserver.exceptions import ToolError  # noqa: PLC0415
    from mcp.types import ToolAnnotations  # noqa: PLC0415

    def refusing(tool: Callable[..., Awaitable[dict[str, Any]]]) -> Callable[..., Awaitable[dict[str, Any]]]:
        """Return the tool whose refusals reach the client; of other errors the SDK tells it nothing."""

        @functools.wraps(tool)
        async def call(**given: Any) -> dict[str, Any]:
            try:
                return await tool(**given)
            except ValueError as error:
                raise ToolError(str(error)) from None

        return call

    server = MCPServer("trainwright", instructions=_INSTRUCTIONS, version=version("trainwright"), log_level="WARNING")
    reads = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    for tool in (plan, estimate, explain, size, export, plan_status):
        server.add_tool(refusing(tool), annotations=reads)
    return server


def serve() -> None:
    """Answer on standard input and output until the client closes them."""
    make_server().run("stdio")
