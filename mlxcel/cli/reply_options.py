"""Options of commands that answer: where the prompt comes from, and what is printed."""

from __future__ import annotations

import click

from mlxcel.cli.options import SectionOption


def prompt_options() -> list[click.Parameter]:
    """Of a prompt that becomes messages."""
    return [
        SectionOption(("-p", "--prompt"), metavar="TEXT", help="The prompt.", section="Prompt"),
        SectionOption(("-f", "--file"), metavar="FILE", help="The prompt, from a file; -: stdin.", section="Prompt"),
        SectionOption(("--system",), metavar="TEXT", help="A system message before it.", section="Prompt"),
        SectionOption(("--messages",), metavar="FILE", help="A conversation, as JSON; -: stdin.", section="Prompt"),
    ]


def output_options() -> list[click.Parameter]:
    return [
        SectionOption(("--show-reasoning",), is_flag=True, help="Print the model's reasoning too.", section="Output"),
        SectionOption(("--no-stream",), is_flag=True, help="Print the reply at its end.", section="Output"),
        SectionOption(("--no-newline",), is_flag=True, help="No newline behind the reply.", section="Output"),
        SectionOption(("--json", "as_json"), is_flag=True, help="One JSON object instead.", section="Output"),
    ]
