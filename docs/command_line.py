"""The reference of a command, as Markdown, made from the options and the help that it declares."""

from __future__ import annotations

import re
from typing import Any

# Help texts are written for a terminal. In prose, these are code.
_TOKEN = re.compile(
    r"(?P<code>`[^`]+`|'[^'\s]+ -[^']*'|(?<![\w-])--?[a-z][\w-]*(?: [A-Z]+\b)?"
    r"|\b[A-Za-z]+(?:[._][A-Za-z]+)+(?:\(\))?)"
    r"|(?P<special>[\[\]*_<>])"
)
_URL = re.compile(r"(https://[\w./-]*[\w/])")
_EXAMPLE = re.compile(r"\[bold\](.*?)\[/\]((?:\n  .*)*)")
_REMARKS = re.compile(r"\s*\[((?:default: |required|env var: |[x\d]).*)\]$", re.DOTALL)
_TYPE = re.compile(r"<(\w+)[^>]*>")
_PLACEHOLDERS = {"float": "NUMBER", "int": "N", "integer": "N", "path": "PATH", "str": "TEXT"}


def describe_command(name: str) -> str:
    """Return the usage, description, examples, arguments and options of a command.

    Args:
        name: The name of a subcommand; empty for `phalanx` itself, without its description.
    """
    import typer

    from phalanx import cli

    group: Any = typer.main.get_command(cli.make_app())
    context = typer.Context(group, info_name="phalanx")
    if not name:
        return _describe_parameters(group, context, "phalanx")
    command = group.commands[name]
    context = typer.Context(command, info_name=name, parent=context)
    usage = " ".join(["phalanx", name, *command.collect_usage_pieces(context)])
    usage = re.sub(r"\{(\w+)\}", r"\1", usage)
    return "\n".join(
        (
            f"```text\n{usage}\n```\n",
            _describe_help(command.help),
            _describe_parameters(command, context, f"phalanx {name}"),
        )
    )


def summarize_commands() -> str:
    """Return a table of the commands and the first sentences of their help."""
    import typer

    from phalanx import cli

    group: Any = typer.main.get_command(cli.make_app())
    rows = ["| command | use |", "| --- | --- |"]
    for name in cli.COMMANDS:
        first = group.commands[name].help.partition("\n")[0]
        rows.append(f"| [`phalanx {name}`](cli/{name}.md) | {mark_prose(first)} |")
    return "\n".join(rows)


def mark_prose(text: str) -> str:
    """Return a sentence of a help text as Markdown, with its code marked as such."""

    def mark(match: re.Match[str]) -> str:
        if code := match["code"]:
            return f"`{code.strip('`')}`" if code[0] != "'" else f"`{code[1:-1]}`"
        return "\\" + match["special"]

    text = text.replace("\\[", "[")
    parts = _URL.split(text)  # every second part is a URL
    parts[::2] = [_TOKEN.sub(mark, part) for part in parts[::2]]
    parts[1::2] = [f"<{url}>" for url in parts[1::2]]
    return "".join(parts)


def _describe_help(text: str) -> str:
    """Return the paragraphs of a help text; examples, in bold there, are blocks of code."""
    parts = []
    for paragraph in text.split("\n\n"):
        examples = _EXAMPLE.findall(paragraph)
        if not examples:
            parts.append(mark_prose(paragraph))
            continue
        lines = []
        for command, explanation in examples:
            lines += [f"# {each.strip()}" for each in explanation.strip().splitlines()]
            lines += [command.replace("\\[", "["), ""]
        parts.append("\n".join(("```sh", *lines[:-1], "```")))
    return "\n\n".join(parts) + "\n"


def _describe_parameters(command: Any, context: Any, program: str) -> str:
    """Return a section for each panel of the help, with the arguments or options in it."""
    panels: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:  # hidden
            continue
        is_argument = parameter.param_type_name == "argument"
        title = getattr(parameter, "rich_help_panel", None)
        title = title or ("Arguments" if is_argument else "Options")
        panels.setdefault(title, []).append(_describe_parameter(*record, is_argument=is_argument))
    if "Options" in panels and len(panels) > 1:  # --help, declared last, is no reason to be first
        panels = {title: panels[title] for title in sorted(panels, key=_order(list(panels)))}
    sections = [f"## {title}\n\n" + "\n".join(entries) for title, entries in panels.items()]
    return f"```{{program}} {program}\n```\n\n" + "\n".join(sections)


def _order(titles: list[str]) -> Any:
    """Return a key that sorts arguments and plain options before all panels."""
    return lambda title: (title != "Arguments", title != "Options", titles.index(title))


def _describe_parameter(names: str, text: str, *, is_argument: bool) -> str:
    """Return an entry, to which others can link."""
    if is_argument:
        names = _TYPE.sub("", names).strip().upper()
    names = _TYPE.sub(lambda match: _PLACEHOLDERS.get(match[1], match[1].upper()), names)
    remarks = _REMARKS.search(text)
    sentences = [mark_prose(_REMARKS.sub("", text).strip())]
    for remark in remarks[1].split("; ") if remarks else ():
        if remark == "required":
            sentences.append("Required.")
        elif remark.startswith("default: "):
            sentences.append(f"Default: `{remark.removeprefix('default: ')}`.")
        else:
            sentences.append(f"Range: `{remark}`.")
    return f"```{{option}} {names}\n{' '.join(sentences)}\n```\n"
