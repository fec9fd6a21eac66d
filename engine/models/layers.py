"""Parts of a decoder layer: matrix products in the weight format of the model, embedding, norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.gguf_reader import decode_blocks
from engine.weights.source import WeightSource
from kernels import packed_linear, planes
from kernels.dispatch import Operations, cpu_kernels

if TYPE_CHECKING:
    from kernels.cpu.blocks import BlockLinear

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`name`, as shown; matrices in `dtype`, or for the CPU `packed` or as quantised `blocks`; norms, residuals and
    sums in `compute_dtype`. The name of a model in blocks is known once its matrices are. With `planes` matrices are
    laid out for the Triton kernels: the file's blocks where `blocks` says so, else `dtype`.
    """

    name: str
    dtype: torch.dtype
    compute_dtype: torch.dtype
    packed: bool = False
    blocks: bool = False
    planes: bool = False

    @property
    def rounds_activations(self) -> bool:
        """Whether products round what they are given to int8."""
        return self.blocks and not self.planes

    @property
    def rows_from_file(self) -> bool:
        """Whether embedding rows are read from the file as they are needed."""
        return self.packed or (self.blocks and not self.planes)


def pick_format(device: torch.device, dtype: str, triton: bool = False) -> WeightFormat:
    """The weight format for `--dtype`; `triton`: for its kernels. On a CPU everything but the matrices is float32."""
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"--dtype {dtype} is unknown; it is auto, {', '.join(_DTYPES)}.")
    if triton:
        name = _card_dtype(device) if dtype == "auto" else dtype
        return WeightFormat(name, _DTYPES[name], _DTYPES[name], blocks=dtype == "auto", planes=True)
    if device.type == "cpu" and dtype == "auto" and cpu_kernels() is not None:
        return WeightFormat("int8", torch.int8, torch.float32, blocks=True)
    if device.type == "cpu":
        packed = packed_linear.is_available() and dtype in ("auto", "float16")
        name = ("float16" if packed else "float32") if dtype == "auto" else dtype
        return WeightFormat(name, _DTYPES[name], torch.float32, packed)
    name = _card_dtype(device) if dtype == "auto" else dtype
    return WeightFormat(name, _DTYPES[name], _DTYPES[name])


def _card_dtype(device: torch.device) -> str:
    """bfloat16 where the card computes in it, else float16; float32 where kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


class Linear(Protocol):
    """x [T, in] -> [T, out] in x's dtype. `formats`: name and bytes of each part that is not plain."""

    nbytes: int

    @property
    def formats(self) -> tuple[tuple[str, int], ...]: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """weight [out, in] as a tensor; `nbytes` counts it."""

    formats: tuple[tuple[str, int], ...] = ()

    def __init__(self, weight: Tensor, bias: Tensor | None, operations: Operations) -> None:
        self.weight = weight
        self.bias = bias
        self.nbytes = weight.nbytes
        self._linear = operations.linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)


class Embedding(Protocol):
    """token_ids int64 [T] -> [T, hidden] in the compute dtype."""

    nbytes: int

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class TableEmbedding:
    """Rows of a matrix in memory."""

    def __init__(self, weight: Tensor, compute_dtype: torch.dtype) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes
        self._dtype = compute_dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].to(self._dtype)


class FileEmbedding:
    """Rows read from the mapped file and decoded as they are needed: the matrix takes no memory of its own."""

    nbytes = 0

    def __init__(self, source: WeightSource, name: str) -> None:
        self._source = source
        self._name = name

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._source.rows(self._name, token_ids)


class BlockEmbedding:
    """Rows of a head's matrix, which holds the embedding as the file does: decoded as those of the file are."""

    nbytes = 0

    def __init__(self, head: BlockLinear) -> None:
        self.matrix = head.parts[0]

    def __call__(self, token_ids: Tensor) -> Tensor:
        return decode_blocks(self.matrix.file_rows(token_ids.numpy()), self.matrix.format)


class WeightLoader:
    """Takes tensors from a source into the form that a device and format want."""

    def __init__(self, source: WeightSource, device: torch.device, fmt: WeightFormat, operations: Operations) -> None:
        self.source = source
        self.device = device
        self.format = fmt
        self.operations = operations
        self.shapes = source.shapes()

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """What is no matrix, such as a norm's weight, in the compute dtype unless another is given."""
        return _own(self.source.load(name), self.device, dtype or self.format.compute_dtype)

    def linear(self, *names: str) -> Linear:
        """One product for the matrices `name.weight` stacked along their outputs, with `name.bias` where there is."""
        if self.format.planes:
            return self._plane_linear(names)
        if self.format.blocks:
            return self._block_linear(names)
        matrices = [self.source.load(f"{name}.weight") for name in names]
        bias = self._bias(names, [len(matrix) for matrix in matrices])
        if self.format.packed:
            weight = torch.cat([matrix.float() for matrix in matrices]) if len(matrices) > 1 else matrices[0].float()
            return packed_linear.PackedLinear(weight, bias)
        parts = [matrix.to(self.device, self.format.dtype) for matrix in matrices]
        weight = torch.cat(parts) if len(parts) > 1 else _own(parts[0], self.device, self.format.dtype)
        return PlainLinear(weight, bias, self.operations)

    def _block_linear(self, names: Sequence[str]) -> Linear:
        """What the file holds in blocks stays as it is, any other matrix is quantised to int8."""
        from kernels.cpu import blocks as cpu_blocks

        parts = []
        for name in (f"{name}.weight" for name in names):
            kind = self.source.block_format(name)
            if kind not in cpu_blocks.FORMATS:
                parts.append(cpu_blocks.quantise(self.source.load(name)))
            else:
                parts.append(cpu_blocks.from_file(self.source.blocks(name), kind, self.shapes[name][1]))
        return cpu_blocks.BlockLinear(parts, self._bias(names, [part.rows for part in parts]))

    def _plane_linear(self, names: Sequence[str]) -> Linear:
        from kernels.gpu.linear import PlaneLinear

        parts = [self._planes(f"{name}.weight") for name in names]
        return PlaneLinear(parts, self._bias(names, [part.rows for part in parts]))

    def _planes(self, name: str) -> planes.PackedWeight:
        kind = self.source.block_format(name) if self.format.blocks else None
        if kind in planes.FORMATS:
            blocks = torch.from_numpy(self.source.blocks(name)).to(self.device)
            return planes.pack(blocks, kind, self.shapes[name][1])
        return planes.plain(_own(self.source.load(name), self.device, self.format.dtype))

    def embedding(self, name: str) -> Embedding:
        if self.format.planes:
            from kernels.gpu.linear import PlaneEmbedding

            return PlaneEmbedding(self._planes(name), self.format.compute_dtype)
        if self.format.rows_from_file:
            return FileEmbedding(self.source, name)
        return TableEmbedding(_own(self.source.load(name), self.device, self.format.dtype), self.format.compute_dtype)

    def in_memory(self, embedding: Embedding, head: Linear) -> Embedding:
        """The embedding of a head that is tied to it: where both are the file's blocks, these lie in memory once."""
        if not isinstance(embedding, FileEmbedding) or not self.format.blocks:
            return embedding
        from kernels.cpu.blocks import BlockLinear

        kept = isinstance(head, BlockLinear) and head.parts[0].format == self.source.block_format("embed.weight")
        return BlockEmbedding(head) if kept else embedding  # type: ignore[arg-type]

    def tied_head(self, embedding: Embedding) -> Linear:
        """The embedding's planes as the head: they lie in memory once."""
        from kernels.gpu.linear import PlaneEmbedding, PlaneLinear

        assert isinstance(embedding, PlaneEmbedding)
        return PlaneLinear([embedding.weight], None)

    def _bias(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
        present = [f"{name}.bias" in self.shapes for name in names]
        if not any(present):
            return None
        parts = [
            self.source.load(f"{name}.bias").float() if there else torch.zeros(size)
            for name, there, size in zip(names, present, sizes, strict=True)
        ]
        dtype = torch.float32 if self.format.rows_from_file else self.format.dtype
        return torch.cat(parts).to(self.device, dtype)


def _own(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy of its own: a view of the mapped file would be paged in and out under memory pressure."""
    return tensor.to(device, dtype, copy=True).contiguous()
