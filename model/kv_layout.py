"""Of a ModelSpec the CacheLayout: how its keys and values lie in pages."""

from cache.layout import CacheLayout, Columns
from model.spec import ModelSpec


def layout_of(spec: ModelSpec, page_size: int) -> CacheLayout:
    """The layout for pages of so many tokens."""
    columns = [Columns(*spec.kv_columns_of(layer)) for layer in range(spec.num_layers)]
    return CacheLayout.of(spec.num_layers, spec.windows, page_size, columns, spec.kv_sources)
