"""The memory plan of a model that is on disk but not loaded: its header gives the sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import psutil
import torch

from engine import loader
from engine.attention_layout import attention_layout, context_limit
from engine.config import EngineConfig
from engine.memory.plan import MemoryPlan, ModelSizes, matrix_bytes, plan_memory, plan_table
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
from kernels.layer_groups import LayerGroup

CPU_KINDS = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF types whose blocks the CPU's kernels read as they are."""


@dataclass(frozen=True, slots=True)
class PlannedWeights:
    """`nbytes` held and what the matrices are kept in, as `DecoderModel` tells both once it is loaded."""

    nbytes: int
    weight_format: str


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
    weights = planned_weights(source, sizes, fmt)
    kv_format = loader.pick_kv_format(config.kv_format, weights.weight_format, fmt.compute_dtype)
    free, total = _device_memory(device)
    share = loader.CARD_SHARE if device.type == "cuda" else loader.RAM_SHARE
    limits = loader.CUDA_LIMITS if device.type == "cuda" else loader.CPU_LIMITS
    state = state_spec(sizes, fmt.compute_dtype)
    layout = attention_layout(config, sizes)
    plan = plan_memory(
        ModelSizes(
            weight_bytes=weights.nbytes,
            num_layers=layout.stores,
            groups=layout.groups or (LayerGroup(),),
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            hidden_size=sizes.hidden_size,
            intermediate_size=max(sizes.intermediate_size, sizes.ssm.conv_channels if sizes.ssm else 0),
            vocab_size=sizes.vocab_size,
            context_tokens=context_limit(config, sizes),
            state_bytes=state.nbytes if state is not None else 0,
        ),
        kv_format=kv_format,
        block_size=config.block_size,
        kv_budget=config.kv_budget if config.kv_budget is not None else int(max(free - weights.nbytes, 0) * share),
        available=free,
        total_device=total,
        max_seq_len=config.max_seq_len,
        batch_tokens=limits.max_batch_tokens,
        compute_bytes=fmt.compute_dtype.itemsize,
        sequences=limits.max_sequences,
    )
    return PlannedModel(plan, found.name, str(device), weights.weight_format, kv_format)


def planned_weights(source: WeightSource, config: ModelConfig, fmt: WeightFormat) -> PlannedWeights:
    """What a load in this format will hold; a tied matrix counts once, rows read from the file do not."""
    shapes = {name: shape for name, shape in source.shapes().items() if not name.startswith("rope.")}
    own_head = "head.weight" in shapes and not config.tied and not source.same("head.weight", "embed.weight")
    if not own_head:
        shapes.pop("head.weight", None)
    elif fmt.rows_from_file:
        del shapes["embed.weight"]
    if fmt.rows_from_file:
        shapes.pop("own_embed.weight", None)
    unused = {i for i in range(config.num_attention_layers) if not config.owns_kv(i)}
    for layer, part in ((i, part) for i in unused for part in ("k.weight", "v.weight", "k_norm.weight")):
        shapes.pop(f"layers.{layer}.{part}", None)
    small = (
        ".conv.weight",
        ".conv.bias",
        "norm.weight",
        "_router.weight",
        "_predict.weight",
        "_correct.weight",
        "_scale",
    )
    nbytes = (
        sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(small)) * fmt.compute_dtype.itemsize
    )
    scalars = (".a_log", ".d", ".dt_bias")
    nbytes += 4 * sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(scalars))
    sizes: Counter[str] = Counter()
    for name, shape in shapes.items():
        if len(shape) == 2 and not name.endswith(small):
            kept, size = _matrix(source.block_format(name), shape, fmt)
            nbytes += size
            # Of two matrices for the same tokens, a model is named after its head.
            if kept is not None and not (own_head and name == "embed.weight"):
                sizes[kept] += size
    return PlannedWeights(nbytes, ", ".join(kept for kept, _ in sizes.most_common()) or fmt.name)


def _matrix(kind: str | None, shape: tuple[int, ...], fmt: WeightFormat) -> tuple[str | None, int]:
    """`(name of its blocks, bytes)`. They are the file's own where they can be; others are int8 on a CPU, else none."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if fmt.planes and fmt.blocks and kind in planes.FORMATS:
        return kind.lower(), matrix_bytes(rows, columns, kind)
    if fmt.planes or not fmt.blocks:
        return None, rows * columns * fmt.dtype.itemsize
    if kind in CPU_KINDS:
        return f"{kind.lower()} (file)", matrix_bytes(rows, columns, kind)
    return "int8", matrix_bytes(rows, columns, "Q8_0")


def _device_memory(device: torch.device) -> tuple[int, int]:
    """`(free, total)`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total
