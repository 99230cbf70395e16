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
    known = (
        # name, summary, module:class, model_type of config.json, general.architecture of GGUF
        ("llama", "Llama 2 and 3", "llama:Llama", ("llama",), ("llama",)),
        ("mistral", "Mistral", "mistral:Mistral", ("mistral",), ()),
        ("mixtral", "Mixtral, a mixture of experts", "mistral:Mixtral", ("mixtral",), ()),
        ("qwen2", "Qwen 2 and 2.5, dense", "qwen:Qwen2", ("qwen2",), ("qwen2",)),
        ("qwen3", "Qwen 3, dense", "qwen:Qwen3", ("qwen3",), ("qwen3",)),
        ("qwen3-moe", "Qwen 3, a mixture of experts", "qwen:Qwen3Moe", ("qwen3_moe",), ("qwen3moe",)),
        ("phi3", "Phi 3 and 4", "phi:Phi3", ("phi3",), ("phi3",)),
        ("gemma2", "Gemma 2", "gemma:Gemma2", ("gemma2",), ("gemma2",)),
        ("gemma3", "Gemma 3, its text", "gemma:Gemma3", ("gemma3_text",), ("gemma3",)),
        ("granite", "Granite 3, dense", "granite:Granite", ("granite",), ("granite",)),
        ("smollm3", "SmolLM 3", "smollm:SmolLM3", ("smollm3",), ("smollm3",)),
        ("lfm2", "LFM 2, convolutions and attention", "lfm:Lfm2", ("lfm2",), ("lfm2",)),
        ("tiny", "a seeded toy, for tests", "tiny:Tiny", ("mlxcel-tiny",), ()),
    )
    return [
        FamilySpec(name, summary, f"mlxcel.plugins.families.{target}", model_types=model_types, gguf_archs=archs)
        for name, summary, target, model_types, archs in known
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
    return [
        Named("dense", "one page a row, as long as the context", "mlxcel.plugins.kv.dense:DenseKV"),
        Named("paged", "small pages that rows share and grow by", "mlxcel.plugins.kv.paged:PagedKV"),
    ]


@hookimpl
def mlxcel_prefill_planners() -> list[Named]:
    target = "mlxcel.plugins.prefill.chunked:ChunkedPlanner"
    return [Named("chunked", "pieces that end on multiples of the chunk", target)]


@hookimpl
def mlxcel_samplers() -> list[Named]:
    return [Named("chain", "a chain of stages in a fixed order", "mlxcel.plugins.sampling.chain:ChainSampler")]
