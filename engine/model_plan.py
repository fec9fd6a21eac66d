"""The memory plan of a model that is on disk but not loaded: its header gives the sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch

from engine import loader
from engine.config import EngineConfig
from engine.memory_plan import MemoryPlan, ModelSizes, matrix_bytes, plan_memory, plan_table
from engine.models.config import ModelConfig
from engine.models.layers import WeightFormat, pick_format
from engine.models.recurrence import state_spec
from engine.models.registry import read_config
from engine.weights.catalog import ModelSource, resolve
from engine.weights.gguf_reader import GGUFSource
from engine.weights.safetensors_reader import SafetensorsSource
from engine.weights.source import WeightSource
from kernels import planes
from kernels.dispatch import triton_runs_on

CPU_KINDS = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF types whose blocks the CPU's kernels read as they are."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A plan and what it is of; `str` of it is the table to print."""

    plan: MemoryPlan
    name: str
    device: str
    dtype: str
    kv_format: str

    def __str__(self) -> str:
        return plan_table(self.plan, model=self.name, device=self.device, dtype=self.dtype, kv_format=self.kv_format)


def plan_model(config: EngineConfig) -> PlannedModel:
    """Plan what `LocalEngine` would load. Raises `ModelFileError` and `ConfigError`."""
    device = loader.pick_device(config.device)
    found: ModelSource = resolve(config.model, config.data_dir)
    source: WeightSource = GGUFSource(found.path) if found.kind == "gguf" else SafetensorsSource(found.path)
    _, sizes = read_config(source)
    fmt = pick_format(device, config.dtype, triton_runs_on(device))
    kv_format = config.kv_format if config.kv_format != "auto" else _auto_kv_format(fmt)
    weights = weight_bytes(source, sizes, fmt)
    free, total = _device_memory(device)
    share = loader.CARD_SHARE if device.type == "cuda" else loader.RAM_SHARE
    limits = loader.CUDA_LIMITS if device.type == "cuda" else loader.CPU_LIMITS
    state = state_spec(sizes, fmt.compute_dtype)
    plan = plan_memory(
        ModelSizes(
            weight_bytes=weights,
            num_layers=sizes.num_attention_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            hidden_size=sizes.hidden_size,
            intermediate_size=max(sizes.intermediate_size, sizes.ssm.conv_channels if sizes.ssm else 0),
            vocab_size=sizes.vocab_size,
            context_tokens=sizes.max_position_embeddings,
            state_bytes=state.nbytes if state is not None else 0,
        ),
        kv_format=kv_format,
        block_size=config.block_size,
        kv_budget=config.kv_budget if config.kv_budget is not None else int(max(free - weights, 0) * share),
        available=free,
        total_device=total,
        max_seq_len=config.max_seq_len,
        batch_tokens=limits.max_batch_tokens,
        compute_bytes=fmt.compute_dtype.itemsize,
        sequences=limits.max_sequences,
    )
    return PlannedModel(plan, found.name, str(device), fmt.name, kv_format)


def weight_bytes(source: WeightSource, config: ModelConfig, fmt: WeightFormat) -> int:
    """Bytes that the weights will take in this format; a tied matrix counts once, rows read from the file do not."""
    shapes = {name: shape for name, shape in source.shapes().items() if not name.startswith("rope.")}
    own_head = "head.weight" in shapes and not config.tied and not source.same("head.weight", "embed.weight")
    if not own_head:
        shapes.pop("head.weight", None)
    elif fmt.rows_from_file:
        del shapes["embed.weight"]
    matrices = sum(_matrix_bytes(source, name, shape, fmt) for name, shape in shapes.items() if len(shape) == 2)
    small = (".conv.weight", ".conv.bias", "norm.weight")
    others = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(small))
    scalars = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith((".a_log", ".d", ".dt_bias")))
    return matrices + others * fmt.compute_dtype.itemsize + 4 * scalars


def _matrix_bytes(source: WeightSource, name: str, shape: tuple[int, ...], fmt: WeightFormat) -> int:
    """Matrices in blocks keep the file's own where they can; others become int8 on a CPU, and plain in planes."""
    kind = source.block_format(name)
    if fmt.planes and fmt.blocks and kind in planes.FORMATS:
        return matrix_bytes(math.prod(shape[:-1]), shape[-1], kind)
    if fmt.planes or not fmt.blocks:
        return math.prod(shape) * fmt.dtype.itemsize
    return matrix_bytes(math.prod(shape[:-1]), shape[-1], kind if kind in CPU_KINDS else "Q8_0")


def _auto_kv_format(fmt: WeightFormat) -> str:
    if fmt.name == "float32":
        return "fp32"
    return "bf16" if fmt.compute_dtype is torch.bfloat16 else "fp16"


def _device_memory(device: torch.device) -> tuple[int, int]:
    """`(free, total)`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total
