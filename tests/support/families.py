"""Five tiny random checkpoints of every family, written by `transformers`, with a tokenizer of the
kind that the family has.

Dimensions are unusual on purpose: odd numbers of heads, heads wider than the model, windows that
are no multiple of a page.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ORACLE = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
YARN_DEEPSEEK = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "factor": 40.0}


def longrope(pairs: int) -> dict[str, Any]:
    factors = [1.0 + 0.1 * i for i in range(pairs)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [2 * f for f in factors],
        "original_max_position_embeddings": 512,
    }


def falcon(hidden: int, heads: int, layers: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
    }
    return (
        {
            "model_type": "falcon",
            "multi_query": True,
            "eos_token_id": 0,
            "bos_token_id": 0,
            "max_position_embeddings": 512,
        }
        | sizes
        | more
    )


def llama_like(
    kind: str, hidden: int, heads: int, layers: int, vocab: int, mlp: int, **more: Any
) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
    }
    sizes |= {"intermediate_size": mlp, "max_position_embeddings": 512}
    # transformers expands the latent to one key/value head per query head; its default number of
    # them is a published model's.
    head = {"num_key_value_heads": heads if "latent" in more else 1}
    more.pop("latent", None)
    return (
        {"model_type": kind, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
        | sizes
        | head
        | more
    )


def latent(
    rank: int, query_rank: int | None, plain: int, rotary: int, value: int
) -> dict[str, Any]:
    sizes = {
        "kv_lora_rank": rank,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
    }
    return {"latent": True} | sizes


def experts(
    first: int, count: int, chosen: int, size: int, shared: int, **more: Any
) -> dict[str, Any]:
    sizes = {
        "first_k_dense_replace": first,
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
    }
    return sizes | {"moe_intermediate_size": size, "n_shared_experts": shared} | more


def bigcode(embedding: int, heads: int, layers: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "n_embd": embedding,
        "n_head": heads,
        "n_layer": layers,
        "vocab_size": vocab,
        "n_positions": 512,
    }
    return (
        {"model_type": "gpt_bigcode", "multi_query": True, "bos_token_id": 0, "eos_token_id": 0}
        | sizes
        | more
    )


def youtu(*sizes: int, **more: Any) -> dict[str, Any]:
    # transformers 5.23 sets the embedding of a padding token to 0 when it loads one.
    return llama_like("youtu", *sizes, **(more | {"pad_token_id": None}))


LOCAL, GLOBAL = "sliding_attention", "full_attention"


def gemma4(
    hidden: int, heads: int, types: str, vocab: int, mlp: int, shared: int, **more: Any
) -> dict[str, Any]:
    """`types`: L for each layer with a window, G for one with full attention; the last `shared` of
    them read keys and values of others.
    """
    kinds = [LOCAL if kind == "L" else GLOBAL for kind in types]
    given = {"layer_types": kinds, "num_kv_shared_layers": shared}
    given |= {"vocab_size_per_layer_input": vocab}
    return llama_like("gemma4_text", hidden, heads, len(types), vocab, mlp, **(given | more))


CONFIGS: dict[str, list[dict[str, Any]]] = {
    "falcon": [
        falcon(142, 71, 2, 320),
        falcon(96, 3, 3, 301, parallel_attn=False, bias=True),
        falcon(80, 5, 2, 333, bias=True, ffn_hidden_size=100, tie_word_embeddings=False),
        falcon(64, 4, 2, 399, new_decoder_architecture=True, num_kv_heads=1),
        falcon(
            72,
            9,
            3,
            300,
            new_decoder_architecture=True,
            num_kv_heads=1,
            num_ln_in_parallel_attn=1,
            rope_parameters=LINEAR,
        ),
    ],
    "gemma": [
        llama_like("gemma", 48, 3, 2, 301, 90, head_dim=32),
        llama_like("gemma", 64, 8, 2, 333, 128, head_dim=256),
        llama_like("gemma", 40, 1, 3, 300, 64, head_dim=6, attention_bias=True),
        llama_like(
            "gemma",
            56,
            7,
            4,
            310,
            33,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
        llama_like(
            "gemma", 32, 2, 2, 499, 70, head_dim=24, tie_word_embeddings=False, hidden_act="gelu"
        ),
    ],
    "gemma3_text": [
        llama_like(
            "gemma3_text",
            48,
            4,
            6,
            301,
            90,
            head_dim=32,
            sliding_window=33,
            query_pre_attn_scalar=32,
        ),
        llama_like(
            "gemma3_text",
            40,
            5,
            4,
            333,
            64,
            head_dim=16,
            sliding_window=7,
            layer_types=[LOCAL, GLOBAL, LOCAL, GLOBAL],
        ),
        llama_like(
            "gemma3_text",
            36,
            3,
            7,
            300,
            33,
            head_dim=12,
            sliding_window=64,
            query_pre_attn_scalar=7,
        ),
        llama_like(
            "gemma3_text",
            64,
            4,
            3,
            310,
            128,
            head_dim=256,
            sliding_window=16,
            layer_types=[LOCAL] * 3,
            attention_bias=True,
        ),
        llama_like(
            "gemma3_text",
            32,
            1,
            2,
            499,
            70,
            head_dim=24,
            sliding_window=100,
            layer_types=[GLOBAL] * 2,
            tie_word_embeddings=False,
        ),
    ],
    "gemma4_text": [
        gemma4(
            48,
            4,
            "LLLLG" * 3,
            301,
            90,
            8,
            head_dim=16,
            global_head_dim=32,
            sliding_window=33,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            final_logit_softcapping=30.0,
        ),
        gemma4(
            40,
            5,
            "LGLG",
            333,
            64,
            0,
            head_dim=16,
            global_head_dim=48,
            sliding_window=7,
            # transformers 5.23 cannot combine this with layers that share keys and values.
            hidden_size_per_layer_input=0,
        ),
        gemma4(
            36,
            3,
            "LLLGLG",
            300,
            33,
            2,
            head_dim=12,
            global_head_dim=20,
            sliding_window=64,
            hidden_size_per_layer_input=5,
            vocab_size_per_layer_input=340,
            final_logit_softcapping=5.0,
        ),
        gemma4(
            64,
            1,
            "GGLGLLG",
            310,
            128,
            4,
            head_dim=64,
            global_head_dim=128,
            sliding_window=16,
            hidden_size_per_layer_input=16,
            attention_bias=True,
            use_double_wide_mlp=True,
            tie_word_embeddings=False,
        ),
        gemma4(
            32,
            2,
            "GGG",
            499,
            70,
            2,
            head_dim=24,
            global_head_dim=24,
            hidden_size_per_layer_input=3,
            final_logit_softcapping=30.0,
            rope_parameters={
                GLOBAL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 100.0,
                    "factor": 4.0,
                },
                LOCAL: {"rope_type": "default", "rope_theta": 300.0},
            },
        ),
    ],
    "llama": [
        llama_like("llama", 48, 3, 2, 301, 90),
        llama_like(
            "llama", 80, 5, 3, 333, 64, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        llama_like("llama", 60, 2, 2, 300, 33, head_dim=64, rope_parameters=LLAMA3),
        llama_like("llama", 56, 7, 4, 310, 128, rope_parameters=YARN),
        llama_like(
            "llama",
            32,
            1,
            2,
            499,
            70,
            head_dim=24,
            rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
        ),
    ],
    "mistral": [
        llama_like("mistral", 48, 3, 2, 301, 90, sliding_window=9),
        llama_like("mistral", 80, 5, 3, 333, 64, sliding_window=None),
        llama_like("mistral", 60, 2, 2, 300, 33, head_dim=64, sliding_window=65),
        llama_like("mistral", 56, 7, 4, 310, 128, sliding_window=16, tie_word_embeddings=True),
        llama_like("mistral", 32, 1, 2, 499, 70, head_dim=24, sliding_window=2),
    ],
    "santacoder": [
        bigcode(64, 4, 2, 301),
        bigcode(96, 3, 3, 333, activation_function="gelu"),
        bigcode(60, 5, 2, 300, n_inner=100),
        bigcode(56, 7, 4, 310),
        bigcode(48, 1, 2, 499, n_inner=70, activation_function="relu"),
    ],
    "deepseek_v2": [
        llama_like(
            "deepseek_v2",
            64,
            4,
            3,
            301,
            90,
            **latent(24, None, 12, 8, 20),
            **experts(1, 6, 2, 33, 2),
        ),
        llama_like(
            "deepseek_v2", 48, 3, 2, 333, 64, **latent(16, 20, 10, 6, 16), **experts(9, 4, 2, 16, 1)
        ),
        llama_like(
            "deepseek_v2",
            60,
            5,
            3,
            300,
            33,
            **latent(32, 12, 16, 4, 8),
            **experts(0, 8, 3, 20, 1),
            rope_parameters=YARN_DEEPSEEK,
        ),
        llama_like(
            "deepseek_v2",
            56,
            7,
            2,
            310,
            128,
            **latent(40, None, 24, 16, 24),
            **experts(0, 12, 3, 10, 3, n_group=4, topk_group=2),
            topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
        ),
        llama_like(
            "deepseek_v2",
            32,
            1,
            2,
            499,
            70,
            **latent(512, None, 32, 64, 32),
            **experts(1, 3, 1, 12, 1),
            tie_word_embeddings=True,
        ),
    ],
    "deepseek_v3": [
        llama_like(
            "deepseek_v3",
            64,
            4,
            3,
            301,
            90,
            **latent(24, None, 12, 8, 20),
            **experts(1, 8, 2, 33, 1, n_group=2, topk_group=1),
        ),
        llama_like(
            "deepseek_v3",
            48,
            3,
            2,
            333,
            64,
            **latent(16, 20, 10, 6, 16),
            **experts(9, 16, 8, 16, 1),
        ),
        llama_like(
            "deepseek_v3",
            60,
            5,
            3,
            300,
            33,
            **latent(32, 12, 16, 4, 8),
            **experts(0, 8, 3, 20, 2, n_group=4, topk_group=2),
            rope_parameters=YARN_DEEPSEEK,
        ),
        llama_like(
            "deepseek_v3",
            56,
            7,
            2,
            310,
            128,
            **latent(40, None, 24, 16, 24),
            **experts(0, 12, 3, 10, 3, n_group=1, topk_group=1),
            rope_interleave=False,
            norm_topk_prob=False,
        ),
        llama_like(
            "deepseek_v3",
            32,
            1,
            2,
            499,
            70,
            **latent(512, 40, 32, 64, 32),
            **experts(1, 4, 1, 12, 1, n_group=1, topk_group=1),
            attention_bias=True,
        ),
    ],
    "youtu": [
        youtu(64, 4, 3, 301, 90, **latent(24, None, 12, 8, 20)),
        youtu(48, 3, 2, 333, 64, **latent(16, 20, 10, 6, 16), rope_interleave=False),
        youtu(60, 5, 3, 300, 33, **latent(32, 12, 16, 4, 8), attention_bias=True),
        youtu(
            56,
            7,
            2,
            310,
            128,
            **latent(40, None, 24, 16, 24),
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1.6e6},
        ),
        youtu(32, 1, 2, 499, 70, **latent(512, 40, 32, 64, 32)),
    ],
    "minicpm3": [
        llama_like("minicpm3", 64, 4, 3, 301, 90, **latent(24, None, 12, 8, 20), dim_model_base=32),
        llama_like(
            "minicpm3",
            48,
            3,
            2,
            333,
            64,
            **latent(16, 20, 10, 6, 16),
            scale_emb=3,
            dim_model_base=48,
        ),
        llama_like(
            "minicpm3",
            60,
            5,
            3,
            300,
            33,
            **latent(32, 12, 16, 4, 8),
            rope_parameters=longrope(2),
            scale_depth=2.0,
        ),
        llama_like(
            "minicpm3",
            56,
            7,
            4,
            310,
            128,
            **latent(40, None, 24, 16, 24),
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        llama_like("minicpm3", 32, 1, 2, 499, 70, **latent(256, 40, 32, 32, 32), mlp_bias=True),
    ],
}
BYTE_LEVEL = {
    "falcon": (),
    "santacoder": ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
    "deepseek_v2": (),
    "deepseek_v3": (),
}
DEEPSEEK_MARKS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")  # noqa: RUF001  (so they are written)
GEMMA_MARKS = ("<start_of_turn>", "<end_of_turn>")


@dataclass(frozen=True)
class FamilyCheckpoint:
    """A folder, and the model that `transformers` loads from it (for santacoder: the same weights
    in its own layout).
    """

    family: str
    number: int
    folder: Path
    oracle_folder: Path

    @property
    def vocab_size(self) -> int:
        return int(CONFIGS[self.family][self.number]["vocab_size"])

    @cached_property
    def oracle(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.oracle_folder, **ORACLE).eval()


def make_family_checkpoint(family: str, number: int, folder: Path) -> FamilyCheckpoint:
    """Writes one of CONFIGS with random weights, spread enough that greedy choices are not ties."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(number)
    values = dict(CONFIGS[family][number])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif (
                not parameter.is_floating_point()
                or name.endswith("inv_freq")
                or parameter.ndim == 0
            ):
                continue
            elif parameter.ndim == 1:  # Biases and norms, so that none can be forgotten unnoticed.
                parameter.add_(torch.randn_like(parameter) * 0.1)
                if family == "gemma4_text" and name.endswith("q_norm.weight"):
                    # Scores are not scaled otherwise: a query would see one key only.
                    parameter.mul_(len(parameter) ** -0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.2 * parameter.shape[-1] ** -0.5)
    oracle_folder = folder / "oracle" if family == "santacoder" else folder
    model.save_pretrained(oracle_folder)
    if family == "santacoder":
        _in_the_first_layout(oracle_folder, folder)
    _write_tokenizer(family, folder)
    return FamilyCheckpoint(family, number, folder, oracle_folder)


def _in_the_first_layout(source: Path, folder: Path) -> None:
    """gpt_bigcode weights in the layout of bigcode/santacoder: q_attn and kv_attn, transposed
    matrices, mask buffers.
    """
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadCustomModel"],
        "attention_head_type": "multiquery",
        "auto_map": {"AutoModelForCausalLM": "modeling_gpt2_mq.GPT2LMHeadCustomModel"},
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False,
    }
    del config["multi_query"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if ".attn.c_attn." in name:
            queries = config["n_embd"]
            for part, rows in (("q_attn", value[:queries]), ("kv_attn", value[queries:])):
                tensors[name.replace("c_attn", part)] = rows.T if rows.ndim == 2 else rows
        elif value.ndim == 2 and (".attn.c_proj." in name or ".mlp." in name):
            tensors[name] = value.T
        else:
            tensors[name] = value
    for layer in range(config["n_layer"]):
        tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )


def _write_tokenizer(family: str, folder: Path) -> None:
    if family in BYTE_LEVEL:
        tokenizer, names = _byte_level(family, BYTE_LEVEL[family])
    else:
        tokenizer, names = _pieces(family, GEMMA_MARKS if family.startswith("gemma") else ())
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names)
    )


def _byte_level(family: str, marks: tuple[str, ...]) -> tuple[Tokenizer, dict[str, str]]:
    """A byte-level BPE as GPT-2's; for DeepSeek every text begins with a BOS token."""
    deepseek = family.startswith("deepseek")
    begin, end = DEEPSEEK_MARKS if deepseek else ("<|endoftext|>", "<|endoftext|>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*dict.fromkeys(("<pad>", end, begin) if deepseek else (end,)), *marks]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x + 1\n"] * 4, trainer)
    if deepseek:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, 2)]
        )
    return tokenizer, {"bos_token": begin, "eos_token": end}


def _pieces(family: str, marks: tuple[str, ...]) -> tuple[Tokenizer, dict[str, str]]:
    """Pieces with a visible space and byte fallback, as in SentencePiece; every text begins with
    BOS.
    """
    gemma = family.startswith("gemma")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "</s>", "<s>"]
    letters = "abcdefghijklmnopqrstuvwxyz():\n▁"
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁f", "de"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab, [("▁", "f"), ("d", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        strip = decoders.Strip(" ", 1, 0)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*special, *marks)]
    )
    begin, end = ("<bos>", "<eos>") if gemma else ("<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, 2)]
    )
    return tokenizer, {"bos_token": begin, "eos_token": end, "unk_token": "<unk>"}
