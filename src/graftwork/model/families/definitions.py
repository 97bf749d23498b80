"""The families that are known, each defined once, as far as it differs from Llama.

To add one, write its `ModelFamily` here, into `FAMILIES`, and a test.
"""

from graftwork.model.families.family import (
    QKV,
    BlockLayout,
    ModelFamily,
    PlainRecipe,
    query_key_value,
)

LLAMA = ModelFamily("llama", recipe=PlainRecipe(), block=BlockLayout(), plain_logits=True)
QWEN_WINDOWS = {"use_sliding_window": False, "max_window_layers": 28}
"""Configs name a window that is not used unless they say so."""
DENSE_QWEN = ModelFamily(
    "",
    recipe=PlainRecipe(),
    block=BlockLayout(),
    plain_logits=True,
    defaults={"sliding_window": 4096, **QWEN_WINDOWS},
)
GEMMA = BlockLayout(norm="rms_plus_one", activation="gelu_pytorch_tanh")
LATER_GEMMA = GEMMA._replace(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
NORMS_AFTER = BlockLayout(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
COHERE = BlockLayout(before_mlp="input_layernorm", norm="layer", parallel=True, interleaved=True)


FAMILIES = (
    # Llama, and the families that have its blocks.
    LLAMA,
    LLAMA._replace(name="mistral"),
    ModelFamily("ministral"),
    ModelFamily("mixtral"),
    ModelFamily("stablelm", norm_bias=True),
    # Qwen 2 (biases on queries, keys and values) and Qwen 3 (norms of each head), dense and with experts.
    DENSE_QWEN._replace(name="qwen2", biased=QKV),
    ModelFamily("qwen2_moe", biased=QKV, defaults=QWEN_WINDOWS),
    DENSE_QWEN._replace(name="qwen3", head_norms="head"),
    ModelFamily("qwen3_moe", head_norms="head", defaults=QWEN_WINDOWS),
    # SmolLM 3: Llama's blocks, of which every fourth has no rotary positions.
    ModelFamily(
        "smollm3",
        tied=True,
        block=BlockLayout(),
        plain_logits=True,
        defaults={"use_sliding_window": False},
    ),
    # Granite: Llama's blocks with multipliers on embeddings, scores, residuals and logits.
    ModelFamily("granite", block=BlockLayout(scaled_residual=True)),
    ModelFamily("granitemoe"),
    # Gemma, Gemma 2 and Gemma 3.
    ModelFamily(
        "gemma",
        tied=True,
        defaults={"head_dim": 256},
        recipe=PlainRecipe(norm="gemma", scaled_embedding=True),
        block=GEMMA,
    ),
    ModelFamily(
        "gemma2",
        norms=4,
        capped_attention=True,
        tied=True,
        defaults={"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
        block=LATER_GEMMA._replace(capped=True),
    ),
    ModelFamily(
        "gemma3_text",
        norms=4,
        head_norms="head",
        tied=True,
        block=LATER_GEMMA,
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            # That of all sizes but 1B, which states its own.
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    ),
    # OLMo and OLMoE: without weights in its norms; from OLMo 2 on with norms after attention and MLP.
    ModelFamily("olmo", norms=0, final_norm=False, plain_logits=True),
    ModelFamily(
        "olmo2",
        head_norms="width",
        recipe=PlainRecipe(norm="olmo2", norm_after=True),
        block=NORMS_AFTER,
        plain_logits=True,
    ),
    ModelFamily("olmoe", head_norms="width"),
    ModelFamily(
        "olmo3",
        head_norms="width",
        block=NORMS_AFTER,
        plain_logits=True,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    # Cohere: attention and MLP next to each other behind one norm of mean and variance, scaled logits.
    ModelFamily("cohere", norms=1, tied=True, block=COHERE),
    ModelFamily(
        "cohere2",
        norms=1,
        tied=True,
        block=COHERE,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    # StarCoder 2: layer norms and linear layers with biases, no gate in the MLP.
    ModelFamily(
        "starcoder2",
        linears=lambda w: {
            **query_key_value(w),
            "o_proj": (w.q, w.hidden),
            "c_fc": (w.hidden, w.inner),
            "c_proj": (w.inner, w.hidden),
        },
        norm_bias=True,
        biased=(*QKV, "o_proj", "c_fc", "c_proj"),
        bias_switch="use_bias",
        tied=True,
        block=BlockLayout(
            gate_up=("mlp.c_fc",),
            down="mlp.c_proj",
            norm="layer",
            activation="gelu_pytorch_tanh",
            gated=False,
        ),
        plain_logits=True,
    ),
    # Phi (one norm in front of attention and MLP, no gate) and Phi 3 (fused products).
    ModelFamily(
        "phi",
        linears=lambda w: {
            **query_key_value(w),
            "dense": (w.q, w.hidden),
            "fc1": (w.hidden, w.inner),
            "fc2": (w.inner, w.hidden),
        },
        norms=1,
        norm_bias=True,
        biased=(*QKV, "dense", "fc1", "fc2"),
        head_bias=True,
    ),
    ModelFamily(
        "phi3",
        linears=lambda w: {
            "qkv_proj": (w.hidden, w.q + 2 * w.kv),
            "o_proj": (w.q, w.hidden),
            "gate_up_proj": (w.hidden, 2 * w.inner),
            "down_proj": (w.inner, w.hidden),
        },
        recipe=PlainRecipe(fused=True),
        block=BlockLayout(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        plain_logits=True,
    ),
    # GPT-2 and GPT-NeoX: fused queries, keys and values, no gate in the MLP.
    ModelFamily(
        "gpt_neox",
        linears=lambda w: {
            "query_key_value": (w.hidden, 3 * w.hidden),
            "dense": (w.hidden, w.hidden),
            "dense_h_to_4h": (w.hidden, w.inner),
            "dense_4h_to_h": (w.inner, w.hidden),
        },
        norm_bias=True,
        biased=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        plain_logits=True,
    ),
    ModelFamily(
        "gpt2",
        linears=lambda w: {
            "c_attn": (w.hidden, 3 * w.hidden),
            "attn.c_proj": (w.hidden, w.hidden),
            "c_fc": (w.hidden, w.inner),
            "mlp.c_proj": (w.inner, w.hidden),
        },
        norm_bias=True,
        biased=("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
        positions=True,
        tied=True,
        plain_logits=True,
    ),
)
