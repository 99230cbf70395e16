"""Flags of the sampling parameters (docs/spec/clients.md 0.3) by llama.cpp's names, and the fields that they give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import attrs
import click

from mlxcel.cli.options import KindType, SectionOption, conflict
from mlxcel.core.param_table import FIELDS
from mlxcel.core.params import SamplingParams
from mlxcel.core.stage_order import SEQUENCE_LETTERS
from mlxcel.errors import UsageError
from mlxcel.option_values import SWITCH, TEXT, Kind, one_of, real, whole

SECTION: Final = "Sampling"


@attrs.frozen
class SamplingFlag:
    """A field of SamplingParams on the command line. `parameter` is click's name of it, where it is not the field's."""

    field: str
    flags: tuple[str, ...]
    kind: Kind
    help: str
    repeatable: bool = False
    parameter: str = attrs.field(default=attrs.Factory(lambda self: self.field, takes_self=True))
    absent: str = "none"  # what a default of None means, in words

    @property
    def switch(self) -> bool:
        return self.kind is SWITCH

    @property
    def default_words(self) -> str:
        """The command line's default, as people read it."""
        clients = next(field.clients for field in FIELDS if field.name == self.field)
        value = clients.get("cli", getattr(SamplingParams(), self.field))
        return self.absent if value is None else value_words(value)


def value_words(value: Any) -> str:
    """A default as people read it."""
    if isinstance(value, tuple):
        return ", ".join(repr(item) for item in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


_BIAS: Final = re.compile(r"([0-9]{1,10})(?:([+-](?:[0-9]{1,3}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))|=(false))", re.ASCII)


def _bias(text: str) -> tuple[int, float | bool]:
    found = _BIAS.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(found[1]), False if found[3] else float(found[2])


def _stages(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in re.split("[;,]", text)) if text.strip() else ()


def _letters(text: str) -> tuple[str, ...]:
    if set(text) - set(SEQUENCE_LETTERS):
        raise ValueError(text)
    return tuple(SEQUENCE_LETTERS[letter] for letter in text)


def _milliseconds(text: str) -> float:
    return float(_REAL.from_text(text)) * 1000


def _from_text_only(metavar: str, words: str, read: Any) -> Kind:
    return Kind(metavar, words, read, lambda value: read(value))


_REAL: Final = real()
_WHOLE: Final = whole()
_LETTERS: Final = "".join(SEQUENCE_LETTERS)
_BIAS_KIND: Final = _from_text_only("ID(+/-)V", "a token id with + or - and a number, or ID=false", _bias)
_STAGES_KIND: Final = _from_text_only("LIST", "names of stages, separated by ; or ,", _stages)
_LETTERS_KIND: Final = _from_text_only("LETTERS", f"letters of {_LETTERS}", _letters)
_SECONDS_KIND: Final = _from_text_only("SECONDS", "a number", _milliseconds)

SAMPLING_FLAGS: Final = (
    SamplingFlag(
        "max_tokens", ("-n", "--max-tokens"), _WHOLE,
        "Most tokens of the reply; -1: to its end or the end of the context.",
    ),
    SamplingFlag("min_tokens", ("--min-tokens",), _WHOLE, "Tokens that the reply must have before it may end."),
    SamplingFlag(
        "temperature", ("-t", "--temp", "--temperature"), _REAL,
        "0 takes the best token each time; more lets others in.",
    ),
    SamplingFlag("top_k", ("--top-k",), _WHOLE, "Draw from the K best tokens; 0: from all."),
    SamplingFlag("top_p", ("--top-p",), _REAL, "Draw from the best tokens that have this share together."),
    SamplingFlag("min_p", ("--min-p",), _REAL, "Draw from tokens with this share of the best one's."),
    SamplingFlag(
        "typical_p", ("--typical-p", "--typical"), _REAL,
        "Draw from the tokens of most usual surprise that have this share together; 1: off.",
    ),
    SamplingFlag(
        "top_n_sigma", ("--top-nsigma",), _REAL,
        "Draw from tokens within so many standard deviations of the best; -1: off.",
    ),
    SamplingFlag("min_keep", ("--min-keep",), _WHOLE, "Tokens that typical-p, top-p, min-p and XTC leave at least."),
    SamplingFlag("xtc_probability", ("--xtc-probability",), _REAL, "How often XTC removes the best tokens; 0: never."),
    SamplingFlag(
        "xtc_threshold", ("--xtc-threshold",), _REAL, "Share from which XTC may remove a token; above 0.5 it does not.",
    ),
    SamplingFlag(
        "dynatemp_range", ("--dynatemp-range",), _REAL,
        "The temperature follows the entropy, by at most so much up and down; 0: it does not.",
    ),
    SamplingFlag("dynatemp_exponent", ("--dynatemp-exponent", "--dynatemp-exp"), _REAL, "The bend of that curve."),
    SamplingFlag(
        "mirostat", ("--mirostat",), _WHOLE, "Hold the surprise instead of filtering: 1 or 2, its version; 0: off.",
    ),
    SamplingFlag("mirostat_tau", ("--mirostat-ent",), _REAL, "The surprise that mirostat aims at, in bits."),
    SamplingFlag("mirostat_eta", ("--mirostat-lr",), _REAL, "How fast mirostat learns."),
    SamplingFlag(
        "adaptive_target", ("--adaptive-target",), _REAL, "Probability that adaptive-p keeps near; -1: off.",
    ),
    SamplingFlag("adaptive_decay", ("--adaptive-decay",), _REAL, "How long adaptive-p remembers."),
    SamplingFlag(
        "repetition_penalty", ("--repeat-penalty", "--repetition-penalty"), _REAL,
        "Divides what the window holds, prompt and reply; 1: off.",
    ),
    SamplingFlag("repeat_last_n", ("--repeat-last-n",), _WHOLE, "That window, in tokens; 0: none, -1: everything."),
    SamplingFlag("presence_penalty", ("--presence-penalty",), _REAL, "Taken from tokens that the reply holds."),
    SamplingFlag(
        "frequency_penalty", ("--frequency-penalty",), _REAL, "Taken from tokens for each time the reply holds them.",
    ),
    SamplingFlag(
        "window_presence_penalty", ("--window-presence-penalty",), _REAL, "Taken from tokens that the window holds.",
    ),
    SamplingFlag(
        "window_frequency_penalty", ("--window-frequency-penalty",), _REAL,
        "Taken from tokens for each time the window holds them.",
    ),
    SamplingFlag(
        "dry_multiplier", ("--dry-multiplier",), _REAL, "Strength against repeated sequences of tokens (DRY); 0: off.",
    ),
    SamplingFlag("dry_base", ("--dry-base",), _REAL, "How much each further token of a sequence weighs."),
    SamplingFlag("dry_allowed_length", ("--dry-allowed-length",), _WHOLE, "Sequences of this length are let be."),
    SamplingFlag(
        "dry_penalty_last_n", ("--dry-penalty-last-n",), _WHOLE, "Tokens that DRY looks back on; 0: none, -1: all.",
    ),
    SamplingFlag(
        "dry_sequence_breakers", ("--dry-sequence-breaker",), TEXT,
        "A text that ends a sequence, instead of the usual ones; repeatable, none: no text does.", repeatable=True,
    ),
    SamplingFlag(
        "logit_bias", ("-l", "--logit-bias"), _BIAS_KIND,
        "Add to a token's logit: 15043+1; 15043=false: never draw it; repeatable.", repeatable=True,
    ),
    SamplingFlag(
        "stop", ("--stop", "-r", "--reverse-prompt"), TEXT, "End the reply before this text; repeatable.",
        repeatable=True,
    ),
    SamplingFlag(
        "stop_token_ids", ("--stop-token-id",), whole(metavar="ID"), "End the reply at this token; repeatable.",
        repeatable=True,
    ),
    SamplingFlag("include_stop_str_in_output", ("--include-stop",), SWITCH, "Print the text that ended the reply."),
    SamplingFlag("ignore_eos", ("--ignore-eos",), SWITCH, "The model cannot end its reply."),
    SamplingFlag("seed", ("-s", "--seed"), _WHOLE, "Same seed, same reply; -1: a fresh one, which is reported."),
    SamplingFlag(
        "logprobs_mode", ("--logprobs-mode",), one_of("raw", "processed"),
        "Log-probabilities of the model's own logits, or of what is left after the chain.",
    ),
    SamplingFlag(
        "reasoning_format", ("--reasoning-format",), one_of("none", "deepseek", "deepseek-legacy", "auto"),
        "How reasoning is told from the reply; none: it is not.",
    ),
    SamplingFlag("t_max_predict_ms", ("--time-limit",), _SECONDS_KIND, "End the reply after this time; 0: never."),
    SamplingFlag(
        "samplers", ("--samplers",), _STAGES_KIND,
        "Stages that run, in their order, such as penalties;top_k;temperature.", absent="all",
    ),
    SamplingFlag(
        "samplers", ("--sampling-seq",), _LETTERS_KIND, f"The same by letters of {_LETTERS}.", parameter="sampling_seq",
        absent="all",
    ),
)  # fmt: skip


def sampling_options() -> list[click.Parameter]:
    """Each passes its value to the command under its parameter's name: None, or no item, where it was not given."""

    def once(ctx: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
        if len(set(values)) > 1:
            raise UsageError(f"{parameter.opts[-1]} is given twice: {values[0]} and {values[1]}", hint="give it once")
        return values[0] if values else None

    def made(flag: SamplingFlag) -> SectionOption:
        words = f"{flag.help}  [{flag.default_words}]"
        if flag.switch:
            return SectionOption((flag.parameter, *flag.flags), is_flag=True, help=words, section=SECTION)
        callback = {} if flag.repeatable else {"callback": once}
        return SectionOption(
            (flag.parameter, *flag.flags), type=KindType(flag.kind), metavar=flag.kind.metavar, multiple=True,
            help=words, section=SECTION, **callback,
        )  # fmt: skip

    pairs = [
        SectionOption(
            ("special", "--special/--no-special"), default=None, section=SECTION,
            help="Print special tokens that the reply holds.  [off]",
        ),
        SectionOption(
            ("add_special", "--add-special/--no-add-special"), default=None, section=SECTION,
            help="Put the tokenizer's BOS before a raw prompt.  [on]",
        ),
        SectionOption(
            ("--strict",), is_flag=True, section=SECTION, help="Refuse values that cannot act, instead of warning.",
        ),
    ]  # fmt: skip
    return [*map(made, SAMPLING_FLAGS), *pairs]


def given_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the flags of `sampling_options` gave. UsageError for flags that contradict each other."""
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for flag in SAMPLING_FLAGS:
        value = parameters[flag.parameter]
        if value is None or value is False or (flag.repeatable and not value):
            continue
        if flag.field in given and given[flag.field] != value:
            raise conflict(spelled[flag.field], flag.flags[0])
        given[flag.field] = value
        spelled[flag.field] = flag.flags[0]
    if given.get("mirostat") and "samplers" in given:
        raise conflict(f"--mirostat {given['mirostat']}", spelled["samplers"])
    if "dry_sequence_breakers" in given:
        given["dry_sequence_breakers"] = _breakers(given["dry_sequence_breakers"])
    if parameters["special"] is not None:
        given["skip_special_tokens"] = not parameters["special"]
    if parameters["add_special"] is not None:
        given["add_special_tokens"] = parameters["add_special"]
    return given


def _breakers(texts: tuple[str, ...]) -> tuple[str, ...]:
    """`none` takes back those before it."""
    last = max((place + 1 for place, text in enumerate(texts) if text == "none"), default=0)
    return texts[last:]
