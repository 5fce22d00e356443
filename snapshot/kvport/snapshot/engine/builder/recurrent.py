"""Configurations of models with layers of whole state: recurrent or convolution."""

from typing import Final

from kvport.snapshot.engine.builder.attention import longcat_flash
from kvport.snapshot.engine.builder.configs import (
    COMMON,
    FULL,
    WIDTH,
    WINDOW,
    Architecture,
    Config,
    alternate,
    dense,
)

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
        "text_config": dense(layers)
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
        dense(layers)
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
    return COMMON | {
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
    return dense(layers) | {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    }


def _nemotron_h(layers: int) -> Config:
    return dense(layers) | {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "hybrid_override_pattern": alternate(layers, 2, "M", "*"),
    }


def _lfm2(layers: int) -> Config:
    return dense(layers) | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": WIDTH,
        "block_ff_dim": 128,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": alternate(layers, 2, "conv", FULL),
    }


def _baichuan_m1(layers: int) -> Config:
    return dense(layers) | {
        "sliding_window": WINDOW,
        "sliding_window_layers": list(range(0, layers, 2)),
        "conv_window": 2,
    }


def _rwkv7(layers: int) -> Config:
    return COMMON | {
        "num_hidden_layers": layers,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    }


def _kimi_linear(layers: int) -> Config:
    return dense(layers) | {
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


def _lfm2_moe(layers: int) -> Config:
    return _lfm2(layers) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
    }


def _granitemoehybrid(layers: int) -> Config:
    return dense(layers) | {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": alternate(layers, 2, "mamba", "attention"),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_expand": 1,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    }


def _jamba(layers: int) -> Config:
    return COMMON | {
        "num_hidden_layers": layers,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }


def _plamo2(layers: int) -> Config:
    return dense(layers) | {
        "hidden_size_per_head": 16,
        "full_attention_idx": [],
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
    }


def _recurrent_gemma(layers: int) -> Config:
    return dense(layers) | {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_key_value_heads": 1,
        "attention_window_size": WINDOW,
        "block_types": alternate(layers, 2, "recurrent", "attention"),
    }


def _olmo_hybrid(layers: int) -> Config:
    return dense(layers) | _DELTA | {"linear_allow_neg_eigval": True}


def _bailing_moe_linear(layers: int) -> Config:
    return dense(layers) | {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "use_qk_norm": True,
        "topk_group": 1,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def _longcat_flash_ngram(layers: int) -> Config:
    return longcat_flash(layers) | {
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 4,
        "emb_split_num": 2,
    }


RECURRENT: Final[dict[str, Architecture]] = {
    "qwen3_5": Architecture(_qwen3_5, "3 whole (gated delta) : 1 full", least=4),
    "qwen3_next": Architecture(_qwen3_next, "3 whole (gated delta) : 1 full", least=4),
    "olmo_hybrid": Architecture(
        _olmo_hybrid, "3 whole (gated delta) : 1 full", least=4
    ),
    "kimi_linear": Architecture(
        _kimi_linear, "3 whole (delta) : 1 full (latent)", least=4
    ),
    "bailing_moe_linear": Architecture(
        _bailing_moe_linear, "1 whole (linear attention) : 1 full", least=2
    ),
    "rwkv7": Architecture(_rwkv7, "whole (linear attention)"),
    "mamba": Architecture(_mamba, "whole (state space)"),
    "mamba2": Architecture(_mamba2, "whole (state space)"),
    "falcon_h1": Architecture(_falcon_h1, "list of whole (state space) and full"),
    "granitemoehybrid": Architecture(
        _granitemoehybrid, "1 whole (state space) : 1 full"
    ),
    "jamba": Architecture(_jamba, "1 whole (state space) : 1 full", least=2),
    "nemotron_h": Architecture(_nemotron_h, "1 whole (state space) : 1 full", least=2),
    "plamo2": Architecture(_plamo2, "1 whole (state space) : 1 full", least=2),
    "recurrent_gemma": Architecture(
        _recurrent_gemma, "1 whole (recurrent) : 1 windowed", tied=True, least=2
    ),
    "lfm2": Architecture(_lfm2, "1 whole (convolution) : 1 full", tied=True, least=2),
    "lfm2_moe": Architecture(
        _lfm2_moe, "1 whole (convolution) : 1 full", tied=True, least=2
    ),
    "baichuan_m1": Architecture(
        _baichuan_m1, "1 list of whole and windowed : 1 list of whole and full"
    ),
    "longcat_flash_ngram": Architecture(
        _longcat_flash_ngram, "whole (last tokens), list of two full (latent)"
    ),
}
