"""`python -m trainwright_worker.describe package.module:function`: a user's own model, as the planner reads it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from trainwright import documents
from trainwright.families import Custom
from trainwright.families.resource_names import in_resource_names
from trainwright.report.progress import progress_bar


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainwright_worker.describe", description=__doc__)
    parser.add_argument("entrypoint", help="package.module:function, which returns a CustomModel")
    parser.add_argument(
        "--training-plan",
        action="store_true",
        help="write it for spec.model of a TrainingPlan (default: for the file of `trainwright plan --model`)",
    )
    parser.add_argument(
        "--check-seconds",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="time to compute a few rows of each kind of layer on the CPU, which shows what plans would change (default: 120)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="only number format that the model is trained in (default: it is checked in all of them)",
    )
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    sys.path.insert(0, str(Path.cwd()))  # the user's module, as with python -m
    try:
        text = description(
            arguments.entrypoint,
            training_plan=arguments.training_plan,
            check_seconds=arguments.check_seconds,
            dtype=arguments.dtype,
        )
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"there is no module {error.name} here; Trainwright's extra brings it: pip install '.[worker]'\n"
        )
        return 2
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def write_layers(place: str, file: Path | None) -> str:
    """Write the layers of a torch module `file.py:function` as a Python file, and return their entry point."""
    from trainwright_worker.module_cut import written_layers  # noqa: PLC0415 - torch may be missing

    return written_layers.write_layers(place, file, lambda sentence: sys.stderr.write(f"{sentence}\n"))


def description(entrypoint: str, *, training_plan: bool, check_seconds: float, dtype: str | None) -> str:
    """Return the description of an entry point's model as YAML; what was not checked goes to standard error.

    Raises ValueError that says what to change, ModuleNotFoundError without torch.
    """
    # torch may be missing, which is reported
    from trainwright_worker.layers.layer import dtype_name  # noqa: PLC0415
    from trainwright_worker.model_description.description import describe  # noqa: PLC0415
    from trainwright_worker.model_description.formats import FORMATS  # noqa: PLC0415

    formats = [choice for choice in FORMATS if dtype in {None, dtype_name(choice)}]
    with progress_bar("checking layers", sys.stderr) as report:
        described = describe(entrypoint, check_seconds, formats, report)
    if described.checks is not None:
        for sentence in described.checks.left_out:
            sys.stderr.write(f"not checked: {sentence}\n")
        for sentence in described.checks.remarks:
            sys.stderr.write(f"{sentence}\n")
    written = documents.adapter(Custom).dump_python(described, mode="json")
    body = {key: _with_whole_numbers(value) for key, value in written.items() if key != "family"}
    if training_plan:
        body = in_resource_names(body)
    return yaml.safe_dump({"custom": body}, sort_keys=False, width=120, default_flow_style=None)


def _with_whole_numbers(value: Any) -> Any:
    """Convert integral floats to integers."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


if __name__ == "__main__":
    sys.exit(main())
