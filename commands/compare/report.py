"""results.json to report.html: one self-contained page, pictures inline as SVG. Reads the results; measures and counts nothing."""

import html
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from commands.pictures import MISSING, load_pyplot

Results = dict[str, Any]
MIB = 2**20
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h1, h2 { line-height: 1.2 } table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left; font-weight: 600 }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .75rem; text-align: right } th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto } figure { margin: 1rem 0 } svg { max-width: 100%; height: auto } p.note { color: #555 }
"""


DECODE_NOTE = (
    "The dotted lines are the ratio of the bytes both sides read, weights and all: what a machine limited by memory alone would show. "
    "The paper's step of 12 times is a whole decoder with cross-attention at 128 sequences a core, where reading K and V was almost all "
    "there was to do. Where the measurement stays below its dotted line, arithmetic is the limit: the MLP's products, which both sides "
    "do alike, grow with the batch, and attention with one head does its flops on 1/8 of the bytes."
)


def table(caption: str, head: list[str], rows: list[list[str]]) -> str:
    """An HTML table of text cells."""
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    inside = f"<caption>{html.escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody>"
    return f'<div class="wide"><table>{inside}</table></div>'


def picture(draw: Callable[[Any], None], title: str) -> str:
    """A matplotlib figure, drawn by `draw` on its axes, as an inline SVG; without matplotlib, a line that says so."""
    plt = load_pyplot()
    if plt is None:
        return f'<p class="note">{html.escape(title)}: no picture, as {html.escape(MISSING)}.</p>'
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    draw(axes)
    axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    label = html.escape(title, quote=True)
    return f'<figure role="img" aria-label="{label}">{svg[svg.index("<svg") :]}<figcaption>{html.escape(title)}</figcaption></figure>'


def memory_part(memory: list[Results]) -> list[str]:
    """The cache of known models."""
    models = [
        [
            row["name"],
            f"{row['mqa_bytes_per_token']:,}",
            f"{row['mha_bytes_per_token']:,}",
            f"{row['mqa_bytes_per_sequence'] / MIB:,.0f}",
            f"{row['mha_bytes_per_sequence'] / MIB:,.0f}",
            f"{row['ratio']:.0f}x",
        ]
        for row in memory
    ]
    context = memory[0]["context"]
    head = ["model", "MQA B/token", "MHA B/token", f"MQA MiB at {context}", f"MHA MiB at {context}", "ratio"]

    def draw(axes: Any) -> None:
        for offset, kind in ((-0.2, "mha"), (0.2, "mqa")):
            values = [row[f"{kind}_bytes_per_sequence"] / MIB for row in memory]
            axes.bar([i + offset for i in range(len(values))], values, width=0.4, label=kind.upper())
        axes.set_xticks(range(len(memory)), [row["name"] for row in memory])
        axes.set(yscale="log", ylabel=f"MiB of cache at {context} tokens")
        axes.legend(frameon=False)

    return [
        "<h2>Memory</h2>",
        table("Key/value cache in bfloat16", head, models),
        picture(draw, "Cache of one sequence with a key/value head per query head, and with one"),
    ]


def decode_part(decode: list[Results]) -> list[str]:
    """Decode by batch and context, with the arithmetic beside the measurement."""
    rows = [
        [
            str(row["batch"]),
            str(row["context"]),
            *(f"{row[part][kind]['median_s'] * 1e3:.3f}" for part in ("attention", "layer") for kind in ("mha", "mqa")),
            f"{row['attention']['ratio']:.1f}x",
            f"{row['layer']['ratio']:.1f}x",
            *(f"{row[f'{kind}_kv_bytes'] / MIB:.1f}" for kind in ("mha", "mqa")),
        ]
        for row in decode
    ]
    head = [
        "batch",
        "context",
        "attention MHA ms",
        "MQA ms",
        "layer MHA ms",
        "MQA ms",
        "attention",
        "layer",
        "KV MiB MHA",
        "MQA",
    ]

    return [
        "<h2>Decode, multi-head against multi-query</h2>",
        picture(partial(_draw_ratios, decode), "One layer's decode step: how many times longer with a key/value head per query head"),
        f'<p class="note">{html.escape(DECODE_NOTE)}</p>',
        table("The paper's layer (d 1024, 8 heads of 128; MLP 4096 and 5440), float32, medians", head, rows),
    ]


def _draw_ratios(decode: list[Results], axes: Any) -> None:
    """MHA's layer time over MQA's by batch, and the same of the bytes they move."""
    for context in sorted({row["context"] for row in decode}):
        rows_at = [row for row in decode if row["context"] == context]
        batches = [row["batch"] for row in rows_at]
        (line,) = axes.plot(batches, [row["layer"]["ratio"] for row in rows_at], marker="o", label=f"measured, context {context}")
        bytes_of = {kind: [row[f"{kind}_kv_bytes"] + row[f"{kind}_weight_bytes"] for row in rows_at] for kind in ("mha", "mqa")}
        ratio = [a / b for a, b in zip(bytes_of["mha"], bytes_of["mqa"], strict=True)]
        axes.plot(batches, ratio, linestyle=":", color=line.get_color(), label=f"bytes moved, context {context}")
    axes.axhline(47 / 3.9, linewidth=0.8, color="black")
    axes.annotate("the paper's decoder step, 47 / 3.9 ms", (1, 47 / 3.9), va="bottom", fontsize=8)
    axes.set(xscale="log", xlabel="batch", ylabel="layer time, MHA over MQA")
    axes.legend(frameon=False, fontsize=7, ncols=2)


def quality_part(quality: Results) -> list[str]:
    """The twins: loss curves, held-out loss seed by seed, and the paper's own rows."""
    runs, sizes, paper = quality["runs"], quality["sizes"], quality["paper"]
    final = {(run["kind"], run["seed"]): run["held_out"][-1][1] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    rows = [
        [str(seed), f"{final['mha', seed]:.4f}", f"{final['mqa', seed]:.4f}", f"{final['mqa', seed] - final['mha', seed]:+.4f}"]
        for seed in seeds
    ]
    means, difference = quality["held_out_loss"], quality["difference"]
    spread = [f"{means[kind]['mean']:.4f} ± {means[kind]['stdev']:.4f}" for kind in ("mha", "mqa")]
    rows.append(["mean ± standard deviation", *spread, f"{difference['mean']:+.4f} ± {difference['stdev']:.4f}"])
    rows.append(["perplexity", *(f"{math.exp(means[kind]['mean']):.2f}" for kind in ("mha", "mqa")), ""])
    theirs = [f"{paper[kind]['ln_ppl']:.3f}" for kind in ("mha", "mqa")]
    rows.append([paper["task"], *theirs, f"+{paper['difference_ln_ppl']:.3f}"])
    parameters = {run["kind"]: (run["num_parameters"], run["intermediate_size"]) for run in runs}
    shape = "; ".join(f"{kind.upper()} {n:,} parameters, MLP {width}" for kind, (n, width) in parameters.items())

    def draw(axes: Any) -> None:
        for kind, colour in (("mha", "tab:blue"), ("mqa", "tab:orange")):
            for run in (run for run in runs if run["kind"] == kind):
                steps, losses = zip(*run["held_out"], strict=True)
                label = kind.upper() if run["seed"] == seeds[0] else None
                axes.plot(steps, losses, color=colour, marker="o", markersize=3, linewidth=1, alpha=0.8, label=label)
        held_out = [loss for run in runs for _, loss in run["held_out"]]
        axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(min(held_out) * 0.98, max(held_out) * 1.02))
        axes.legend(frameon=False)

    note = (
        f"{sizes['num_seeds']} seeds; hidden size {sizes['hidden_size']}, {sizes['num_layers']} layers, {sizes['num_heads']} heads, "
        f"{sizes['steps']} steps of {sizes['batch_tokens']} tokens of Python; {shape}. The paper's rows are of another task and size: "
        "compare the differences, not the losses."
    )
    return [
        "<h2>Quality: twins of equal size</h2>",
        picture(draw, "Held-out loss of every seed"),
        table("Held-out loss, nats per token", ["seed", "MHA", "MQA", "MQA - MHA"], rows),
        f'<p class="note">{html.escape(note)}</p>',
    ]


def page(results: Results) -> str:
    """The whole report."""
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    body = [
        "<h1>One head or many</h1>",
        f'<p class="note">{html.escape(machine)}</p>',
        *memory_part(results["memory"]),
        *decode_part(results["decode"]),
        *quality_part(results["quality"]),
    ]
    head = f'<meta charset="utf-8"><title>onehead compare</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'
