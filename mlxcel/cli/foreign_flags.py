"""Flags of llama-server and `vllm serve` that `mlxcel serve` has not, and what to take instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import click

from mlxcel.cli.options import SectionCommand
from mlxcel.errors import UsageError

LLAMA: Final = "llama-server"
VLLM: Final = "vllm serve"


@attrs.frozen
class Foreign:
    """Flags of one program that one sentence answers."""

    program: str
    flags: tuple[str, ...]
    hint: str


def _of(program: str, flags: str, hint: str) -> Foreign:
    return Foreign(program, tuple(flags.split()), hint)


FOREIGN: Final = (
    _of(LLAMA, "--threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll --numa "
        "--threads-http", "the backend takes the cores it may use; `taskset` limits them"),
    _of(LLAMA, "-b --batch-size -ub --ubatch-size", "--prefill-chunk is the prompt tokens of a step, "
        "--max-batch-prefill-tokens those of all rows together"),
    _of(LLAMA, "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -ot "
        "--override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -nkvo --no-kv-offload -dev --list-devices --rpc "
        "--op-offload --no-op-offload -fit --fit", "a model is on one device, whole: --device names it"),
    _of(LLAMA, "-fa --flash-attn", "attention never builds the whole matrix: leave it out"),
    _of(LLAMA, "-ctk --cache-type-k -ctv --cache-type-v", "the KV has the type of the computation: --dtype"),
    _of(LLAMA, "--mlock --mmap --no-mmap --no-repack --no-host --check-tensors --direct-io", "leave it out"),
    _of(LLAMA, "-cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified -no-kvu --no-kv-unified --swa-full "
        "-dt --defrag-thold", "rows are always batched as they come, on shared pages: --parallel says how many"),
    _of(LLAMA, "--keep --context-shift --no-context-shift -sps --slot-prompt-similarity",
        "a context never shifts: a reply ends where it is full"),
    _of(LLAMA, "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv",
        "positions are scaled as the checkpoint says: --ctx-size bounds them"),
    _of(LLAMA, "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled",
        "adapters are not in this version"),
    _of(LLAMA, "-mu --model-url -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -dr --docker-repo --models-dir "
        "--models-max", "MODEL takes a path, owner/name of Hugging Face, or a name of `mlxcel list`"),
    _of(LLAMA, "--grammar --grammar-file -j --json-schema -jf --json-schema-file",
        "structured output is not in this version"),
    _of(LLAMA, "--cache-prompt --no-cache-prompt --cache-reuse -cram --cache-ram --ctx-checkpoints "
        "--swa-checkpoints", "--prompt-cache and --prompt-cache-capacity-bytes"),
    _of(LLAMA, "--slot-save-path", "--prompt-cache-file keeps prompts beyond a restart"),
    _of(LLAMA, "--embedding --embeddings --reranking --rerank --pooling --mmproj -mm --mmproj-url --no-mmproj "
        "--media-path --model-vocoder", "this version serves text alone"),
    _of(LLAMA, "-md --model-draft --draft --draft-max --draft-min --draft-p-min -cd --ctx-size-draft -devd "
        "--device-draft -ngld --gpu-layers-draft -hfd --hf-repo-draft --spec-type",
        "speculative decoding is not in this version"),
    _of(LLAMA, "--jinja --no-jinja --skip-chat-parsing --prefill-assistant --no-prefill-assistant",
        "templates are always rendered, in a sandbox: --chat-template-file"),
    _of(LLAMA, "--reasoning-budget", "--reasoning-format says what becomes of reasoning"),
    _of(LLAMA, "--webui --no-webui --path --webui-config", "--no-ui turns the chat page off"),
    _of(LLAMA, "--api-prefix --ssl-key-file --ssl-cert-file", "put a proxy in front, such as nginx or caddy"),
    _of(LLAMA, "--props --sleep-idle-seconds", "nothing of a server changes while it runs: leave it out"),
    _of(LLAMA, "--log-disable --log-file --log-colors -lv --verbosity --log-verbosity --log-prefix --log-timestamps "
        "--no-perf --perf", "-v, -q, --log-format and --no-log-requests"),
    _of(LLAMA, "-e --escape --no-escape -sp --spm-infill --warmup", "leave it out"),
    _of(VLLM, "-tp --tensor-parallel-size -pp --pipeline-parallel-size -dp --data-parallel-size "
        "--enable-expert-parallel --distributed-executor-backend --api-server-count --headless "
        "--disable-custom-all-reduce --cpu-offload-gb --swap-space", "a model is on one device, whole: --device"),
    _of(VLLM, "--quantization --kv-cache-dtype --calculate-kv-scales --load-format --config-format --model-impl "
        "--runner --task --convert --hf-overrides", "the checkpoint says what it is; --dtype is the computation's"),
    _of(VLLM, "--max-num-batched-tokens --enable-chunked-prefill --no-enable-chunked-prefill "
        "--max-num-partial-prefills --long-prefill-token-threshold",
        "--prefill-chunk and --max-batch-prefill-tokens; prompts are always read in pieces"),
    _of(VLLM, "--enable-prefix-caching --no-enable-prefix-caching --prefix-caching-hash-algo",
        "--prompt-cache, --no-prompt-cache"),
    _of(VLLM, "--num-gpu-blocks-override --kv-cache-memory-bytes", "--kv-cache-budget"),
    _of(VLLM, "--scheduling-policy --async-scheduling --preemption-mode",
        "a request's priority, --priority-ageing-seconds and --no-preemption"),
    _of(VLLM, "--enforce-eager --compilation-config -O --attention-backend --max-seq-len-to-capture "
        "--cuda-graph-sizes", "--no-warmup puts compiling off; leave it out otherwise"),
    _of(VLLM, "--trust-remote-code", "no code of a checkpoint is ever run"),
    _of(VLLM, "--download-dir --revision --tokenizer --tokenizer-mode --tokenizer-revision --hf-token",
        "`mlxcel download` fetches; the tokenizer is the checkpoint's"),
    _of(VLLM, "--enable-lora --lora-modules --max-loras --max-lora-rank", "adapters are not in this version"),
    _of(VLLM, "--speculative-config", "speculative decoding is not in this version"),
    _of(VLLM, "--guided-decoding-backend --structured-outputs-config", "structured output is not in this version"),
    _of(VLLM, "--enable-auto-tool-choice --tool-call-parser --reasoning-parser --response-role --tool-parser-plugin "
        "--chat-template-content-format --default-chat-template-kwargs",
        "tools are not in this version; --chat-template-kwargs and --reasoning-format"),
    _of(VLLM, "--limit-mm-per-prompt --mm-processor-kwargs --language-model-only", "this version serves text alone"),
    _of(VLLM, "--override-generation-config", "sampling flags, such as --temp, and --generation-config"),
    _of(VLLM, "--uvicorn-log-level --disable-uvicorn-access-log --disable-log-requests --enable-log-requests "
        "--disable-log-stats --max-log-len --enable-server-load-tracking", "-q, --no-log-requests and --log-format"),
    _of(VLLM, "--allow-credentials --allowed-methods --allowed-headers",
        "--allowed-origins; methods and headers are those that clients need"),
    _of(VLLM, "--ssl-keyfile --ssl-certfile --ssl-ca-certs --root-path --middleware",
        "put a proxy in front, such as nginx or caddy; the hook mlxcel_routes adds routes"),
    _of(VLLM, "--uds", "--host PATH.sock"),
    _of(VLLM, "--return-tokens-as-token-ids --enable-prompt-tokens-details --enable-request-id-headers "
        "--disable-frontend-multiprocessing --h11-max-incomplete-event-size --logits-processors --enable-sleep-mode",
        "leave it out: requests ask for what they want"),
)  # fmt: skip

BY_FLAG: Final = {flag: foreign for foreign in reversed(FOREIGN) for flag in foreign.flags}


class ServeCommand(SectionCommand):
    """Arguments that cannot be parsed are looked over for flags of others: click would take some for ours with a value,
    and complain about that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except (click.UsageError, UsageError):
            if (found := foreign_flag(given)) is not None:
                flag, foreign = found
                raise UsageError(
                    f"{flag} is a flag of {foreign.program} that mlxcel has not", hint=foreign.hint
                ) from None
            raise


def foreign_flag(args: Sequence[str]) -> tuple[str, Foreign] | None:
    """The first argument that is one of another program's flags."""
    for argument in args:
        if argument == "--":
            return None
        flag = argument.partition("=")[0]
        if flag in BY_FLAG:
            return flag, BY_FLAG[flag]
    return None
