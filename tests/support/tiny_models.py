"""Random models of a few thousand weights, saved as transformers saves them and as GGUF files hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 320, 64, 96, 2, 4, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

KINDS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
}

WINDOW = 16
_LOCAL: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": WINDOW}
_GEMMA: dict[str, Any] = {
    **_LOCAL,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
_GEMMA3N: dict[str, Any] = {
    **_LOCAL,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "rope_parameters": _GEMMA["rope_parameters"],
    "num_kv_shared_layers": 3,
    "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.0, 0.0],
    "altup_active_idx": 1,
    "laurel_rank": 32,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB - 20,
}
"""The last three layers read what the second and the third store."""
WINDOW_KINDS = {
    "mistral-window": ("MistralConfig", _LOCAL),
    "qwen2-window": ("Qwen2Config", {**_LOCAL, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-window": (
        "Qwen3Config",
        {
            **_LOCAL,
            "use_sliding_window": True,
            "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gemma3n": ("Gemma3nTextConfig", _GEMMA3N),
}
"""Architectures some or all layers of which see a window only."""

_MAMBA2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
_BAMBA: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
RECURRENT_KINDS = {
    "mamba2": ("Mamba2Config", _MAMBA2),
    "mamba2-bias": ("Mamba2Config", {**_MAMBA2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    "bamba": ("BambaConfig", _BAMBA),
    "bamba-bias": ("BambaConfig", {**_BAMBA, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
}
"""Architectures with Mamba-2 layers; there are no GGUF files of them here."""


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random float32 model; weights are large enough for every part to matter, norms and biases are not neutral."""
    if kind in RECURRENT_KINDS:
        config_name, settings = RECURRENT_KINDS[kind]
    else:
        config_name, own = (KINDS | WINDOW_KINDS)[kind]
        settings = {**_SIZES, **own}
    config = getattr(transformers, config_name)(**{**settings, **changes})
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def save_safetensors(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def save_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    quant: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write the model as llama.cpp's converter does, matrices in `quant`, or in what it says for a tensor's name."""
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    _add_rope(writer, model)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = interleave_halves(tensor, heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        values = np.ascontiguousarray(tensor.numpy())
        wanted = quant(target) if callable(quant) else quant
        kind = wanted if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave_halves(tensor: Tensor, heads: int) -> Tensor:
    """What the converter does to q and k of the llama family: rows of a head's two halves alternate."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _add_rope(writer: gguf.GGUFWriter, model: transformers.PreTrainedModel) -> None:
    rope = model.config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, HIDDEN // HEADS, 2).float() / (HIDDEN // HEADS))
        divisors = plain / model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
