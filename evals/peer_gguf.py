"""Writes a GGUF file of a checkpoint with the libraries of llama.cpp, to measure llama.cpp with.

The bfloat16 file is gguf-py's, the quantized one is llama_model_quantize's, so that llama.cpp runs
exactly what its users run. Random weights have no tokenizer; llama.cpp's "no_vocab" stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows

FILE_TYPES = {"Q4_0": 2, "Q4_K_M": 15}
"""LLAMA_FTYPE_MOSTLY_... of llama.h."""


def gguf_files(folder: Path, stem: Path, types: Sequence[str]) -> dict[str, Path]:
    """A checkpoint as `STEM-TYPE.gguf` of every type, bf16 or one of `FILE_TYPES`; made once."""
    files = {name: stem.with_name(f"{stem.name}-{name.lower()}.gguf") for name in ("bf16", *types)}
    if any(not files[name].is_file() for name in types) and not files["bf16"].is_file():
        _write_bf16(folder, files["bf16"])
    for name in types:
        if not files[name].is_file():
            from cyllama.llama import llama_cpp as api  # type: ignore[import-untyped]

            api.disable_logging()
            params = api.LlamaModelQuantizeParams()
            params.ftype, params.nthread = FILE_TYPES[name], 2
            api.model_quantize(str(files["bf16"]), str(files[name]), params)  # as llama-quantize does
    return {name: files[name] for name in types}


def _write_bf16(folder: Path, out: Path) -> None:
    """A dense Qwen2 or Qwen3 checkpoint in bfloat16 as GGUF; vectors in float32, as llama.cpp wants them."""
    import numpy as np
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map

    checkpoint = open_checkpoint(folder)
    config, binding = checkpoint.config, checkpoint.bind()
    writer = GGUFWriter(out, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = get_tensor_name_map(MODEL_ARCH[config["model_type"].upper()], config["num_hidden_layers"])
    for name in binding.parameters:
        tensor = checkpoint.tensors[name]
        value = checkpoint.reader.read(tensor, 0, tensor.rows)
        assert isinstance(value, DenseRows) and value.dtype is DType.BF16
        spelled = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if len(tensor.shape) == 1:
            writer.add_tensor(spelled, (value.rows_RI.ravel().astype(np.uint32) << 16).view(np.float32))
        else:
            raw = value.rows_RI.view(np.uint8)
            writer.add_tensor(spelled, raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
