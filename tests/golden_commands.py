"""The commands whose outputs are recorded, and the recording of them.

    python -m tests.golden_commands --record            write tests/golden_outputs.json
    python -m tests.golden_commands --record NAME ...   write these alone
    python -m tests.golden_commands --texts FOLDER      write the masked texts, to compare two revisions
    python -m tests.golden_commands --check             compare, without pytest; -j N gives commands N threads

Run `--texts` at two revisions and `diff -r` the folders to see a difference whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

from tests.golden_runs import Command, Record, Runs, differences, needs_assets

RECORDED = Path(__file__).with_name("golden_outputs.json")

QUANTIZE = (
    Command("quantize-2", "quantize {dense} --bits 2 --asym --group-size 64 --layout gptq_v2", plan=True),
    Command("quantize-3", "quantize {qwen2-f32} --bits 3 --asym --min-max", plan=True),
    Command("quantize-4", "quantize {dense} --bits 4", plan=True),
    Command("quantize-5", "quantize {dense} --bits 5 --group-size 64 --min-max"),
    Command("quantize-6", "quantize {dense} --bits 6 --group-size 64 --layout mlx --rule embed=int4-g64"),
    Command("quantize-7", "quantize {dense} --bits 7 --group-size channel"),
    Command("quantize-8", "quantize {llama-f16} --scheme int8-asym-channel"),
    Command("quantize-embedded", "quantize embedded --bits 4 --group-size 32", plan=True),
    Command("quantize-rules", "quantize {llama-f16} --bits 4 --rule mlp.down=int8 --rule re:o_proj=int6-g32"),
    Command("quantize-layers", "quantize {llama-f16} --bits 4 --rule layers.0-0.mlp.down=int2 --keep attn.o"),
    Command("quantize-embedding", "quantize {dense} --bits 4 --rule embed=int8"),
    Command("quantize-fused", "quantize {llama-f16} --bits 4 --asym --fuse qkv --fuse gate_up", plan=True),
    Command("quantize-untied", "quantize {dense} --bits 4 --untie --rule lm_head=int8-g64"),
    Command("quantize-tied", "quantize {equal-head} --bits 4 --tie", plan=True),
    Command("quantize-smaller-group", "quantize {uneven} --bits 4 --allow-smaller-group"),
    Command("quantize-int-quantized", "quantize {dense} --scheme int8-channel --layout int-quantized"),
    Command("quantize-awq", "quantize {dense} --bits 4 --asym --layout awq", plan=True),
    Command("quantize-padded", "quantize {odd} --bits 4 --pad-to-tp 2", plan=True),
    Command("quantize-recipe", "quantize {llama-f16} --recipe {recipe}", plan=True),
    Command("quantize-declared", "quantize {strange} --recipe {declared}"),
    Command("quantize-unknown", "quantize {strange} --bits 4 --group-size channel --allow-unknown"),
    Command("quantize-nonfinite", "quantize {nonfinite} --bits 4 --allow-nonfinite"),
    Command("quantize-shards", "quantize {shards} --bits 4 --shard-size 400KB --hash-sources", plan=True),
    Command("quantize-f16", "quantize {dense} --bits 4 --dtype f16 --no-verify --max-memory 4GB"),
    Command("quantize-experts", "quantize {mixtral} --bits 4 --group-size 32"),
    Command("quantize-experts-fused", "quantize {qwen3-moe} --bits 4 --group-size 32 --fuse experts"),
    Command("quantize-conv1d", "quantize {gpt2} --bits 8 --group-size 32"),
    Command(
        "quantize-typed", "quantize {card} --bits 4 --layout gptq --rule lm_head=int8 -o typed", typed=True
    ),
    Command("quantize-named", "quantize {llama-f16} --scheme int4-g64 -q", typed=True),
)
REARRANGE = (
    Command("fuse-qkv", "fuse-qkv embedded --dtype f16", plan=True),
    Command("fuse", "fuse {llama-f16}", plan=True),
    Command("fuse-gate_up", "fuse {dense} --only gate_up"),
    Command("fuse-padded", "fuse {odd} --pad-to-tp 7"),
    Command("fuse-quantized", "fuse {@quantize-4} --shard-size 100KB"),
    Command("fuse-experts", "fuse {mixtral} --only experts"),
    Command("unfuse", "unfuse {@fuse}", plan=True),
    Command("unfuse-experts", "unfuse {@fuse-experts} --only experts"),
    Command("unfuse-phi3", "unfuse {phi}"),
    Command("unfuse-conv1d", "unfuse {gpt2}"),
    Command("fuse-conv1d", "fuse-qkv {@unfuse-conv1d}"),
    Command("tie", "tie {equal-head}", plan=True),
    Command("untie", "untie {dense}", plan=True),
    Command("dequantize", "dequantize {@quantize-3}", plan=True),
    Command("dequantize-mlx", "dequantize {@quantize-6} --dtype f16"),
    Command("dequantize-nf4", "dequantize {@dense-to-nf4-nested} --dtype bf16 -o typed", typed=True),
)
# A name, and what plain numbers are converted to.
FIRST = {
    "int4": "compressed-tensors --scheme int4-g128",
    "int8": "int-quantized --scheme int8-channel",
    "fp8-channel": "compressed-tensors --scheme fp8-channel",
    "fp8-tensor": "compressed-tensors --scheme fp8-tensor",
    "mxfp4": "compressed-tensors --scheme mxfp4",
    "nvfp4": "compressed-tensors --scheme nvfp4",
    "fp8": "fp8",
    "gptq": "gptq --scheme int4-g128",
    "gptq_v2": "gptq_v2 --scheme int4-asym-g128",
    "awq": "awq --scheme int4-asym-g128",
    "mlx": "mlx --scheme int4-g64",
    "mlx-nvfp4": "mlx --scheme nvfp4",
    "nf4-nested": "bitsandbytes --scheme nf4-nested",
    "fp4": "bitsandbytes --scheme fp4",
    "bnb-int8": "bitsandbytes --scheme int8",
    "gguf": "gguf",
    "f32": "f32",
}
# From one of those to a layout.
NEXT = (
    "int4 awq", "int4 gguf", "fp8-tensor fp8", "fp8-channel bf16", "nvfp4 gguf",
    "mlx-nvfp4 compressed-tensors", "gptq compressed-tensors", "gptq mlx", "gptq_v2 gguf",
    "awq gptq_v2", "mlx gptq", "bnb-int8 int-quantized", "fp4 f16",
)  # fmt: skip
CONVERT = (
    *(Command(f"dense-to-{name}", f"convert {{dense}} --to {to}") for name, to in FIRST.items()),
    *(
        Command(f"{before}-to-{to}", f"convert {{@dense-to-{before}}} --to {to}", plan=to in ("mlx", "gguf"))
        for before, to in (pair.split() for pair in NEXT)
    ),
    Command("torchao-to-compressed-tensors", "convert {torchao} --to compressed-tensors"),
    Command("act-order-to-gptq_v2", "convert {act-order} --to gptq_v2"),
    Command("act-order-again", "convert {act-order} --to awq --scheme int4-g128 --allow-requantize"),
    Command("undo-act-order-padded", "convert {act-order-mlp} --to gptq --undo-act-order --pad-to-tp 5"),
    Command("undo-act-order-gguf", "convert {act-order-mlp} --to gguf --undo-act-order"),
    Command("requantize", "convert {@dense-to-nf4-nested} --to gptq --scheme int4-g128 --allow-requantize"),
    Command("oss-to-mxfp4", "convert {gpt-oss} --to mxfp4"),
    Command("oss-to-mlx", "convert {@oss-to-mxfp4} --to mlx"),
    Command("oss-to-gguf", "convert {@oss-to-mxfp4} --to gguf"),
    Command("oss-back-from-gguf", "convert {@oss-to-gguf} --to mxfp4"),
    Command("experts-to-mlx", "convert {qwen3-moe} --to mlx --scheme int4-g32"),
    Command("q4_0-to-gptq", "convert {@gguf-q4_0-pure} --to gptq"),
    Command("q4_k-to-mlx", "convert {@gguf-q4_k_s-pure} --to mlx --allow-requantize"),
)
TYPES = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l",
    "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs", "tq1_0",
    "tq2_0", "q1_0", "q2_0", "nvfp4",
)  # fmt: skip
FAMILIES = (
    "llama-f16", "qwen2", "qwen3-moe", "mixtral", "phi", "gemma3", "gpt2", "falcon", "deepseek-v2", "bert",
    "t5", "gpt-oss",
)  # fmt: skip
GGUF = (
    *(Command(f"gguf-{kind}", f"to-gguf {{wide}} --type {kind}") for kind in TYPES),
    *(
        Command(f"gguf-{kind}-imatrix", f"to-gguf {{wide}} --type {kind} --imatrix {{imatrix}}")
        for kind in ("q2_k_s", "q3_k_m", "q4_k_m", "iq1_s", "iq1_m", "iq2_xxs", "iq2_m", "iq3_xs", "iq4_xs")
    ),
    *(Command(f"gguf-{kind}-pure", f"to-gguf {{wide}} --type {kind} --pure") for kind in ("q4_0", "q4_k_s")),
    Command("gguf-embedded", "to-gguf embedded --type q4_k_m", plan=True),
    Command("gguf-split", "to-gguf {wide} --type q8_0 --split-max-size 300KB"),
    Command(
        "gguf-types",
        "to-gguf {wide} --type q4_0 --tensor-type ffn_down=q8_0 --tensor-type attn_v=mxfp4 "
        "--token-embedding-type q5_k --output-tensor-type q6_k",
    ),
    Command("gguf-fallback", "to-gguf {dense} --type q4_k_m --no-verify --max-memory 4GB"),
    Command("gguf-pre-tokenizer", "to-gguf {card} --type q8_0 --pre-tokenizer qwen2"),
    Command("gguf-keep", "to-gguf {@dense-to-gptq} --type keep", plan=True),
    Command("gguf-again", "to-gguf {@dense-to-fp4} --type q4_0 --allow-requantize"),
    Command("gguf-mxfp4_moe", "to-gguf {qwen3-moe} --type mxfp4_moe"),
    Command("gguf-typed", "to-gguf {gemma2} --type q4_0 -o typed.gguf", typed=True),
    Command("gguf-named", "to-gguf {gemma} --type q4_k_m -q", typed=True),
    *(Command(f"gguf-of-{name}", f"to-gguf {{{name}}} --type q8_0") for name in FAMILIES),
    Command("back-f32", "from-gguf {@gguf-q4_k_m-imatrix} --dtype f32", plan=True),
    Command("back-split", "from-gguf {@gguf-split} --dtype f16 --no-verify"),
    Command("back-experts", "from-gguf {@gguf-of-mixtral} --shard-size 100KB"),
    Command("back-typed", "from-gguf {@gguf-of-gpt2} -o typed", typed=True),
)
LOOK = (
    Command("plan-quantize-typed", "quantize {dense} --bits 4 --fuse qkv --dry-run", typed=True),
    Command("plan-gguf-typed", "to-gguf {wide} --type q5_k_m --dry-run", typed=True),
    Command("gguf-list", "to-gguf --type list", typed=True),
    Command("inspect-embedded", "inspect embedded --tensors"),
    Command("inspect-quantized", "inspect {@quantize-rules} --tensors --json"),
    Command("inspect-gguf", "inspect {@gguf-q4_k_m} --json"),
    Command("verify", "verify {@quantize-fused} --json"),
    Command("verify-against", "verify {@dense-to-awq} --against {dense} --json"),
    Command("verify-other", "verify {@dense-to-gptq} --against {uneven} --json", code=3),
    Command("diff", "diff {dense} {@dense-to-int8} --json --all"),
    Command("diff-typed", "diff {dense} {@quantize-4} --exit-code", code=3),
    Command("check-vllm", "check {@quantize-fused} --for vllm --json"),
    Command("check-sglang", "check {@quantize-embedding} --for sglang --json", code=3),
    Command("check-llama.cpp", "check {@gguf-of-gemma3} --for llama.cpp --json"),
)
REFUSED = tuple(
    Command(f"refused-{name}", line, code=code, typed=True)
    for name, code, line in (
        ("recipe-key", 1, "quantize {dense} --recipe {misspelt} -o out"),
        ("recipe-rule", 1, "quantize {dense} --recipe {misruled} -o out --json"),
        ("no-scheme", 2, "quantize {dense} -o out"),
        ("group", 1, "quantize {odd} --bits 4 -o out"),
        ("layout", 2, "quantize {dense} --bits 4 --layout gguff -o out"),
        ("layout-scheme", 2, "quantize {dense} --bits 7 --layout awq -o out"),
        ("type", 2, "to-gguf {wide} --type q4_x -o out.gguf"),
        ("fallback", 1, "to-gguf {dense} --type q4_k_m --no-fallback -o out.gguf"),
        ("imatrix", 1, "to-gguf {wide} --type q4_0 --imatrix {recipe} -o out.gguf --json"),
        ("tie", 1, "tie {llama-f16} -o out"),
        ("act-order", 1, "convert {act-order} --to awq --undo-act-order -o out"),
        ("unknown-model", 1, "quantize {stranger} --bits 4 -o out"),
        ("nonfinite", 1, "quantize {nonfinite} --bits 4 -o out"),
    )
)
BAD = ("st-overlap", "ix-traversal", "q-gptq-bits-lie", "gguf-offset-wraps.gguf")
QUANTIZED = (
    "cut-gptq-w2-sym-g32 compressed-tensors", "cut-ct-mixed-w4g128-w8ch mlx", "cut-bnb-nf4-dq bf16",
    "cut-mlx-mixed-4-6 bf16", "cut-awq-w4-sym-g128 gguf",
)  # fmt: skip
FIXTURES = (
    *(
        Command(f"refused-{name}", f"inspect {{assets}}/fixtures/bad/{name}", code=1, typed=True)
        for name in BAD
    ),
    *(
        Command(f"{name}-to-{to}", f"convert {{assets}}/fixtures/quantized/{name} --to {to}")
        for name, to in (pair.split() for pair in QUANTIZED)
    ),
    *(Command(f"gguf-of-{name}", f"to-gguf {{zoo:{name}}} --type q4_0") for name in ("chatglm2", "openelm")),
    Command(
        "gguf-imatrix-file",
        "to-gguf {assets}/models/tiny-qwen3 --type q4_k_m --imatrix {assets}/fixtures/gguf/imatrix.gguf",
    ),
)
TABLE = (*QUANTIZE, *REARRANGE, *CONVERT, *GGUF, *LOOK, *REFUSED, *FIXTURES)
COMMANDS = {command.name: command for command in TABLE}
assert len(COMMANDS) == len(TABLE), "two commands of one name"


@lru_cache
def read_records() -> dict[str, Record]:
    """What is recorded, by the names of commands."""
    found: dict[str, Record] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Record, compare, or write the masked texts."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden_commands")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", action="store_true")
    action.add_argument("--check", action="store_true")
    action.add_argument("--texts", type=Path)
    parser.add_argument("-j", "--jobs", type=int)
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    wanted = asked.names or [*COMMANDS]
    kept = dict(read_records()) if RECORDED.exists() and not asked.texts else {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        texts = (asked.texts or Path(folder) / "texts").resolve()
        runs = Runs(Path(folder) / "root", COMMANDS, jobs=asked.jobs, texts=texts)
        for name in wanted:
            if needs_assets(name, COMMANDS) and runs.assets is None:
                print(f"{name}: skipped, for QCONVERT_ASSETS is not a folder", file=sys.stderr)
                continue
            started = time.perf_counter()
            record, expected = runs.record(name), COMMANDS[name].code
            if (took := time.perf_counter() - started) > 1.5:
                print(f"{name}: {took:.1f} s", file=sys.stderr)
            found = differences(kept[name], record, texts / name) if asked.check else []
            if record["code"] != expected:
                said = [record["stdout"], record["stderr"]]
                found += [f"exit code {record['code']}, the table says {expected}", *said]
            if found:
                failed += 1
                print("\n".join([f"{name}:", *found]))
            elif asked.record:
                kept[name] = record
    if asked.record:
        held = {name: kept[name] for name in COMMANDS if name in kept}
        text = json.dumps(held, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        RECORDED.write_text(text, encoding="utf-8")
    print(f"{len(wanted)} commands, {failed} with another outcome")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
