"""GGUF metadata -> the config.json that the checkpoint's family reads, as Hugging Face's original has it.

Invariant: a key that changes what is computed is translated or refused by name; keys of the architecture that are not known are handed on
under their own name, so that they are reported like unknown keys of a config.json. llama.cpp's reading of the keys is followed, where it
and `transformers` differ too. It imports no torch.
"""

from collections.abc import Callable
from typing import Any

from model.checkpoint.config import Config, short
from model.checkpoint.gguf.split import GGUF
from model.spec import CheckpointError

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
ROTARY_FACTORS = (FREQUENCIES, LONG, SHORT)
"""Tensors that hold no weights, but the divisors of rotary frequencies."""
SCALED = ("deepseek2", "llama", "minicpm3")
"""The architectures that may have them."""
_HARMLESS = ("rope.scaling.finetuned", "vocab_size")
_NEUTRAL = """
rope.scale_linear 1  attention.max_alibi_bias 0  attention.clamp_kqv 0  attention.temperature_scale 0  attention.temperature_length 0
attention.scale 0  attention.causal 1  embedding_scale 0  residual_scale 0  logit_scale 0  nextn_predict_layers 0  pooling_type 0
use_parallel_residual 0  rope.scaling.yarn_ext_factor 1  rope.scaling.yarn_attn_factor 1
"""
"""Keys that change what is computed, with the value that changes nothing; others are refused."""


class Metadata(Config):
    """The keys of an architecture, read by their names after the dot. `tensors`: those of the checkpoint."""

    def __init__(self, gguf: GGUF, architecture: str) -> None:
        prefix = f"{architecture}."
        super().__init__(
            {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}, str(gguf.path)
        )
        self.gguf, self.tensors, self.architecture = gguf, gguf.tensors, architecture
        self.prefix = prefix

    def wrong(self, key: str, expected: str) -> CheckpointError:
        found = f"found {short(self.values[key])}" if key in self.values else "and is missing"
        return CheckpointError(f"{self.path}: {self.prefix}{key} must be {expected}, {found}")

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return name in self.tensors

    def rows(self, name: str) -> int:
        """The length of a tensor's outermost axis. Raises CheckpointError if there is no such tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: missing tensor {name}")
        return self.tensors[name].entries[name].shape[0]

    def factors(self, name: str) -> list[float]:
        """The divisors of rotary frequencies that a tensor holds."""
        return self.tensors[name].floats(name)


def config_of(gguf: GGUF) -> dict[str, Any]:
    """The config.json of a GGUF checkpoint, without ids of tokens. Raises CheckpointError naming the file and the key that does not fit."""
    general = Config(gguf.metadata, str(gguf.path))
    general.only("general.type", "model", why="expected a model")
    general.only("general.quantization_version", 2, why="expected 2; convert the model again")
    architecture = general.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        supported = ", ".join(sorted(_FAMILIES))
        raise CheckpointError(f"{gguf.path}: general.architecture is {short(architecture)}; supported: {supported}")
    metadata = Metadata(gguf, architecture)
    for key, neutral in zip(_NEUTRAL.split()[::2], _NEUTRAL.split()[1::2], strict=True):
        if (value := metadata.get(key)) is not None and value != int(neutral):
            raise metadata.wrong(key, f"{neutral}: onehead serves no other")
    config = _FAMILIES[architecture](metadata)
    for key in _HARMLESS:
        metadata.get(key)
    unknown = {metadata.prefix + key: metadata.values[key] for key in metadata.unread()}
    plain = {key: value if isinstance(value, bool | int | float | str) else list(value)[:8] for key, value in unknown.items()}
    dtype = _DTYPES.get(gguf.tensors[EMBEDDING].entries[EMBEDDING].dtype, "float32")
    return config | {"torch_dtype": dtype, "tie_word_embeddings": not metadata.has(HEAD)} | plain


def _sizes(metadata: Metadata, **names: str) -> dict[str, Any]:
    """What every architecture has; `names`: config keys that are not called as Llama's."""
    sizes = {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.layers("block_count"),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "max_position_embeddings": metadata.integer("context_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "vocab_size": metadata.rows(EMBEDDING),
    }
    return {names.get(key, key): value for key, value in sizes.items()}


def _one_head(metadata: Metadata, sizes: dict[str, Any]) -> dict[str, Any]:
    """The keys of multi-query attention: one key/value head, as wide for keys as for values and rotated whole."""
    heads = sizes["num_attention_heads"]
    metadata.one_key_value_head("attention.head_count_kv", heads, convertible=False)
    width = metadata.columns("attention.key_length", max(1, sizes["hidden_size"] // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.columns(key, width) != width:
            raise metadata.wrong(key, f"attention.key_length, {width}: onehead serves keys and values of one width, rotated whole")
    return {"num_key_value_heads": 1, "head_dim": width, "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}


def _rotary(metadata: Metadata, context: int) -> dict[str, Any]:
    """RoPE's base and scaling as `rope_parameters`."""
    kind = metadata.get("rope.scaling.type") or "none"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    original = metadata.integer("rope.scaling.original_context_length", context)
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    factors = {name: metadata.factors(name) for name in ROTARY_FACTORS if metadata.has(name) and metadata.architecture in SCALED}
    if factors:
        if kind not in ("none", "longrope") or sorted(factors) not in ([FREQUENCIES], [LONG, SHORT]):
            raise CheckpointError(f"{metadata.path}: tensors {', '.join(factors)} with rope.scaling.type {short(kind)} have no meaning")
        reach = context if FREQUENCIES in factors else original
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": reach, "attention_factor": attention, "factor": 1.0}
        return rope | {
            "short_factor": factors.get(SHORT, factors.get(FREQUENCIES)),
            "long_factor": factors.get(LONG, factors.get(FREQUENCIES)),
        }
    if attention != 1.0:
        raise metadata.wrong("rope.scaling.attn_factor", "1")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        return rope | _yarn(metadata, original)
    if kind != "none":
        raise metadata.wrong("rope.scaling.type", "one of none, linear, yarn and, with its tensors, longrope")
    metadata.get("rope.scaling.factor")
    return rope


def _yarn(metadata: Metadata, original: int) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": metadata.number("rope.scaling.factor"), "original_max_position_embeddings": original}
    fast, slow = (metadata.number(f"rope.scaling.yarn_beta_{key}", default) for key, default in (("fast", 32.0), ("slow", 1.0)))
    return scaling | {"beta_fast": fast, "beta_slow": slow}


def _biased(metadata: Metadata, name: str) -> bool:
    return metadata.has(f"blk.0.{name}.bias")


def _llama(metadata: Metadata) -> dict[str, Any]:
    for key in ("expert_count", "attention.sliding_window"):
        if metadata.integer(key, 0, least=0):
            raise metadata.wrong(key, "0: onehead does not serve that of a llama")
    return {"model_type": "llama", "mlp_bias": _biased(metadata, "ffn_up"), "hidden_act": "silu"} | _rotated(metadata)


def _rotated(metadata: Metadata) -> dict[str, Any]:
    """Sizes, the one head, and what rotates it."""
    sizes = _sizes(metadata)
    more = {"attention_bias": _biased(metadata, "attn_q"), "rope_parameters": _rotary(metadata, sizes["max_position_embeddings"])}
    return sizes | _one_head(metadata, sizes) | more


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"} | _rotated(metadata)


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Windowed layers have a rotary base of their own and no scaling, as llama.cpp has it."""
    config, window = _rotated(metadata), metadata.integer("attention.sliding_window", 0, least=0)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    caps = {key: metadata.get(key) or None for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return (
        config
        | caps
        | {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config["head_dim"],
            "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
            "layer_types": _layer_types(metadata, config["num_hidden_layers"], window),
            "sliding_window": window or 1,
        }
    )


def _layer_types(metadata: Metadata, num_layers: int, window: int) -> list[str]:
    """The kind of each layer: by a list of booleans that are true for a window, or with full attention in every n-th layer."""
    key = "attention.sliding_window_pattern"
    pattern = metadata.get(key)
    if pattern is None or type(pattern) is int:
        every = metadata.integer(key, 6)
        windowed = [(layer + 1) % every != 0 for layer in range(num_layers)]
    elif isinstance(pattern, str | float | bool) or len(pattern) != num_layers:
        raise metadata.wrong(key, f"a number of layers or {num_layers} booleans")
    else:
        windowed = [bool(item) for item in pattern]
    return ["sliding_attention" if window and found else "full_attention" for found in windowed]


def _starcoder(metadata: Metadata) -> dict[str, Any]:
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner"}
    sizes = _sizes(metadata, **names, max_position_embeddings="n_positions")
    metadata.one_key_value_head("attention.head_count_kv", sizes["n_head"], convertible=False)
    epsilon = metadata.number("attention.layer_norm_epsilon")
    more = {"multi_query": True, "layer_norm_epsilon": epsilon, "activation_function": "gelu_pytorch_tanh"}
    return {"model_type": "gpt_bigcode"} | sizes | more


def _falcon(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("tensor_data_layout") not in (None, "jploski"):
        raise metadata.wrong("tensor_data_layout", "jploski")
    sizes = _sizes(metadata, intermediate_size="ffn_hidden_size")
    metadata.one_key_value_head("attention.head_count_kv", sizes["num_attention_heads"], convertible=False)
    newer = metadata.has("blk.0.attn_norm_2.weight")
    more = {
        "new_decoder_architecture": newer,
        "num_kv_heads": 1,
        "multi_query": True,
        "parallel_attn": True,
        "bias": _biased(metadata, "attn_qkv"),
        "activation": "gelu",
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "rope_parameters": _rotary(metadata, sizes["max_position_embeddings"]),
    }
    return {"model_type": "falcon"} | sizes | more


def _latent(metadata: Metadata, sizes: dict[str, Any]) -> dict[str, Any]:
    """The keys of multi-head latent attention. Files in which it has been absorbed give the widths of the heads under other names."""
    metadata.get("attention.head_count_kv")  # Of how llama.cpp computes it.
    mla = "_mla" if metadata.get("attention.key_length_mla") is not None else ""
    for key in ("attention.key_length", "attention.value_length"):
        metadata.get(key)
    rotary_dim = metadata.columns("rope.dimension_count")
    width = metadata.columns(f"attention.key_length{mla}")
    if width <= rotary_dim:
        raise metadata.wrong(f"attention.key_length{mla}", f"above rope.dimension_count, {rotary_dim}")
    has_rank = metadata.get("attention.q_lora_rank") is not None
    default = max(1, sizes["hidden_size"] // sizes["num_attention_heads"])
    return {
        "q_lora_rank": metadata.columns("attention.q_lora_rank") if has_rank else None,
        "kv_lora_rank": metadata.columns("attention.kv_lora_rank"),
        "qk_nope_head_dim": width - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": metadata.columns(f"attention.value_length{mla}", default),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "num_key_value_heads": sizes["num_attention_heads"],
        "hidden_act": "silu",
    }


def _deepseek(metadata: Metadata) -> dict[str, Any]:
    sizes = _sizes(metadata)
    gating = metadata.integer("expert_gating_func", 1, least=0, most=2)  # 0: not said.
    is_v3 = gating == 2
    rope = _rotary(metadata, sizes["max_position_embeddings"])
    multiplier = metadata.number("rope.scaling.yarn_log_multiplier", 0.0) if metadata.get("rope.scaling.yarn_log_multiplier") else 0.0
    if rope["rope_type"] == "yarn":
        # A tenth of mscale_all_dim; the rotation itself is not scaled.
        rope |= {"mscale_all_dim": round(10 * multiplier, 6), "attention_factor": 1.0} if multiplier else {"attention_factor": 1.0}
    more = {"attention_bias": _biased(metadata, "attn_kv_a_mqa"), "num_nextn_predict_layers": 0, "rope_parameters": rope}
    return (
        {"model_type": "deepseek_v3" if is_v3 else "deepseek_v2"}
        | sizes
        | _latent(metadata, sizes)
        | more
        | _experts(metadata, is_v3, sizes)
    )


def _experts(metadata: Metadata, is_v3: bool, sizes: dict[str, Any]) -> dict[str, Any]:
    """Routing and sizes of a mixture of experts; without experts every layer is dense."""
    keys = ("expert_used_count", "expert_feed_forward_length", "expert_shared_count", "expert_weights_norm", "leading_dense_block_count")
    for key in (*keys, "expert_weights_scale", "expert_group_count", "expert_group_used_count"):
        metadata.get(key)
    if not metadata.integer("expert_count", 0, least=0):
        return {"first_k_dense_replace": sizes["num_hidden_layers"], "num_experts_per_tok": 1}
    groups = metadata.integer("expert_group_count", 1, least=0) or 1
    method = "noaux_tc" if is_v3 else "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, least=0),
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0, least=0),
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", 1, least=0) or 1,
        "topk_method": method,
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) if metadata.get("expert_weights_scale") else 1.0,
    }


def _minicpm3(metadata: Metadata) -> dict[str, Any]:
    """The scales of embedding, residual branches and logits are constants in llama.cpp, and in no file."""
    sizes = _sizes(metadata)
    scales = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
    bias = {"attention_bias": _biased(metadata, "attn_q_a"), "mlp_bias": _biased(metadata, "ffn_up")}
    rope = {"rope_parameters": _rotary(metadata, sizes["max_position_embeddings"])}
    return {"model_type": "minicpm3"} | sizes | _latent(metadata, sizes) | scales | bias | rope


_FAMILIES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "deepseek2": _deepseek,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma3": _gemma3,
    "llama": _llama,
    "minicpm3": _minicpm3,
    "starcoder": _starcoder,
}
