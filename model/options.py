"""EngineOptions: how a model is loaded and what its engine may hold. Plain data without torch,
which the API process sends to the engine.

The settings `engine.*` and `cache.*` (server/config.py) declare the same options with their bounds
and their help.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The fields have the options' names; cache.dtype is `cache_dtype`. The cache gets `pages`
    where given, else `memory`.
    """

    device: str
    dtype: str
    threads: int
    """Of a CPU; 0 leaves torch's number."""
    page_size: int
    pages: int | None
    memory: float | None
    """Bytes, or a share up to 1.0 of what is free; None for the device's default share."""
    max_context: int
    """Most tokens of a sequence. 0 stands for the checkpoint's number of positions, until the
    engine has read the checkpoint."""
    max_running: int
    step_tokens: int
    """The most tokens computed in one step. It also bounds how many pages layers with a window can
    use."""
    quantization: str = "none"
    deterministic: bool = False
    """Requires batch-invariant kernels: on a GPU products in slabs of one
    size."""
    cache_dtype: str = "auto"
    cache_disk: str = ""
    """Folder where blocks of the prefix cache are kept as files; empty for none."""
    cache_disk_size: float = 0.0
    """The most bytes of these files."""
    speculation: str = "none"
    draft: str = ""
    """Folder of the model that drafts tokens, with `speculation` draft."""
