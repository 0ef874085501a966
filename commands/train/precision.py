"""Where a processor multiplies bfloat16 natively, and where it would imitate it at a fraction of
float32's speed.
"""

import torch


def multiplies_bfloat16(device: str) -> bool:
    """Whether bfloat16 autocast pays: on every GPU, and on CPUs with instructions for it."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return device != "cpu" or bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
