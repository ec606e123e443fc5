"""`trainwright model --training-plan`: the operator reads the same model from the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.training import Training, training_of
from trainwright_operator.api.spec import TrainingPlanSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples"
ENCODER = TrainingPlanSpec.model_validate(
    yaml.safe_load((EXAMPLES / "custom" / "encoder" / "plan.yaml").read_text())["spec"]
)
RESNET = b"wide_resnet: {depth: 101, width_factor: 2, classes: 10}\nglobal_batch_size: 4\n"
MIXTRAL = b"""
moe:
  layers: 2
  hidden_size: 64
  heads: 4
  sequence_length: 16
  rotary_base: 500000.0
  rotary_scaling: {kind: llama3, factor: 8.0, high_frequency_factor: 2.5}
  norm_epsilon: 0.00001
  balance_loss_weight: 0.0
global_batch_size: 4
"""


@pytest.mark.parametrize(
    "content",
    [
        (EXAMPLES / "planner" / "gpt2-medium.yaml").read_bytes(),
        documents.dumps(training_of(ENCODER.model.family, {"global_batch_size": 4})).encode(),
        RESNET,
        MIXTRAL,
    ],
    ids=["gpt", "custom", "wide_resnet", "moe"],
)
@pytest.mark.parametrize("is_piped", [False, True])
def test_manifest_is_the_same_model(content: bytes, is_piped: bool, tmp_path: Path) -> None:
    file = tmp_path / "My_model.yaml"
    file.write_bytes(content)
    path, piped = ("-", content) if is_piped else (str(file), None)
    done = CliRunner().invoke(app, ["model", path, "--training-plan"], input=piped)
    assert done.exit_code == 0, done.output
    manifest = yaml.safe_load(done.stdout)
    spec = TrainingPlanSpec.model_validate(manifest["spec"])
    absent = {"global_batch_size": 1}
    assert spec.model.family == documents.loads_given(content, Training, absent=absent).family
    digest = hashlib.sha256(content).hexdigest()[:12]
    assert manifest["metadata"]["annotations"]["trainwright.dev/model-source"].endswith(f" sha256:{digest}")
    assert manifest["metadata"]["name"] == ("model" if is_piped else "my-model")
    assert "left out" not in done.stderr
