"""Trains the embedded model: `python -m evals.embedded_model.train --work-dir DIR [--minutes M]`.

Trains the tokenizer and a four-layer Qwen3 on the training half of `corpus`, measures perplexity on the
held-out half, and writes the model folder and `training.log`. Needs transformers, torch 2.9 (Muon), a C++
compiler for `torch.compile`, and no GPU. The schedule runs on the clock: learning rate and window length
follow the share of `--minutes` that has passed, so a slow machine ends on time with fewer steps. DIR keeps
a checkpoint; the same command resumes an interrupted run. On a machine that does other work as well, set
OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait for each other cost up to two thirds of the speed.
"""

import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from evals.embedded_model.bpe import END_OF_TEXT_ID, VOCAB_SIZE, save_tokenizer, train_tokenizer
from qconvert.demo import MODEL_DIR
from qconvert.demo.corpus import CorpusText, demo_documents, demo_text

CONTEXT: Final = 2048
SHORT_WINDOW: Final = 512
TOKENS_PER_STEP: Final = 2048
THREADS: Final = 2
SEED: Final = 0

# Muon on the layers' matrices: after 400,000 tokens it is 0.6 nats ahead of AdamW on everything.
MUON_LR: Final = 0.015
ADAMW_LR: Final = 0.003
# Shares of the run: warm-up, then cosine to zero; the last quarter sees whole contexts.
WARM_UP: Final = 0.02
LONG_WINDOWS_FROM: Final = 0.75
GOLDEN_RATIO: Final = (math.sqrt(5) - 1) / 2

SECONDS_BETWEEN_CHECKPOINTS: Final = 120.0
LOG_LINES: Final = 100

IDS = npt.NDArray[np.int64]
Optimizers = list[torch.optim.Optimizer]


@dataclass(slots=True)
class Progress:
    """What a resumed run continues from, besides the weights and the optimizer."""

    step: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a text and keep it for the log."""
        print(text, flush=True)
        self.log.append(text)


def model_config() -> dict[str, Any]:
    """config.json, in the spelling that every transformers release with Qwen3 reads.

    Rows of every linear (256, 256, 768) are multiples of 256, the super-block of GGUF's K-quants.
    """
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 768,
        "max_position_embeddings": CONTEXT,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": END_OF_TEXT_ID,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }


def token_stream(tokenizer: Tokenizer) -> IDS:
    """The training modules as one row of ids, each module closed by the end-of-text token."""
    parts = [[*tokenizer.encode(text).ids, END_OF_TEXT_ID] for text in demo_documents("train").values()]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def batch(stream: IDS, step: int, window: int) -> torch.Tensor:
    """Windows of one step, shape (TOKENS_PER_STEP / window, window), a function of the step number alone.

    Starts are multiples of the golden ratio modulo the stream: any stretch of them covers the stream
    evenly, neighbours in a batch lie far apart, and resuming needs no generator state.
    """
    rows = TOKENS_PER_STEP // window
    shares = np.arange(step * rows, (step + 1) * rows) * GOLDEN_RATIO % 1
    starts = (shares * (len(stream) - window)).astype(np.int64)
    return torch.from_numpy(stream[starts[:, None] + np.arange(window)])


def schedule(share: float) -> float:
    """Factor on the learning rates after `share` (0 to 1) of the run: warm-up, then a cosine to zero."""
    if share < WARM_UP:
        return (share + 0.1 * WARM_UP) / (1.1 * WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def make_optimizers(model: torch.nn.Module) -> Optimizers:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms; "peak" is the full rate."""
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon([{"params": layers, "peak": MUON_LR}], weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW([{"params": others, "peak": ADAMW_LR}], weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def save_checkpoint(path: Path, model: torch.nn.Module, optimizers: Optimizers, done: Progress) -> None:
    """Replace the checkpoint in one step: an interrupted save leaves the previous one."""
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    partial = path.with_suffix(".partial")
    torch.save({**state, "progress": asdict(done)}, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: torch.nn.Module, optimizers: Optimizers) -> Progress:
    """Progress of the run in `path`, with its weights and optimizer states put in place."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def update(model: torch.nn.Module, optimizers: Optimizers, factor: float) -> None:
    """One step down the gradients in `model`, which it clips and then clears."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def train(
    model: Qwen3ForCausalLM, optimizers: Optimizers, stream: IDS, done: Progress, minutes: float
) -> Iterator[None]:
    """Train until `minutes` have passed in `done`; yields after every step, with `done` up to date."""
    compiled = torch.compile(model, dynamic=False)
    losses: list[float] = []
    marked, clock = done.seconds, time.monotonic()
    while (share := done.seconds / (60 * minutes)) < 1:
        window = CONTEXT if share >= LONG_WINDOWS_FROM else SHORT_WINDOW
        ids = batch(stream, done.step, window)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        update(model, optimizers, schedule(share))
        losses.append(loss.item())
        done.step += 1
        done.seconds, clock = done.seconds + time.monotonic() - clock, time.monotonic()
        if (done.seconds - marked) * LOG_LINES >= 60 * minutes:
            speed = len(losses) * TOKENS_PER_STEP / (done.seconds - marked)
            done.say(
                f"{done.seconds / 60:6.1f} min  step {done.step:5d}  window {window:4d}  "
                f"lr x {schedule(share):.3f}  loss {np.mean(losses):.3f}  {speed:6,.0f} tokens/s"
            )
            losses, marked = [], done.seconds
        yield


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder: bf16 weights without the tied head, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    weights = {name: t.bfloat16().contiguous() for name, t in state.items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only; a package is for all
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT_ID)
    generation = {**ids, "do_sample": False}
    for name, content in (("config.json", model_config()), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, CONTEXT)


@torch.no_grad()
def perplexity(folder: Path, windows: torch.Tensor) -> float:
    """Perplexity of the model in `folder` on `windows` of shape (n, length), each read from an empty context,
    computed in float32 from the bf16 weights."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = [model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in windows]
    return math.exp(float(np.mean(losses)))


def unigram_perplexity(stream: IDS, windows: torch.Tensor) -> float:
    """Perplexity of the training tokens' frequencies, plus one each, on the tokens `perplexity` predicts."""
    counts = np.bincount(stream, minlength=VOCAB_SIZE) + 1
    return math.exp(-float(np.mean(np.log(counts / counts.sum())[windows[:, 1:].numpy()])))


def opening(corpus: CorpusText, model: torch.nn.Module, stream: IDS, minutes: float) -> str:
    """The head of the log: what is trained, on what, with what."""
    parameters = sum(p.numel() for p in model.parameters())
    return f"""\
Embedded model of qconvert: training log (written by qconvert/demo/train.py)
machine: {platform.machine()}, {THREADS} threads, {torch.backends.cpu.get_cpu_capability()}, no GPU; \
python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, \
numpy {np.__version__}
text: standard library of Python {corpus.python_version}, {len(corpus.modules)} modules,
      {len(corpus.text):,} characters, {len(stream):,} tokens, sha256 {corpus.sha256}
model: Qwen3, {parameters:,} parameters; seed {SEED}, bf16 autocast, Muon {MUON_LR}, AdamW {ADAMW_LR}, \
{TOKENS_PER_STEP} tokens a step, {minutes:g} minutes"""


def closing(folder: Path, tokenizer: Tokenizer, stream: IDS, done: Progress) -> str:
    """The end of the log: cost, size, and perplexity against the unigram level."""
    held_out = demo_text("held-out")
    ids = torch.tensor(tokenizer.encode(held_out.text).ids)
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    tokens = done.step * TOKENS_PER_STEP
    size = sum(path.stat().st_size for path in folder.iterdir())
    return f"""\
done: {done.step:,} steps, {tokens:,} tokens ({tokens / len(stream):.1f} passes over the text) \
in {done.seconds / 60:.1f} minutes; model folder {size:,} bytes
held-out: {len(held_out.modules)} modules, sha256 {held_out.sha256}
          {len(windows)} disjoint windows of {CONTEXT} tokens
held-out perplexity, model (bf16 weights, float32 arithmetic): {perplexity(folder, windows):.2f}
held-out perplexity, unigram (training counts plus one): {unigram_perplexity(stream, windows):.1f}"""


@click.command()
@click.option(
    "--work-dir", type=click.Path(path_type=Path), required=True, help="Where the checkpoint is kept."
)
@click.option("--minutes", type=float, default=45.0, show_default=True, help="Length of the run.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=MODEL_DIR, help="Model folder; the log goes beside it."
)
def main(work_dir: Path, minutes: float, out: Path) -> None:
    """Train the embedded model, or continue the training in the folder of the checkpoint."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(demo_documents("train").values())
    stream = token_stream(tokenizer)
    model = Qwen3ForCausalLM(Qwen3Config(**model_config()))
    optimizers = make_optimizers(model)
    checkpoint = work_dir / "checkpoint.pt"
    if checkpoint.exists():
        done = load_checkpoint(checkpoint, model, optimizers)
        done.say(f"resumed at step {done.step}, for {minutes:g} minutes in all")
    else:
        work_dir.mkdir(parents=True, exist_ok=True)
        done = Progress()
        done.say(opening(demo_text("train"), model, stream, minutes))

    saved = done.seconds
    for _ in train(model, optimizers, stream, done, minutes):
        if done.seconds - saved > SECONDS_BETWEEN_CHECKPOINTS:
            save_checkpoint(checkpoint, model, optimizers, done)
            saved = done.seconds
    save_checkpoint(checkpoint, model, optimizers, done)
    export(model, tokenizer, out)
    done.say(closing(out, tokenizer, stream, done))
    (out.parent / "training.log").write_text("\n".join(done.log) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
