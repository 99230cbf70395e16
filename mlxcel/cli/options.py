"""click options made of the table of engine options, and what `--help` shows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from mlxcel.cli.context import CliContext
from mlxcel.errors import UsageError
from mlxcel.option_values import Kind
from mlxcel.options import BY_NAME, OPTIONS, Option

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # not generic in every version that is supported


class KindType(_ParamType):
    """A click type that reads with a Kind. click's own numbers let nan, inf and 1_0 through."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name = kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.kind.from_text(value)
        except ValueError:
            self.fail(f"{value!r} is not {self.kind.words}", param, ctx)


class SectionOption(click.Option):
    """An option that `--help` shows under its section's heading."""

    section: str

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionCommand(click.Command):
    """`--help` in sections, in the order in which they first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


SECTIONS: Final = {
    "global": "Everywhere",
    "model": "Model",
    "engine": "Engine",
    "advanced": "Advanced",
    "scheduler": "Advanced",
    "output": "Output",
}


def click_option(option: Option) -> SectionOption:
    """The flag of an engine option: its value goes to the CliContext, not to the command."""

    def note(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        program = ctx.find_object(CliContext)
        if program is None or ctx.resilient_parsing:
            return
        words = max(option.flags, key=lambda flag: flag == f"--{option.name.replace('_', '-')}")
        if option.switch:
            if value:
                program.give(option, True, words)
            return
        if option.on_off:
            if value is not None:
                program.give(option, value, words if value else f"--no-{words[2:]}")
            return
        for item in value:
            program.give(option, item, words)

    shape: dict[str, Any] = (
        {"is_flag": True, "default": False}
        if option.switch
        else {"default": None}
        if option.on_off
        else {
            "multiple": True,  # so that two different values are noticed
            "type": KindType(option.kind),
            "metavar": option.kind.metavar,
        }
    )
    flags = [f"{flag}/--no-{flag[2:]}" if option.on_off else flag for flag in option.flags]
    help_text = option.help if option.switch else f"{option.help}  [{option.default_words}]"
    return SectionOption(
        flags, expose_value=False, callback=note, help=help_text, section=SECTIONS[option.group], **shape
    )


def engine_options(*groups: str, without: tuple[str, ...] = ()) -> list[click.Parameter]:
    """The flags of these groups of the table, for a command that loads a model; `without` are names of options that it
    has not."""
    return [
        click_option(option)
        for group in groups
        for option in OPTIONS
        if option.flags and option.group == group and option.name not in without
    ]


def model_argument() -> click.Argument:
    """[MODEL], another way to say --model."""

    def note(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        program = ctx.find_object(CliContext)
        if value is not None and program is not None:
            program.give(BY_NAME["model"], value, "MODEL")

    return click.Argument(("name",), metavar="[MODEL]", required=False, expose_value=False, callback=note)


def config_option() -> SectionOption:
    def note(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> None:
        program = ctx.find_object(CliContext)
        for file in value:
            if program is not None and program.config_file not in (None, file):
                raise UsageError(f"--config is given twice: {program.config_file!r} and {file!r}", hint="give it once")
            if program is not None:
                program.config_file = file

    return SectionOption(
        ("--config",), multiple=True, metavar="FILE", expose_value=False, callback=note, section=SECTIONS["engine"],
        help="Engine options from a TOML file, by their names with `_`.",
    )  # fmt: skip


def global_options() -> list[click.Parameter]:
    """What is accepted before and after every command's name."""

    def louder(ctx: click.Context, parameter: click.Parameter, value: int) -> None:
        program = ctx.find_object(CliContext)
        if program is not None and value:
            program.louder(value)

    def silence(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        program = ctx.find_object(CliContext)
        if program is not None and value:
            program.silence()

    quiet: dict[str, Any] = {"expose_value": False, "section": SECTIONS["global"]}
    return [
        *(click_option(option) for option in OPTIONS if option.flags and option.group == "global"),
        SectionOption(
            ("-v", "--verbose"), count=True, is_eager=True, callback=louder, **quiet,
            help="Say more: -v what is in force and why, -vv everything, with traces.",
        ),
        SectionOption(("-q", "--quiet"), is_flag=True, is_eager=True, callback=silence, help="Only errors.", **quiet),
    ]  # fmt: skip


def conflict(first: str, second: str) -> UsageError:
    """Two options that exclude each other."""
    return UsageError(f"{first} and {second} exclude each other", hint="leave one of them out")
