"""`onehead plan`: what a checkpoint takes and how many sequences fit, from its config.json and,
where its weights are there, their headers. Of one with several key/value heads: what it takes as it
is, beside what it takes once `onehead convert` has made them one.

The arithmetic is the server's own: the decoder's parameters counted on shapes, the cache's layout,
the share of memory that the server takes. Where quantization is asked for and the weights are
there, it also measures perplexity. It knows no HTTP and no engine.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cache.pool import bytes_per_page
from commands.convert import convert
from commands.forms import ITEM_BYTES, bytes_of_more_heads, left_in_file, stored, weight_bytes
from commands.options import PlanOptions
from commands.perplexity import Measured, measure
from commands.progress import progress
from model.checkpoint.families import read_spec
from model.decoder import meta_decoder
from model.devices import device_class, find_device
from model.kv_layout import layout_of
from model.spec import CheckpointError, ModelSpec, OptionError

KV_ITEM_BYTES = ITEM_BYTES | {"fp8": 1}
NOT_QUANTIZED = "auto", "none", "all"
"""Values of --quantization for which memory is planned with weights in the dtype."""
BAR = 32
EXACT_WIDTH = 100
"""Columns that the bytes of the largest models need; a narrower terminal wraps their lines instead
of cutting figures off."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to say. Bytes are exact; `fit` is None where the weights alone are more than
    the memory given.
    """

    spec: ModelSpec
    """Of what is served: with one key/value head."""
    heads: int
    """Key/value heads of the checkpoint."""
    parameters: int
    weight_bytes: dict[str, int]
    weight_bytes_as_is: dict[str, int]
    """The same with the key/value heads that the checkpoint has."""
    kv_bytes_per_token: dict[str, dict[str, int]]
    """dtype -> bytes as multi_query, and as multi_head: with the checkpoint's key/value heads or,
    if it has one, one per query head."""
    device: str
    device_reason: str
    memory: int
    cache_share: float
    dtype: str
    quantization: str
    kv_dtype: str
    block_forms: dict[str, int]
    """Matrices by the format of their blocks, where they are held as in the file."""
    fit: list[dict[str, int]] | None
    """For each context how many sequences fit, and how many would with the key/value heads of
    multi_head."""
    num_left: int = 0
    """Parameters that stay in the checkpoint's file and are counted nowhere else."""

    def as_json(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        spec = self.spec
        return {
            "model_type": spec.model_type,
            "layers": spec.num_layers,
            "query_heads": spec.num_query_heads,
            "key_value_heads": self.heads,
            "compared_key_value_heads": self.compared_heads,
            "max_context": spec.max_positions,
            "parameters": self.parameters,
            "parameters_left_in_file": self.num_left,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_as_is": self.weight_bytes_as_is,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "device": self.device,
            "memory": self.memory,
            "cache_share": self.cache_share,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "kv_dtype": self.kv_dtype,
            "block_forms": self.block_forms,
            "sequences": self.fit,
        }

    @property
    def compared_heads(self) -> int:
        """The number of key/value heads that the plan for one head is compared with."""
        return self.heads if self.heads > 1 else self.spec.num_query_heads

    @property
    def weight_form(self) -> str:
        """What the weights are held in: one of `weight_bytes`."""
        return self.dtype if self.quantization in NOT_QUANTIZED else self.quantization


def make_plan(options: PlanOptions) -> Plan:
    """The plan of a folder. Raises CheckpointError, and OptionError for the memory of a GPU that is
    not here.
    """
    spec, heads = read_heads(options.model)
    device, reason, memory = _device(options)
    share = device_class(device).default_cache_share
    dtypes = device_class(device)().dtypes(options.dtype)
    compute, cache = (str(each).removeprefix("torch.") for each in (dtypes.compute, dtypes.cache))
    decoder = meta_decoder(spec)
    left = left_in_file(decoder, device)
    held = str(dtypes.matrices).removeprefix("torch.")
    mixed, blocks = dict[str, int](), Counter[str]()
    if dtypes.matrices is None:
        held, mixed, blocks = stored(
            options.model, decoder, options.quantization in ("auto", "all"), left
        )
    dtype = held if options.quantization in NOT_QUANTIZED else compute
    form = dtype if options.quantization in NOT_QUANTIZED else options.quantization
    kv_dtype = cache if options.cache_dtype == "auto" else options.cache_dtype
    kinds = compute, "float32" if device == "cpu" else None
    weights = weight_bytes(decoder, *kinds, left)
    weights = {name: count for name, count in weights.items() if name != "float16" or name == form}
    as_is = {
        name: count + bytes_of_more_heads(spec, heads, name, *kinds)
        for name, count in weights.items()
    } | mixed
    weights |= mixed
    free, free_as_is = (int((memory - counted[form]) * share) for counted in (weights, as_is))
    kv_bytes = {
        name: {
            "multi_query": spec.kv_bytes_per_token(size),
            "multi_head": _multi_head(spec, heads, size),
        }
        for name, size in KV_ITEM_BYTES.items()
        if name in (*weights, "fp8", kv_dtype)
    }
    room, itemsize = (free, free_as_is), KV_ITEM_BYTES[kv_dtype]
    fit = _fit(spec, heads, room, itemsize, options) if free > 0 else None
    counted = decoder.num_parameters, weights, as_is, kv_bytes
    return Plan(
        spec,
        heads,
        *counted,
        device,
        reason,
        memory,
        share,
        dtype,
        options.quantization,
        kv_dtype,
        blocks,
        fit,
        sum(parameter.numel() for parameter in left),
    )


def read_heads(folder: Path) -> tuple[ModelSpec, int]:
    """(spec with one key/value head, how many the folder has). Raises CheckpointError where neither
    the server nor `onehead convert` reads it.
    """
    try:
        return read_spec(folder), 1
    except CheckpointError as error:
        # Only after the server has refused it: convert's message about a folder that it cannot read
        # is about converting.
        try:
            pooled = convert.make_plan(folder)
        except CheckpointError:
            raise error from None
        return pooled.spec, pooled.num_heads


def _multi_head(spec: ModelSpec, heads: int, itemsize: int) -> int:
    """Bytes of K and V of a token with `Plan.compared_heads` key/value heads."""
    return (
        heads * spec.kv_bytes_per_token(itemsize)
        if heads > 1
        else spec.multi_head_bytes_per_token(itemsize)
    )


def _device(options: PlanOptions) -> tuple[str, str, int]:
    """(whose shares are taken, why, bytes of memory)."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = here if options.device == "auto" else options.device
    if options.memory is None and device == "cuda" and here == "cpu":
        raise OptionError(
            "device is cuda, and torch finds no GPU here whose memory it could take; give its "
            "--memory, like 80GiB"
        )
    found = (
        "torch finds a GPU here; --device cpu plans a CPU"
        if here == "cuda"
        else "torch finds no GPU here; --device cuda plans one"
    )
    reason = found if options.device == "auto" else "--device says so"
    return (
        device,
        reason,
        find_device(device).memory()[0] if options.memory is None else int(options.memory),
    )


def _fit(
    spec: ModelSpec, heads: int, left: tuple[int, int], itemsize: int, options: PlanOptions
) -> list[dict[str, int]]:
    """Sequences of each length that a cache holds: `left` bytes with one key/value head, and with
    those that it is compared with.
    """
    layout = layout_of(spec, options.page_size)
    page_bytes = bytes_per_page(layout, itemsize)
    # The same layout, windows and all, with pages as much larger as keys and values of more heads
    # make them.
    multi_head_bytes = (
        page_bytes * _multi_head(spec, heads, itemsize) // spec.kv_bytes_per_token(itemsize)
    )
    return [
        {
            "context": context,
            "multi_query": layout.sequences(left[0] // page_bytes, context, options.step_tokens),
            "multi_head": layout.sequences(
                max(0, left[1]) // multi_head_bytes, context, options.step_tokens
            ),
        }
        for context in spec.contexts()
    ]


def plan(options: PlanOptions) -> None:
    """Prints the plan of a folder. Raises CheckpointError."""
    made = make_plan(options)
    measured, reason = None, _unmeasured(made, options)
    if reason is None:
        with progress(transient=True) as shown:
            forms = _forms(made, options.dtype)
            measured = measure(options.model, made.spec, made.device, forms, options.text, shown)
    elif options.text is not None:
        raise OptionError(
            f"text {options.text} has no effect, as perplexity is not measured: {reason}"
        )
    if options.format == "json":
        print(
            json.dumps(
                made.as_json() | ({"perplexity": measured.as_json()} if measured else {}), indent=2
            )
        )
    else:
        console = Console(soft_wrap=True)
        console.width = max(console.width, EXACT_WIDTH)
        show(made, console, measured or reason or "")


def _unmeasured(made: Plan, options: PlanOptions) -> str | None:
    """Why perplexity is not measured; empty where it was not asked for, None where it is."""
    if made.quantization in ("auto", "none"):
        return ""
    if not any(path.suffix in (".safetensors", ".gguf") for path in options.model.iterdir()):
        return f"{options.model} has no weights"
    if made.heads > 1:
        return (
            f"the checkpoint has {made.heads} key/value heads; `onehead convert` makes one of them"
        )
    if made.device == "cuda" and not torch.cuda.is_available():
        return "the plan is for a GPU, and torch finds none here"
    return None


def _forms(made: Plan, dtype: str) -> dict[str, tuple[str, str]]:
    """(engine.dtype, quantization) of each form to be measured: every one, or the weights as they
    are beside the one that is planned. `dtype` is the option of the plan.
    """
    every = {
        form: (form, "none") if form in ITEM_BYTES else (dtype, form) for form in made.weight_bytes
    }
    every |= {made.dtype: (dtype, "auto" if made.quantization == "all" else "none")}
    return (
        every
        if made.quantization == "all"
        else {form: every[form] for form in (made.dtype, made.quantization)}
    )


def readable(count: float) -> str:
    """Bytes in the largest binary unit that gives at least 1."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {UNITS[unit]}"


def show(made: Plan, console: Console, measured: Measured | str) -> None:
    """The plan as text, with bars, and with perplexities or why there are none."""
    _show_model(made, console)
    console.print()
    forms = dict.fromkeys((*made.weight_bytes, *made.kv_bytes_per_token))
    table = Table("bytes", *forms, box=None, pad_edge=False)
    table.add_row("weights", *(f"{count:,}" for count in made.weight_bytes.values()))
    if made.heads > 1:
        table.add_row(
            f"with {made.heads} heads",
            *(f"{count:,}" for count in made.weight_bytes_as_is.values()),
        )
    for name, kind in (
        ("K, V of a token", "multi_query"),
        (f"with {made.compared_heads} heads", "multi_head"),
    ):
        kv_bytes = made.kv_bytes_per_token
        table.add_row(
            name, *(f"{kv_bytes[form][kind]:,}" if form in kv_bytes else "" for form in forms)
        )
    if isinstance(measured, Measured):
        _add_perplexity(table, list(made.weight_bytes), measured)
        notes = [f"on {measured.tokens:,} tokens of {measured.text}, on this machine"]
        notes += [f"not measured in {form}: {reason}" for form, reason in measured.refused.items()]
    else:
        notes = [f"not measured: {measured}"] if measured else []
    console.print(table)
    for note in notes:
        console.print(f"perplexity: {note}")
    _show_memory(made, console)


def _show_model(made: Plan, console: Console) -> None:
    spec = made.spec
    windows = [window for window in spec.windows if window is not None]
    seen = f", {len(windows)} of them with a window of {windows[0]} tokens" if windows else ""
    console.print(
        f"[bold]{spec.model_type}[/bold]: {made.parameters:,} parameters, {spec.num_layers} "
        f"layers{seen}"
    )
    kept = map(spec.kv_columns_of, range(spec.num_storing_layers))
    widths = " and ".join(dict.fromkeys(str(key) for key, _, _ in kept))
    heads = (
        f"{spec.num_query_heads} query heads, {made.heads} key/value "
        f"head{'s' if made.heads > 1 else ''} of {widths}"
    )
    console.print(
        f"{heads}{' (the value is its beginning)' if spec.latent else ''}; up to "
        f"{spec.max_positions:,} tokens"
    )
    if made.num_left:
        console.print(
            f"{made.num_left:,} of the parameters, a table, stay in the checkpoint's file, of "
            "which a step reads what its tokens need"
        )
    if made.heads > 1:
        console.print(
            "onehead serves one key/value head: planned as `onehead convert` makes it, beside the "
            "checkpoint as it is"
        )


def _add_perplexity(table: Table, forms: list[str], measured: Measured) -> None:
    """Rows of the perplexity of each form, and by how much it is above the first one's."""
    found = measured.perplexity
    first = next(iter(found), "")
    table.add_row("perplexity", *(f"{found[form]:.4f}" if form in found else "" for form in forms))
    table.add_row(
        f"over {first}",
        *(
            f"{found[form] / found[first] - 1:+.3%}" if form in found and form != first else ""
            for form in forms
        ),
    )


def _show_memory(made: Plan, console: Console) -> None:
    weights = made.weight_bytes[made.weight_form]
    rest = f"{made.cache_share:.0%} of the rest for the cache in {made.kv_dtype}"
    console.print(
        f"\nplanned for {'a CPU' if made.device == 'cpu' else 'a GPU'}: {made.device_reason}"
    )
    forms = " and ".join(
        f"{count} matrices in {form} blocks" for form, count in sorted(made.block_forms.items())
    )
    words = f"as in the file ({forms})" if forms else f"in {made.weight_form}"
    console.print(f"of {readable(made.memory)}: weights {readable(weights)} {words}, {rest}")
    if made.fit is None:
        fitting = [form for form, count in made.weight_bytes.items() if count < made.memory]
        way_out = (
            f"; they would in {', '.join(fitting)}: engine.dtype, engine.quantization"
            if fitting
            else ""
        )
        console.print(f"[red]the weights alone do not fit[/red]{way_out}")
        return
    filled = max(1, round(BAR * weights / made.memory))
    cache = round(BAR * made.cache_share * (made.memory - weights) / made.memory)
    console.print(
        f"[blue]{'█' * filled}[/blue][green]{'█' * cache}[/green]"
        f"[dim]{'░' * max(0, BAR - filled - cache)}[/dim]\n"
    )
    table = Table(
        "context",
        "sequences that fit",
        "",
        f"with {made.compared_heads} heads",
        box=None,
        pad_edge=False,
    )
    most = max(row["multi_query"] for row in made.fit) or 1
    for row in made.fit:
        ours, theirs = (round(BAR * row[kind] / most) for kind in ("multi_query", "multi_head"))
        bar = f"[dim]{'█' * min(ours, theirs)}[/dim][green]{'█' * max(0, ours - theirs)}[/green]"
        table.add_row(
            f"{row['context']:,}", f"{row['multi_query']:,}", bar, f"{row['multi_head']:,}"
        )
    console.print(table)
    console.print(
        "(a server computes engine.max_running of them together, by default 64 on a CPU and 256 "
        "on a GPU, and takes what those need)"
    )
