"""What mlxcel itself offers, registered as every third party's offers are. Nothing is imported but specs."""

from __future__ import annotations

from mlxcel.core.checkpoint import FormatSpec
from mlxcel.core.family import FamilySpec
from mlxcel.core.named import Named
from mlxcel.core.source import ModelSource
from mlxcel.core.tokenizer import TokenizerSpec
from mlxcel.plugins.hookspecs import hookimpl
from mlxcel.plugins.sources import gemma3, smollm2, tiny


@hookimpl
def mlxcel_families() -> list[FamilySpec]:
    families = "mlxcel.plugins.families"
    return [
        FamilySpec("llama", "Llama 2 and 3", f"{families}.llama:Llama", model_types=("llama",), gguf_archs=("llama",)),
        FamilySpec("qwen3", "Qwen 3, dense", f"{families}.qwen:Qwen3", model_types=("qwen3",), gguf_archs=("qwen3",)),
        FamilySpec("tiny", "a seeded toy, for tests", f"{families}.tiny:Tiny", model_types=("mlxcel-tiny",)),
    ]


@hookimpl
def mlxcel_formats() -> list[FormatSpec]:
    formats = "mlxcel.plugins.formats"
    return [
        FormatSpec(
            "safetensors",
            "a folder of safetensors files and config.json",
            f"{formats}.safetensors:SafetensorsCheckpoint",
            detect=f"{formats}.detect:is_safetensors_folder",
        ),
        FormatSpec("gguf", "a GGUF file", f"{formats}.gguf:GgufCheckpoint", detect=f"{formats}.detect:is_gguf"),
    ]


@hookimpl
def mlxcel_tokenizers() -> list[TokenizerSpec]:
    tokenizers = "mlxcel.plugins.tokenizers"
    return [
        TokenizerSpec("hf-json", "tokenizer.json", f"{tokenizers}.hf_json:load", needs="tokenizer.json", priority=20),
        TokenizerSpec("hf-model", "SentencePiece", f"{tokenizers}.hf_model:load", needs="tokenizer.model", priority=15),
        TokenizerSpec("gguf", "GGUF metadata", f"{tokenizers}.gguf_tokenizer:load", needs="gguf", priority=10),
    ]


@hookimpl
def mlxcel_model_sources() -> list[ModelSource]:
    return [smollm2.SOURCE, gemma3.SOURCE, tiny.SOURCE]


@hookimpl
def mlxcel_kv_stores() -> list[Named]:
    return [Named("dense", "one page a row, as long as the context", "mlxcel.plugins.kv.dense:DenseKV")]


@hookimpl
def mlxcel_prefill_planners() -> list[Named]:
    target = "mlxcel.plugins.prefill.chunked:ChunkedPlanner"
    return [Named("chunked", "pieces that end on multiples of the chunk", target)]


@hookimpl
def mlxcel_samplers() -> list[Named]:
    return [Named("chain", "a chain of stages in a fixed order", "mlxcel.plugins.sampling.chain:ChainSampler")]
