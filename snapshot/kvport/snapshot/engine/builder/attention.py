"""Configurations of models whose layers all attend: full, windowed, chunked, latent."""

from typing import Final

from kvport.snapshot.engine.builder.configs import (
    COMMON,
    FULL,
    SLIDING,
    WIDTH,
    WINDOW,
    Architecture,
    Config,
    alternate,
    dense,
    windowed,
)
from kvport.snapshot.engine.builder.tokenizer import VOCABULARY_SIZE

_EXPERTS: Final[Config] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
}


def _gemma2(layers: int) -> Config:
    return dense(layers) | {"query_pre_attn_scalar": 16}


def _gemma3_text(layers: int) -> Config:
    return _gemma2(layers) | {
        "num_key_value_heads": 1,
        "sliding_window": WINDOW,
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
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": alternate(layers, 2, SLIDING, FULL),
            "activation_sparsity_pattern": [0.5] * layers,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    }


def _gpt_oss(layers: int) -> Config:
    return windowed(layers) | {
        "intermediate_size": WIDTH,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": alternate(layers, 2, SLIDING, FULL),
    }


def _deepseek_v3(layers: int) -> Config:
    return COMMON | {
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


def longcat_flash(layers: int) -> Config:
    """Latent attention twice per layer."""
    return COMMON | {
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
    }


def _llama4(layers: int) -> Config:
    return {
        "text_config": dense(layers)
        | {
            "model_type": "llama4_text",
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    }


def _gemma4_text(layers: int) -> Config:
    # Full layers have heads of another width, and the last half shares keys and values.
    return _gemma3_text(layers) | {
        "global_head_dim": 32,
        "num_kv_shared_layers": layers // 2,
        "vocab_size_per_layer_input": VOCABULARY_SIZE,
        "hidden_size_per_layer_input": 16,
        "layer_types": alternate(layers, 2, SLIDING, FULL),
        "tie_word_embeddings": True,
    }


def _half_rotary(layers: int) -> Config:
    return dense(layers) | {"partial_rotary_factor": 0.5}


def _stablelm(layers: int) -> Config:
    return _half_rotary(layers) | {"layer_norm_eps": 1e-5, "use_qkv_bias": True}


def _granite(layers: int) -> Config:
    return dense(layers) | {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    }


def _apertus(layers: int) -> Config:
    return dense(layers) | {"post_norm": False, "qk_norm": True}


def _ernie4_5(layers: int) -> Config:
    return dense(layers) | {"use_bias": False}


def _minicpm3(layers: int) -> Config:
    return COMMON | {
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "dim_model_base": WIDTH,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "scale_depth": 2.0,
        "scale_emb": 1.0,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "original_max_position_embeddings": 131_072,
        },
    }


def _cohere2(layers: int) -> Config:
    return dense(layers) | {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
        "logit_scale": 1.0,
    }


def _exaone4(layers: int) -> Config:
    return dense(layers) | {
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
        "layer_types": alternate(layers, 4, SLIDING, FULL),
        "rope_scaling": {"rope_type": "default"},
    }


def _exaone_moe(layers: int) -> Config:
    return (
        windowed(layers) | _EXPERTS | {"is_moe_layer": [i > 0 for i in range(layers)]}
    )


def _ministral3(layers: int) -> Config:
    # Queries grow with the position from the original length on.
    return windowed(layers) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 256,
        },
    }


def _mistral3(layers: int) -> Config:
    return {"text_config": dense(layers) | {"model_type": "llama"}}


def _mixtral(layers: int) -> Config:
    return dense(layers) | {"num_local_experts": 4, "num_experts_per_tok": 2}


def _qwen3_moe(layers: int) -> Config:
    return (
        dense(layers)
        | _EXPERTS
        | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    )


def _minimax(layers: int) -> Config:
    return _mixtral(layers) | {"shared_intermediate_size": 32, "rotary_dim": 8}


def _hunyuan(layers: int) -> Config:
    # Every second layer takes the keys and values of the one before.
    return (
        dense(layers)
        | _EXPERTS
        | {
            "moe_topk": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": False,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},
        }
    )


def _mimo_v2_flash(layers: int) -> Config:
    return dense(layers) | {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "hybrid_layer_pattern": [i % 2 for i in range(layers)],
        "moe_layer_freq": [int(i > 0) for i in range(layers)],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10_000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    }


def _laguna(layers: int) -> Config:
    return (
        windowed(layers)
        | _EXPERTS
        | {
            "num_attention_heads_per_layer": [4] * layers,
            "shared_expert_intermediate_size": 32,
        }
    )


def _step3p5(layers: int) -> Config:
    return windowed(layers) | {
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "attention_other_setting": {
            "num_attention_heads": 4,
            "num_attention_groups": 2,
        },
    }


def _iquestloopcoder(layers: int) -> Config:
    return dense(layers) | {"loop_num": 2, "loop_window_size": WINDOW}


ATTENTION: Final[dict[str, Architecture]] = {
    "llama": Architecture(dense, "full"),
    "qwen3": Architecture(dense, "full"),
    "apertus": Architecture(_apertus, "full"),
    "ernie4_5": Architecture(_ernie4_5, "full"),
    "gemma": Architecture(dense, "full", tied=True),
    "gemma2": Architecture(_gemma2, "full", tied=True),
    "glm4": Architecture(_half_rotary, "full"),
    "granite": Architecture(_granite, "full"),
    "helium": Architecture(dense, "full"),
    "internlm3": Architecture(dense, "full"),
    "mistral3": Architecture(_mistral3, "full"),
    "phi3": Architecture(dense, "full"),
    "qwen2": Architecture(dense, "full"),
    "seed_oss": Architecture(dense, "full"),
    "smollm3": Architecture(dense, "full"),
    "stablelm": Architecture(_stablelm, "full"),
    "starcoder2": Architecture(dense, "full"),
    "minimax": Architecture(_minimax, "full"),
    "mixtral": Architecture(_mixtral, "full"),
    "qwen3_moe": Architecture(_qwen3_moe, "full"),
    "hunyuan": Architecture(_hunyuan, "full, every second layer shares", tied=True),
    "iquestloopcoder": Architecture(_iquestloopcoder, "full and windowed per layer"),
    "deepseek_v3": Architecture(_deepseek_v3, "full (latent)"),
    "minicpm3": Architecture(_minicpm3, "full (latent)"),
    "longcat_flash": Architecture(longcat_flash, "list of two full (latent)"),
    "deepseek_v32": Architecture(_deepseek_v32, "list of two full (latent, index)"),
    "cohere2": Architecture(_cohere2, "3 windowed : 1 full", tied=True, least=4),
    "exaone4": Architecture(_exaone4, "3 windowed : 1 full", least=4),
    "exaone_moe": Architecture(_exaone_moe, "3 windowed : 1 full"),
    "gemma3_text": Architecture(_gemma3_text, "3 windowed : 1 full", least=4),
    "gemma3n": Architecture(
        _gemma3n, "1 windowed : 1 full, shared by later layers", tied=True, least=3
    ),
    "gemma4_text": Architecture(
        _gemma4_text, "1 windowed : 1 full, shared by later layers", tied=True, least=4
    ),
    "gpt_oss": Architecture(_gpt_oss, "1 windowed : 1 full", least=2),
    "laguna": Architecture(_laguna, "3 windowed : 1 full", least=4),
    "llama_swa": Architecture(
        windowed, "3 windowed : 1 full", model_type="llama", least=4
    ),
    "mimo_v2_flash": Architecture(_mimo_v2_flash, "1 full : 1 windowed", least=2),
    "ministral3": Architecture(_ministral3, "3 windowed : 1 full", least=4),
    "olmo3": Architecture(windowed, "3 windowed : 1 full", least=4),
    "step3p5": Architecture(_step3p5, "3 windowed : 1 full"),
    "llama4": Architecture(_llama4, "3 chunked : 1 full; cannot be batched", least=4),
}
