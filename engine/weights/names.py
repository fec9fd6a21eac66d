"""Canonical names of a decoder's tensors, and what safetensors and GGUF files call them."""

from __future__ import annotations

import re

# canonical -> (safetensors, GGUF); {i} is the layer.
_NAMES = {
    "embed.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm.weight": ("model.norm.weight", "output_norm.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
    "rope.divisors": ("", "rope_freqs.weight"),
    "layers.{i}.attn_norm.weight": ("model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"),
    "layers.{i}.attn_post_norm.weight": ("", "blk.{i}.post_attention_norm.weight"),
    "layers.{i}.mlp_post_norm.weight": (
        "model.layers.{i}.post_feedforward_layernorm.weight",
        "blk.{i}.post_ffw_norm.weight",
    ),
    "layers.{i}.mlp_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"),
    "layers.{i}.q_norm.weight": ("model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight"),
    "layers.{i}.k_norm.weight": ("model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight"),
    "layers.{i}.q.weight": ("model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight"),
    "layers.{i}.k.weight": ("model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight"),
    "layers.{i}.v.weight": ("model.layers.{i}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight"),
    "layers.{i}.o.weight": ("model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight"),
    "layers.{i}.q.bias": ("model.layers.{i}.self_attn.q_proj.bias", "blk.{i}.attn_q.bias"),
    "layers.{i}.k.bias": ("model.layers.{i}.self_attn.k_proj.bias", "blk.{i}.attn_k.bias"),
    "layers.{i}.v.bias": ("model.layers.{i}.self_attn.v_proj.bias", "blk.{i}.attn_v.bias"),
    "layers.{i}.o.bias": ("model.layers.{i}.self_attn.o_proj.bias", "blk.{i}.attn_output.bias"),
    "layers.{i}.gate.weight": ("model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight"),
    "layers.{i}.up.weight": ("model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight"),
    "layers.{i}.down.weight": ("model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight"),
    "layers.{i}.gate.bias": ("model.layers.{i}.mlp.gate_proj.bias", "blk.{i}.ffn_gate.bias"),
    "layers.{i}.up.bias": ("model.layers.{i}.mlp.up_proj.bias", "blk.{i}.ffn_up.bias"),
    "layers.{i}.down.bias": ("model.layers.{i}.mlp.down_proj.bias", "blk.{i}.ffn_down.bias"),
}
# Other names in safetensors files, of architectures with Mamba-2 layers.
_RECURRENT = {
    "backbone.embedding.weight": "embed.weight",
    "backbone.embeddings.weight": "embed.weight",
    "backbone.norm_f.weight": "norm.weight",
    "model.final_layernorm.weight": "norm.weight",
    "backbone.layers.{i}.norm.weight": "layers.{i}.attn_norm.weight",
    "model.layers.{i}.pre_ff_layernorm.weight": "layers.{i}.mlp_norm.weight",
    **{
        f"model.layers.{{i}}.feed_forward.{name}_proj.{kind}": f"layers.{{i}}.{name}.{kind}"
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    **{
        f"{mixer}.{theirs}": f"layers.{{i}}.{ours}"
        for mixer in ("backbone.layers.{i}.mixer", "model.layers.{i}.mamba")
        for theirs, ours in (
            ("in_proj.weight", "in_proj.weight"),
            ("in_proj.bias", "in_proj.bias"),
            ("out_proj.weight", "out_proj.weight"),
            ("out_proj.bias", "out_proj.bias"),
            ("conv1d.weight", "conv.weight"),
            ("conv1d.bias", "conv.bias"),
            ("norm.weight", "ssm_norm.weight"),
            ("A_log", "a_log"),
            ("D", "d"),
            ("dt_bias", "dt_bias"),
        )
    },
}
_FROM_SAFETENSORS = {names[0]: canonical for canonical, names in _NAMES.items()} | _RECURRENT
_SANDWICH = {
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attn_post_norm.weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
}
_ALTUP = {
    "model.embed_tokens_per_layer.weight": "own_embed.weight",
    "model.per_layer_model_projection.weight": "own_projection.weight",
    "model.per_layer_projection_norm.weight": "own_norm.weight",
    "model.altup_projections.{i}.weight": "expand.{i}.weight",
    "model.altup_unembed_projections.{i}.weight": "merge.{i}.weight",
    **{
        f"model.layers.{{i}}.{theirs}": f"layers.{{i}}.{ours}"
        for theirs, ours in (
            ("altup.router_norm.weight", "altup_norm.weight"),
            ("altup.modality_router.weight", "altup_router.weight"),
            ("altup.prediction_coefs.weight", "altup_predict.weight"),
            ("altup.correction_coefs.weight", "altup_correct.weight"),
            ("altup.correct_output_scale", "altup_scale"),
            ("laurel.linear_left.weight", "laurel_left.weight"),
            ("laurel.linear_right.weight", "laurel_right.weight"),
            ("laurel.post_laurel_norm.weight", "laurel_norm.weight"),
            ("per_layer_input_gate.weight", "own_gate.weight"),
            ("per_layer_projection.weight", "own_out.weight"),
            ("post_per_layer_input_norm.weight", "own_out_norm.weight"),
        )
    },
}
# What names mean in other models of safetensors files, by model type; of a model that also sees and hears, the text's.
_MEANINGS = {
    "gemma3_text": _SANDWICH,
    "gemma3n_text": _SANDWICH | _ALTUP,
    "gemma3n": {
        name.replace("model.", "model.language_model.", 1): canonical
        for name, canonical in (_FROM_SAFETENSORS | _SANDWICH | _ALTUP).items()
    },
}
_FROM_GGUF = {names[1]: canonical for canonical, names in _NAMES.items()}
_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def from_safetensors(name: str, model_type: object = None) -> str | None:
    """Canonical name of a tensor in a model's safetensors file; None for one that no decoder here uses."""
    return _translate(name, _FROM_SAFETENSORS | _MEANINGS.get(str(model_type), {}))


def from_gguf(name: str) -> str | None:
    """Canonical name of a tensor in a GGUF file; None for one that no decoder here uses."""
    return _translate(name, _FROM_GGUF)


def _translate(name: str, table: dict[str, str]) -> str | None:
    layer = _LAYER.search(name)
    canonical = table.get(_LAYER.sub("{i}", name, count=1))
    if canonical is None or layer is None:
        return canonical
    return canonical.replace("{i}", layer.group())
