"""Names the command or option of qconvert for one of another tool, where somebody types that."""

from __future__ import annotations

from collections.abc import Mapping

# Of llama.cpp, mlx-lm, llm-compressor, AutoRound, AutoAWQ, GPTQModel, bitsandbytes and their like.
_COMMANDS: Mapping[tuple[str, ...], str] = {
    ("perplexity", "ppl", "llama-perplexity"): "`qconvert eval perplexity MODEL --reference ORIGINAL`",
    ("chat", "run", "llama-cli"): "`qconvert generate MODEL --chat`",
    (
        "serve",
        "llama-server",
    ): "qconvert writes what servers load; `qconvert check MODEL --for vllm` says which",
    (
        "compare",
    ): "`qconvert diff A B` compares weights, `qconvert eval perplexity B --reference A` predictions",
    ("info", "show", "ls"): "`qconvert inspect MODEL`",
    ("llama-quantize",): "`qconvert to-gguf MODEL --type q4_k_m -o FILE.gguf`",
    ("convert-hf-to-gguf", "convert-hf-to-gguf.py"): "`qconvert to-gguf MODEL --type f16 -o FILE.gguf`",
    ("oneshot", "auto-round", "autoround"): "`qconvert quantize MODEL --bits 4 --method feedback`",
    ("imatrix", "llama-imatrix"): "`qconvert calibrate MODEL --imatrix FILE.gguf`",
    ("mlx-lm", "mlx-lm.convert"): "`qconvert quantize MODEL --bits 4 --asym --group-size 64 --layout mlx`",
    ("gptq",): "`qconvert quantize MODEL --bits 4 --layout gptq --method feedback`",
    ("awq",): "`qconvert quantize MODEL --bits 4 --asym --layout awq --method awq`",
    ("push", "upload"): "`--push-to ORG/NAME` of every command that writes a model",
    ("version",): "`qconvert env` shows all versions",
    ("download",): "a Hub id is read as it is: `qconvert quantize ORG/NAME --bits 4`",
}
_OUT = "`-o PATH` names the output"
_OPTIONS: Mapping[tuple[str, ...], str] = {
    ("--outfile", "--output", "--output-dir", "--out-dir", "--output-path", "--save-dir", "--mlx-path"): _OUT,
    ("--model", "--model-path", "--model-name", "--model-name-or-path", "--hf-path"): (
        "the model stands alone, without an option: `qconvert quantize MODEL --bits 4`"
    ),
    ("--outtype", "--qtype", "--ftype"): "`qconvert to-gguf MODEL --type q4_k_m` names the type of a GGUF",
    ("--bit", "--wbits", "--w-bit", "--q-bits", "--num-bits"): "`qconvert quantize MODEL --bits 4`",
    ("--bits", "--group-size"): (
        "`qconvert convert MODEL --to LAYOUT --scheme int4-g128` says both; --bits is an option of quantize"
    ),
    ("--q-group-size", "--groupsize"): "`qconvert quantize MODEL --bits 4 --group-size 64`",
    ("--q-mode",): "`qconvert convert MODEL --to mlx --scheme mxfp4`",
    ("--zero-point", "--asymmetric"): "`--asym` gives every group a zero point",
    ("--ignore", "--modules-to-not-convert"): "`--keep SELECTOR` leaves weights as they are: --keep lm_head",
    ("--format", "--export-format"): (
        "`--layout` of quantize and `--to` of convert name it: compressed-tensors, gptq, awq, mlx"
    ),
    ("--to",): "`qconvert convert MODEL --to LAYOUT`",
    ("--allow-requantize",): (
        "`qconvert convert MODEL --to compressed-tensors --scheme int4-g128 --allow-requantize`"
    ),
    ("--dataset", "--calib-data", "--calib-dataset", "--calibration-dataset"): (
        "`--text` names the calibration text: a file, a folder, hub:DATASET"
    ),
    ("--nsamples", "--num-samples", "--num-calibration-samples", "--calib-size"): (
        "`--tokens` says how much of the calibration text is read: --tokens 64k"
    ),
    ("--seqlen", "--seq-len", "--max-seq-length"): "`--window` says how many tokens are read together",
    ("--iters",): "nothing is trained here; `--method two-sided` chooses codes together, on a text",
    ("--device", "--device-map"): "conversions run on the CPU; `-j` says on how many threads",
    ("--threads", "--nthread", "--num-threads"): "`-j` says on how many threads",
    ("--trust-remote-code",): "leave it out: no code of a checkpoint is run here",
    ("--nf4", "--load-in-4bit"): "`qconvert convert MODEL --to bitsandbytes --scheme nf4`",
    ("--double-quant",): "`qconvert convert MODEL --to bitsandbytes --scheme nf4-nested`",
    ("--load-in-8bit",): "`qconvert convert MODEL --to bitsandbytes --scheme int8-channel`",
    ("--quantize", "--quantization"): (
        "`qconvert quantize MODEL --bits 4`, or `qconvert to-gguf MODEL --type q4_k_m`"
    ),
    ("--leave-output-tensor",): "`--output-tensor-type bf16` of to-gguf leaves the head in 16 bits",
    ("--keep-split",): "`--split-max-size SIZE` of to-gguf writes numbered parts",
    ("--force", "--overwrite-output-dir"): "`--overwrite` replaces an earlier output",
    ("--resume",): "the same command continues by itself; `--restart` starts again",
    ("--task", "--tasks"): "`python -m qconvert.evaluate.lm_eval_adapter run --tasks` runs tasks",
}


def _by_word(table: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    return {word: said for words, said in table.items() for word in words}


COMMANDS, OPTIONS = _by_word(_COMMANDS), _by_word(_OPTIONS)
"""What to type here, by the word that is typed elsewhere, in hyphens."""


def here(word: str, options: tuple[str, ...] = ()) -> str | None:
    """What a command or an option of another tool is called here; None for a word that is not known.

    `options` are those of the command: a word that is one of them but for `_` is told as it is written.
    """
    plain = word.lower().replace("_", "-")
    if plain in options:
        return f"it is written {plain}"
    return OPTIONS.get(plain) or COMMANDS.get(plain)
