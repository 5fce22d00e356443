"""Configurations of the tiny models: one per architecture of mlx-lm that we know.

Widths are tiny and windows short (48 to 64 rows), so that tests pass them quickly. What
counts is the kind of each layer's cache, and that the kinds mix as in real models.
"""

from collections.abc import Callable
from typing import Final

import attrs

from kvport.snapshot.engine.builder.tokenizer import VOCABULARY_SIZE

Config = dict[str, object]

_WIDTH: Final = 64
_WINDOW: Final = 48
_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"

_COMMON: Final[Config] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": _WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}


@attrs.frozen
class Architecture:
    """One entry of the table.

    Attributes:
        config: config.json, without model_type, for a number of layers.
        cache: what the layers' caches are, in words.
        tied: the output head is the embedding.
    """

    config: Callable[[int], Config]
    cache: str
    tied: bool = False


def alternate(layers: int, period: int, often: str, last: str) -> list[str]:
    """Layer types in which every `period`th is `last` and all others `often`."""
    return [last if (i + 1) % period == 0 else often for i in range(layers)]


def _dense(layers: int) -> Config:
    return _COMMON | {"num_hidden_layers": layers, "head_dim": 16}


def _gemma2(layers: int) -> Config:
    return _dense(layers) | {"query_pre_attn_scalar": 16}


def _gemma3_text(layers: int) -> Config:
    return _gemma2(layers) | {
        "num_key_value_heads": 1,
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 4,
    }


def _gemma3n(layers: int) -> Config:
    return {
        "text_config": _gemma2(layers)
        | {
            "model_type": "gemma3n_text",
            "num_kv_shared_layers": layers // 2,
            "vocab_size_per_layer_input": VOCABULARY_SIZE,
            "hidden_size_per_layer_input": 16,
            "sliding_window": _WINDOW,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": alternate(layers, 2, _SLIDING, _FULL),
            "activation_sparsity_pattern": [0.5] * layers,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    }


def _windowed(layers: int) -> Config:
    return _dense(layers) | {
        "sliding_window": _WINDOW,
        "layer_types": alternate(layers, 4, _SLIDING, _FULL),
    }


def _gpt_oss(layers: int) -> Config:
    return _windowed(layers) | {
        "intermediate_size": _WIDTH,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": alternate(layers, 2, _SLIDING, _FULL),
    }


_DELTA: Final[Config] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


def _qwen3_5(layers: int) -> Config:
    return {
        "text_config": _dense(layers)
        | _DELTA
        | {
            "model_type": "qwen3_5_text",
            # Attention is most of the time of a long prompt on a CPU: two heads.
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 100_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "tie_word_embeddings": False,
    }


def _qwen3_next(layers: int) -> Config:
    return (
        _dense(layers)
        | _DELTA
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
        }
    )


def _mamba(layers: int) -> Config:
    return _COMMON | {
        "num_hidden_layers": layers,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }


def _mamba2(layers: int) -> Config:
    return _mamba(layers) | {
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.001, 100.0],
    }


def _falcon_h1(layers: int) -> Config:
    return _dense(layers) | {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    }


def _nemotron_h(layers: int) -> Config:
    return _dense(layers) | {
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "hybrid_override_pattern": alternate(layers, 2, "M", "*"),
    }


def _lfm2(layers: int) -> Config:
    return _dense(layers) | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": _WIDTH,
        "block_ff_dim": 128,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": alternate(layers, 2, "conv", _FULL),
    }


def _deepseek_v3(layers: int) -> Config:
    return _COMMON | {
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
    }


def _deepseek_v32(layers: int) -> Config:
    return _deepseek_v3(layers) | {
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_topk": 64,
    }


def _baichuan_m1(layers: int) -> Config:
    return _dense(layers) | {
        "sliding_window": _WINDOW,
        "sliding_window_layers": list(range(0, layers, 2)),
        "conv_window": 2,
    }


def _rwkv7(layers: int) -> Config:
    return _COMMON | {
        "num_hidden_layers": layers,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    }


def _kimi_linear(layers: int) -> Config:
    return _dense(layers) | {
        # Layers are counted from 1 here.
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [i for i in range(1, layers + 1) if i % 4],
        },
        "model_max_length": 131_072,
        "num_experts": 2,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }


def _longcat_flash(layers: int) -> Config:
    return _COMMON | {
        "num_layers": layers,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 128,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 2,
        "zero_expert_num": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    }


def _llama4(layers: int) -> Config:
    return {
        "text_config": _dense(layers)
        | {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": _WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    }


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture(_dense, "full"),
    "qwen3": Architecture(_dense, "full"),
    "gemma3_text": Architecture(_gemma3_text, "3 windowed : 1 full"),
    "qwen3_5": Architecture(_qwen3_5, "3 whole (gated delta) : 1 full"),
    "qwen3_next": Architecture(_qwen3_next, "3 whole (gated delta) : 1 full"),
    "mamba2": Architecture(_mamba2, "whole (state space)"),
    "falcon_h1": Architecture(_falcon_h1, "list of whole (state space) and full"),
    "lfm2": Architecture(_lfm2, "1 whole (convolution) : 1 full", tied=True),
    "deepseek_v3": Architecture(_deepseek_v3, "full (latent)"),
    "gemma2": Architecture(_gemma2, "full", tied=True),
    "gemma3n": Architecture(
        _gemma3n, "1 windowed : 1 full, shared by later layers", tied=True
    ),
    "olmo3": Architecture(_windowed, "3 windowed : 1 full"),
    "gpt_oss": Architecture(_gpt_oss, "1 windowed : 1 full"),
    "mamba": Architecture(_mamba, "whole (state space)"),
    "nemotron_h": Architecture(_nemotron_h, "1 whole (state space) : 1 full"),
    "rwkv7": Architecture(_rwkv7, "whole (linear attention)"),
    "kimi_linear": Architecture(_kimi_linear, "3 whole (delta) : 1 full (latent)"),
    "baichuan_m1": Architecture(
        _baichuan_m1, "1 list of whole and windowed : 1 list of whole and full"
    ),
    "longcat_flash": Architecture(_longcat_flash, "list of two full (latent)"),
    "deepseek_v32": Architecture(_deepseek_v32, "list of two full (latent, index)"),
    "llama4": Architecture(_llama4, "3 chunked : 1 full; cannot be batched"),
}
