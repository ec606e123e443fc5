"""Trainer of torchtitan's Llama and its parallelisms, on the CPU.

torchtitan's own `Trainer` does not run on a CPU: it takes a machine without a GPU for one with CUDA, and its language models
have attention kernels of GPUs only. Its parts do: ParallelDims, the model with torch's attention, `parallelize_llama`,
`pipeline_llm`, loss and optimizer. torch 2.13 lacks what its default `spmd_types` needs of FSDP2, so DTensor divides.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu  # before other modules of torchtitan read them

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as titan  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402

from trainers.plans import FULLY_SHARDED, ROWS, UniformPlan  # noqa: E402
from trainers.torch_trainer import make_rows  # noqa: E402
from trainwright.families import Llama  # noqa: E402
from trainwright.families.fields import NORM_EPSILON, ROTARY_BASE  # noqa: E402
from trainwright.model import Model  # noqa: E402
from trainwright.strategy import Sharding  # noqa: E402
from trainwright_worker.executor.executor import TrainingConfig as OurTraining  # noqa: E402
from trainwright_worker.layers.layer import Data, Layer, SharedWeights  # noqa: E402
from trainwright_worker.layers.registry import make_family_layers  # noqa: E402
from trainwright_worker.layers.tensor_parallel import TensorShard  # noqa: E402

BACKEND = "partial_dtensor"


class TitanTrainer:
    """Trainer of a plan on this rank of the world group."""

    def __init__(self, plan: UniformPlan, model: Model, training: OurTraining) -> None:
        llama = model.family
        if not isinstance(llama, Llama):
            raise TypeError(f"this trainer of torchtitan trains Llama, not {llama.family}")
        self._plan, self._seed, self._family = plan, training.seed, make_family_layers(model)
        self._sequence = llama.sequence_length
        parallelism = _parallelism(plan, model)
        dims = ParallelDims.from_config(parallelism, plan.processes)
        dims.build_mesh()
        titan.set_spmd_backend(BACKEND)
        replica, tensor = dims.get_optional_mesh("batch"), dims.get_optional_mesh("tp")
        self._replica = replica.get_local_rank() if replica else 0
        self._counts_loss = tensor is None or tensor.get_local_rank() == 0
        self._tokens = torch.tensor(ROWS * self._sequence)
        self._build(_llama_config(llama, parallelism), dims, parallelism)
        for module in self._part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(enable=True)  # gloo has no other reduction
        self._load(model)
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": training.learning_rate, "weight_decay": 0.0}
        )
        self._optimizer = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[self._part])

    def _build(self, config: Any, dims: ParallelDims, parallelism: ParallelismConfig) -> None:
        """Make this rank's part of the model, without values, and the schedule if there are stages."""
        self._loss = CrossEntropyLoss.Config(global_vocab_size=config.vocab_size).build(compile_config=CompileConfig())
        with torch.device("meta"):
            whole = config.build()
        options = {
            "parallel_dims": dims,
            "parallelism": parallelism,
            "training": TrainingConfig(
                local_batch_size=ROWS // self._plan.data, seq_len=self._sequence,
                mixed_precision_param="float32", disable_cuda_graphs=True,
            ),
            "compile_config": CompileConfig(),
            "ac_config": None,
            "dump_folder": "",
        }  # fmt: skip
        self._is_first = self._is_last = True
        self._schedule = None
        if self._plan.stages == 1:
            self._part = llama3.parallelize_llama(whole, **options)
        else:
            self._schedule, (self._part,), self._is_first, self._is_last = llama3.pipeline_llm(
                whole, device=torch.device("cpu"), model_config=config, parallelize_fn=llama3.parallelize_llama,
                loss_fn=self._loss, **options,
            )  # fmt: skip
        self._part.to_empty(device="cpu")
        with torch.no_grad():
            self._part.init_weights(buffer_device=None)

    def _load(self, model: Model) -> None:
        """Load the executor's initial weights."""
        shared: SharedWeights = {}
        layers = [
            self._family.make(layer, seed=self._seed, shard=TensorShard(), shared=shared)
            for layer in range(len(model.layers))
        ]
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self._part, _named_weights(layers), options=options)

    @staticmethod
    def knows(plan: UniformPlan, model: Model) -> bool:
        """Return whether torchtitan has the model and supports the plan; it has no ZeRO-1."""
        return isinstance(model.family, Llama) and plan.sharding is not Sharding.ZERO1

    def make_batch(self, iteration: int) -> Data:
        """Return this rank's rows of all micro-batches, the same as the executor's."""
        return make_rows(self._family, self._plan, self._replica, self._seed, iteration)

    def run_iteration(self, batch: Data) -> float:
        """Run one iteration. Returns this rank's contribution to the mean loss over the batch's rows."""
        losses: list[Tensor] = []
        if self._schedule is None:
            loss, _ = self._loss(self._part(batch["tokens"]), batch["targets"], self._tokens)
            loss.backward()
            losses.append(loss)
        else:
            self._schedule.step(
                *([batch["tokens"]] if self._is_first else []), target=batch["targets"] if self._is_last else None,
                losses=losses if self._is_last else None, loss_kwargs={"global_valid_tokens": self._tokens},
                return_outputs=False,
            )  # fmt: skip
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(float(loss.detach()) for loss in losses) if self._counts_loss else 0.0


def _parallelism(plan: UniformPlan, model: Model) -> ParallelismConfig:
    is_sharded = plan.sharding in FULLY_SHARDED
    return ParallelismConfig(
        data_parallel_replicate_degree=1 if is_sharded else plan.data,
        data_parallel_shard_degree=plan.data if is_sharded else 1,
        fsdp_reshard_after_forward="always" if plan.sharding is Sharding.ZERO3 else "never",
        tensor_parallel_degree=plan.tensor,
        enable_sequence_parallel=plan.along_sequence,
        pipeline_parallel_degree=plan.stages,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=plan.replica_rows,
        module_fqns_per_model_part=[_module_names(plan.layers_of(stage, model), model) for stage in range(plan.stages)],
        spmd_backend=BACKEND,
    )


def _module_names(layers: range, model: Model) -> list[str]:
    last = len(model.layers) - 1
    ends = {0: ["tok_embeddings"], last: ["norm", "lm_head"]}
    return list(chain.from_iterable(ends.get(layer, [f"layers.{layer - 1}"]) for layer in layers))


def _llama_config(llama: Llama, parallelism: ParallelismConfig) -> Any:
    """Return torchtitan's configuration of the model, each part of which has its own."""
    width, vocabulary = llama.hidden_size, llama.vocabulary_size
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=_INITIAL),
        norm=_norm_config(width),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=_INITIAL),
        layers=[_block_config(llama) for _ in range(llama.layers)],
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config


_INITIAL = {"weight": torch.nn.init.zeros_}
"""Initial values, which are replaced by the executor's."""


def _norm_config(width: int) -> Any:
    return RMSNorm.Config(normalized_shape=width, eps=NORM_EPSILON, param_init=_INITIAL)


def _block_config(llama: Llama) -> Any:
    width = llama.hidden_size
    rope = CosSinRoPE.Config(
        dim=width // llama.heads, max_seq_len=llama.sequence_length, theta=ROTARY_BASE, scaling="none"
    )
    return Llama3TransformerBlock.Config(
        attention_norm=_norm_config(width),
        ffn_norm=_norm_config(width),
        attention=make_gqa_config(
            dim=width, n_heads=llama.heads, n_kv_heads=llama.key_value_heads, wqkv_param_init=_INITIAL,
            wo_param_init=_INITIAL, inner_attention=ScaledDotProductAttention.Config(), rope=rope,
        ),
        feed_forward=make_ffn_config(
            dim=width, hidden_dim=llama.feed_forward_size, w1_param_init=_INITIAL, w2w3_param_init=_INITIAL
        ),
    )  # fmt: skip


def _named_weights(layers: list[Layer]) -> dict[str, Any]:
    """Return the executor's weights by torchtitan's names."""
    embedding, *blocks, head = layers
    found = {"tok_embeddings": embedding.get_parameter("tokens"), "norm": head.get_parameter("norm_weight")}
    found["lm_head"] = head.get_parameter("tokens")
    for number, block in enumerate(blocks):
        gate, up = block.get_parameter("expand_weight")
        parts = {
            "attention.qkv_linear.wq": "query", "attention.qkv_linear.wk": "key", "attention.qkv_linear.wv": "value",
            "attention.wo": "attention", "attention_norm": "attention_norm", "ffn_norm": "feed_forward_norm",
            "feed_forward.w2": "contract",
        }  # fmt: skip
        own = {part: block.get_parameter(f"{name}_weight") for part, name in parts.items()}
        own |= {"feed_forward.w1": gate, "feed_forward.w3": up}
        found |= {f"layers.{number}.{part}": values for part, values in own.items()}
    return {f"{name}.weight": values.detach() for name, values in found.items()}
