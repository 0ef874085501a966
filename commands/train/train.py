"""`onehead train`: trains the serving decoder, a new small gpt_bigcode one or a checkpoint's, and
writes an ordinary checkpoint folder.

Hidden matrices are stepped by Muon, everything else by AdamW, both under one warm-up and cosine
schedule. Invariant: the parameters after step n depend on the options and the corpus alone, so a
resumed run ends with the same parameters as one that was never stopped.

Shape letters: B sequences, T tokens of a sequence, U = T + 1.
"""

import ctypes
import math
import sys
from collections.abc import Iterator

import numpy as np
import torch
from rich.progress import TextColumn
from tokenizers import Tokenizer
from torch import Tensor, nn

from commands import corpus
from commands.held_out import decoder_logits, held_out_rows, inputs_and_targets, losses
from commands.options import TrainOptions
from commands.pictures import MISSING, load_pyplot
from commands.progress import progress
from commands.train import uptrain
from commands.train.data import Corpus, Data, Step
from commands.train.export import export, plot_losses
from commands.train.loss import Loss
from commands.train.muon import Muon
from commands.train.precision import multiplies_bfloat16
from commands.train.state import TrainState, load_state, make_folder, save_state
from commands.train.twin import MultiHeadDecoder
from model.decoder import Decoder
from model.spec import ModelSpec, OptionError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""


def build_spec(options: TrainOptions, tokenizer: Tokenizer) -> ModelSpec:
    """The gpt_bigcode spec of these options."""
    head_dim, remainder = divmod(options.hidden_size, options.num_query_heads)
    if remainder:
        raise OptionError(
            f"hidden_size {options.hidden_size} is not a multiple of num_query_heads "
            f"{options.num_query_heads}"
        )
    return ModelSpec(
        model_type="gpt_bigcode",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_query_heads=options.num_query_heads,
        head_dim=head_dim,
        intermediate_size=options.intermediate_size or 4 * options.hidden_size,
        max_positions=options.max_positions,
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        attention_scale=head_dim**-0.5,
        tied_embeddings=True,
        end_token_ids=(corpus.token_id(tokenizer, corpus.END),),
    )


def new_model(options: TrainOptions, documents: list[corpus.Document]) -> tuple[Tokenizer, Decoder]:
    """A tokenizer of these documents, kept in options.work, and a decoder before its first step."""
    path = options.work / "tokenizer.json"
    if not path.exists():
        corpus.train_tokenizer((d.text for d in documents), options.vocab_size).save(str(path))
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    decoder = (Decoder if options.attention == "multi_query" else MultiHeadDecoder)(
        build_spec(options, tokenizer)
    )
    initialise(decoder, options.seed)
    return tokenizer, decoder


def initialise(decoder: Decoder, seed: int) -> None:
    """GPT-2's initialisation: normal(0.02), the projections into the residual stream divided by
    sqrt(2 * layers), biases 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 2:
            shrink = (
                math.sqrt(2 * decoder.spec.num_layers)
                if name.endswith(("attention.out.weight", "mlp.down.weight"))
                else 1.0
            )
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 / shrink)
        elif name.endswith("bias"):
            parameter.data.zero_()


def optimizers(decoder: Decoder, options: TrainOptions) -> tuple[torch.optim.Optimizer, ...]:
    """Muon (Jordan et al. 2024) for the blocks' matrices, at AdamW's update size; AdamW for
    embeddings, norms and biases.
    """
    matrices = [p for p in decoder.blocks.parameters() if p.ndim == 2]
    inner = set(matrices)
    embeddings = [p for p in decoder.parameters() if p.ndim == 2 and p not in inner]
    vectors = [p for p in decoder.parameters() if p.ndim == 1]
    muon = Muon(matrices, lr=options.learning_rate, weight_decay=options.weight_decay)
    groups = [
        {"params": embeddings, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return muon, torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up, then a cosine to a twentieth of the peak at the last step."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def loss_of(loss: Loss, step: Step) -> Tensor:
    """Mean cross-entropy in nats per token of one batch."""
    ids_BT, targets_BT = inputs_and_targets(torch.from_numpy(step.rows_BU).to(loss.device))
    length = ids_BT.shape[1]
    positions_BT = torch.from_numpy(step.first_position_B).to(loss.device)[:, None] + torch.arange(
        length, device=loss.device
    )
    return loss(ids_BT.flatten(), targets_BT.flatten(), positions_BT.flatten(), length)


def held_out_loss(decoder: Decoder, rows_BU: np.ndarray, device: str) -> float:
    """Nats per token of held-out sequences, computed as training computes them."""
    with torch.autocast(device, torch.bfloat16, enabled=multiplies_bfloat16(device)):
        return float(np.mean(list(losses(decoder_logits(decoder), rows_BU, device))))


def take_step(
    decoder: nn.Module, loss: Tensor, steppers: tuple[torch.optim.Optimizer, ...], rate: float
) -> None:
    """Backward, clip to norm 1, and step every optimizer at `rate`."""
    loss.backward()
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)


class Training:
    """One run: everything that `options` decide, and how far it is. Raises OptionError for unusable
    options.

    `documents` stand in for those of options.data where they are read already.
    """

    def __init__(
        self, options: TrainOptions, documents: list[corpus.Document] | None = None
    ) -> None:
        self.options = options
        self.device = (
            ("cuda" if torch.cuda.is_available() else "cpu")
            if options.device == "auto"
            else options.device
        )
        make_folder(options.work)
        self.corpus = Corpus(options, documents)
        self.tokenizer, self.decoder = (
            new_model(options, self.corpus.training)
            if options.init is None
            else uptrain.load(options, options.init)
        )
        self.decoder.to(self.device)
        self.held_out_rows = held_out_rows(
            self.corpus.held_out, self.tokenizer, self.decoder.spec.end_token_ids, options.sequence
        )
        self.steppers = optimizers(self.decoder, options)
        self.state = load_state(options, self.decoder, self.steppers)
        self.saved_step = self.state.step
        """The step of the state in options.work; 0 where there is none."""

    def run(self) -> Iterator[TrainState]:
        """Takes the steps that are left; the state after each. Saves and evaluates on the way."""
        options, state = self.options, self.state
        loss_function = Loss(
            self.decoder, self.device, "inductor" if self.device == "cuda" else None
        )
        for step in Data(options, self.decoder.spec, self.corpus, self.tokenizer).steps(state.step):
            loss = loss_of(loss_function, step)
            take_step(self.decoder, loss, self.steppers, learning_rate(state.step, options))
            state.step += 1
            state.losses.append(loss.item())
            if state.step % options.save_every == 0 or state.step == options.steps:
                state.held_out.append(
                    (state.step, held_out_loss(self.decoder, self.held_out_rows, self.device))
                )
                save_state(options, state, self.decoder, self.steppers)
                self.saved_step = state.step
            yield state


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory for the next allocation. A step frees and allocates about a
    gigabyte; returned to the system, it would be zeroed and mapped again page by page, a sixth of
    the step's time. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def train(options: TrainOptions) -> None:
    """Runs or resumes the training that `options` describe and writes options.output. Raises
    OptionError for unusable options.
    """
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    print("onehead train: preparing the corpus, the tokenizer and the model", file=sys.stderr)
    training = None
    try:
        training = Training(options)
        make_folder(options.output)
        if load_pyplot() is None:
            print(f"onehead train: loss.svg will not be written: {MISSING}", file=sys.stderr)
        _run(training)
    except KeyboardInterrupt:
        print(f"onehead train: {_kept(training)}", file=sys.stderr)
        raise


def _run(training: Training) -> None:
    """Takes the steps that are left under a progress bar, draws the losses at each save, and writes
    options.output.
    """
    options, rows_BU = training.options, None
    if options.init is not None:
        rows_BU = uptrain.yardstick(
            options.init, training.corpus.held_out, training.tokenizer, training.decoder.spec
        )
    losses = TextColumn("{task.fields[figures]}")
    with progress(losses) as shown:
        task = shown.add_task(
            "training",
            total=options.steps,
            completed=training.state.step,
            figures=figures(training.state),
        )
        for state in training.run():
            shown.update(task, completed=state.step, figures=figures(state))
            if state.held_out and state.held_out[-1][0] == state.step:
                plot_losses(options.work / "loss.svg", state)
    training.corpus.write_table(options.output, options.init)
    if options.init is None:
        export(options, training.decoder, training.tokenizer, training.state)
    else:
        uptrain.export(options.output, options.init, training.decoder, training.state, rows_BU)


def _kept(training: Training | None) -> str:
    """What is kept of a run that was interrupted."""
    if training is None:
        return "interrupted before the first step: nothing is kept"
    options, state = training.options, training.state
    if not training.saved_step:
        return (
            f"interrupted at step {state.step}, before the first save at step "
            f"{min(options.save_every, options.steps)}: nothing is kept"
        )
    kept = f"the state of step {training.saved_step} is kept in {options.work}"
    return f"interrupted at step {state.step}; {kept}, and the same command continues from it"


def figures(state: TrainState) -> str:
    """The losses as the progress bar shows them: each from when there is one."""
    parts = [f"loss {np.mean(state.losses[-20:]):.3f}"] if state.losses else []
    parts += [f"held-out {loss:.3f}" for _, loss in state.held_out[-1:]]
    return ", ".join(parts) + " nats/token" * bool(parts)
