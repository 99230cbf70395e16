"""The undamaged checkpoints that the fuzzer damages: each format, tokenizer and kind of config, some kilobytes each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Final

import attrs
import fuzz_files
import gguf
import numpy as np
from tiny_checkpoint import CHATML, tiny_tokenizer_json, write_json, write_tiny_gguf, write_tiny_llama
from wrapped_checkpoint import write_wrapped

DATA: Final = Path(__file__).parent / "data"
SHAPE: Final[Mapping[str, Any]] = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 288, "layers": 2}
TOKENIZER: Final = 276

WORDS: Final = ("▁", "▁t", "he", "▁the", "in", "▁a", "er", "on", "▁s", *ascii_lowercase, "H", "1", "!")
PIECES: Final = (
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((word, -float(rank), 1) for rank, word in enumerate(WORDS)),
    ("<mark>", 0.0, 4),
)
"""(spelling, score, type) of a SentencePiece vocabulary with byte fallback; types are GGUF's and SentencePiece's."""

Damage = Callable[[Random, bytes], bytes]


@attrs.frozen
class Seed:
    """`files` by name, all in one folder; `opened` is the file to open, "" for the folder. `targets` are damaged."""

    name: str
    files: Mapping[str, bytes]
    opened: str
    targets: tuple[str, ...]
    atoms: tuple[fuzz_files.Atom, ...] = ()

    def damaged(self, draw: Random) -> tuple[str, bytes]:
        """The name of one file, and its new content."""
        target = draw.choice(self.targets)
        data = self.files[target]
        informed: Damage | None = None
        if self.atoms:
            informed = lambda draw, _: fuzz_files.gguf_fields(draw, self.atoms)  # noqa: E731
        elif target.endswith(".json"):
            informed = fuzz_files.json_tree
        elif target.endswith(".safetensors"):
            informed = fuzz_files.shard_header
        elif target.endswith(".jinja"):
            informed = fuzz_files.text
        elif target.endswith(".model"):
            informed = fuzz_files.message_fields
        if informed is not None and draw.random() < 0.75:
            data = informed(draw, data)
            return target, data if draw.random() < 0.9 else fuzz_files.blindly(draw, data)
        for _ in range(draw.choice((1, 1, 2, 4))):
            data = fuzz_files.blindly(draw, data)
        return target, data


@attrs.frozen
class Seeds:
    """`kinds` are the groups that cases go through in turn, so that none is rare."""

    kinds: tuple[tuple[Seed, ...], ...]

    @property
    def all(self) -> list[Seed]:
        return [seed for kind in self.kinds for seed in kind]

    def of(self, case: int, draw: Random) -> Seed:
        return draw.choice(self.kinds[case % len(self.kinds)])


def make_seeds(folder: Path) -> Seeds:
    """Written once by the writers of the tests, then kept in memory."""
    alone = [*folders(folder), *ggufs(folder)]
    several = configs(alone[0])
    return Seeds((*((seed,) for seed in alone), models(folder), several, several))


def folders(folder: Path) -> list[Seed]:
    plain = write_tiny_llama(folder / "plain", tokenizer_size=TOKENIZER, dtype="BF16", **SHAPE)
    (plain / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    write_json(plain / "special_tokens_map.json", {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>"})
    shards = write_tiny_llama(folder / "shards", tokenizer_size=TOKENIZER, add_bos=True, shards=2, tie=False, **SHAPE)
    wrapped = write_wrapped(
        folder / "wrapped", {"model.": "language_model.model."}, outer={"vision_config": {"depth": 1}}
    )
    spaces = write_tiny_llama(folder / "spaces", tokenizer_size=TOKENIZER, dtype="F16", **SHAPE)
    write_json(spaces / "tokenizer.json", tokenizer_with_spaces())
    small = {"chat_template.jinja", "special_tokens_map.json", "generation_config.json"}
    return [
        folder_seed(plain, often=("tokenizer.json", "config.json", "model.safetensors", "tokenizer_config.json")),
        folder_seed(shards, but=small, often=("model.safetensors.index.json",)),
        folder_seed(wrapped, but={*small, "tokenizer.json", "tokenizer_config.json"}),
        folder_seed(spaces, but={*small, "config.json", "model.safetensors"}, often=("tokenizer.json",) * 3),
    ]


def tokenizer_with_spaces() -> dict[str, Any]:
    """tokenizer.json of the pieces, as Hugging Face writes Llama 2's: rules for spaces at both ends."""
    fields = tiny_tokenizer_json(TOKENIZER)
    flags = fields["added_tokens"][0]
    names = [piece for piece, _, _ in PIECES]
    joins = [[word[:cut], word[cut:]] for word in WORDS for cut in range(1, len(word))]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        **fields,
        "added_tokens": [{**flags, "id": index, "content": names[index]} for index in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            **fields["model"],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {name: index for index, name in enumerate(names)},
            "merges": [pair for pair in joins if set(pair) <= set(names)],
        },
    }


def models(folder: Path) -> tuple[Seed, ...]:
    """Folders with a tokenizer.model: the pieces, and those that sentencepiece itself made."""
    made = {path.stem: path.read_bytes() for path in sorted(DATA.glob("tokenizers/*.model"))}
    seeds = []
    for name, data in {"pieces": sentencepiece_model(), **made}.items():
        place = write_tiny_llama(folder / f"model {name}", tokenizer_size=TOKENIZER, dtype="F16", **SHAPE)
        (place / "tokenizer.json").unlink()
        (place / "tokenizer.model").write_bytes(data)
        files = {path.name: path.read_bytes() for path in sorted(place.iterdir())}
        seeds.append(Seed(place.name, files, "", ("tokenizer.model", "tokenizer.model", "tokenizer_config.json")))
    return tuple(seeds)


def folder_seed(folder: Path, *, but: set[str] | None = None, often: tuple[str, ...] = ()) -> Seed:
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return Seed(folder.name, files, "", (*(name for name in files if name not in (but or ())), *often))


def configs(plain: Seed) -> tuple[Seed, ...]:
    """The configs of all families over the same weights: what parse_config reads is mostly the config."""
    found = sorted(DATA.glob("families/*/config.json"))
    return tuple(
        Seed(f"config {path.parent.name}", {**plain.files, "config.json": path.read_bytes()}, "", ("config.json",))
        for path in found
    )


# --- GGUF ------------------------------------------------------------------------------------------------------------


def ggufs(folder: Path) -> list[Seed]:
    paths = [
        write_tiny_gguf(folder / "bpe.gguf", tokenizer_size=TOKENIZER, dtype="Q8_0", **SHAPE),
        write_tiny_gguf(
            folder / "pre.gguf", tokenizer_size=TOKENIZER, dtype="F16", tie=False, pre="llama-bpe", **SHAPE
        ),
        write_pieces_gguf(folder / "llama.gguf", "llama"),
        write_pieces_gguf(folder / "t5.gguf", "t5"),
    ]
    return [gguf_seed(path) for path in paths]


def gguf_seed(path: Path) -> Seed:
    data = path.read_bytes()
    return Seed(path.stem, {path.name: data}, path.name, (path.name,), tuple(fuzz_files.gguf_atoms(data)))


def write_pieces_gguf(path: Path, model: str) -> Path:
    """A SentencePiece vocabulary, and one tensor of each type whose blocks hold 256 or 32 values."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in PIECES])
    writer.add_token_scores([score for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(CHATML)
    writer.add_tensor("token_embd.weight", np.zeros((len(PIECES), 32), np.float32))
    for name in ("Q4_0", "Q5_1", "Q2_K", "Q4_K", "Q6_K"):
        kind = gguf.GGMLQuantizationType[name]
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(f"{name}.weight", np.full((256 // elements * nbytes,), 60, np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- tokenizer.model -------------------------------------------------------------------------------------------------


def sentencepiece_model() -> bytes:
    """By the format's own definition (sentencepiece_model.proto): pieces, trainer and normalizer settings."""
    message = b""
    for piece, score, kind in PIECES:
        spelling = piece.encode()
        inner = b"\x0a" + fuzz_files.varint(len(spelling)) + spelling + b"\x15" + struct.pack("<f", score)
        message += field(1, inner + b"\x18" + fuzz_files.varint(kind))
    ids = numbers({3: 2, 4: len(PIECES), 35: 1, 40: 0, 41: 1, 42: 2})
    spaces = b"\x0a\x08identity" + numbers({3: 1, 4: 0, 5: 1})
    return message + field(2, ids) + field(3, spaces)


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + fuzz_files.varint(len(content)) + content


def numbers(values: Mapping[int, int]) -> bytes:
    return b"".join(fuzz_files.varint(number << 3) + fuzz_files.varint(value) for number, value in values.items())
