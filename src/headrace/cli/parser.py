"""The argument parser of all commands: grouped help, help by topic, nearest flag for an unknown one.

Must not know any option by name: flags come from the configuration dataclasses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.cli.present import UsageError, nearest
from headrace.config.flags import add_flags, parse_count


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises `UsageError` in place of exiting, and finds help by topic."""

    def __init__(self, command: str, description: str, *, usage: str = "[flags]", epilog: str = "") -> None:
        super().__init__(
            prog=f"headrace {command}",
            usage=f"headrace {command} {usage}",
            description=description,
            epilog=epilog,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._topics: dict[str, argparse._ArgumentGroup] = {}

    def add_topic(self, topic: str, section: type[Any]) -> None:
        """Add the flags of a configuration section as one group of the help.

        Args:
            topic: word for ``--help=TOPIC``.
            section: dataclass whose fields are options.
        """
        add_flags(self, section)
        group = self._action_groups[-1]
        group.title = f"{topic}: {group.title}"
        for action in group._group_actions:
            if action.nargs is None and action.choices is None:
                action.metavar = _metavar(action)
        self._topics[topic] = group

    def flags(self) -> list[str]:
        """Return all flags, sorted."""
        return sorted(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into a typed error."""
        raise UsageError(f"{message}. Run {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments of the command. Underscores in flag names are read as dashes.

        Raises:
            UsageError: unknown flag (with the nearest known one), surplus argument, or a value that does not parse.
        """
        words = [_dashed(word) for word in argv]
        end = words.index("--") if "--" in words else len(words)
        for word in words[:end]:
            if word.startswith("--help="):
                print(self.help_for(word.removeprefix("--help=")), end="")
                sys.exit(0)
        self._refuse_unknown_flags(words[:end])
        namespace, surplus = self.parse_known_args(words)
        if surplus:
            raise UsageError(f"unexpected argument {surplus[0]!r}. Run {self.prog} --help")
        return namespace

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Name an unknown flag before argparse takes its value for a positional argument."""
        known = self._option_string_actions
        for word in words:
            name = word.split("=", 1)[0]
            if name.startswith("--") and name not in known:
                raise UsageError(f"unknown flag {name}{nearest(name, known)}. Run {self.prog} --help")

    def help_for(self, topic: str) -> str:
        """Return the help of one topic, or of all flags that contain a keyword.

        Raises:
            UsageError: neither a topic nor found in any flag.
        """
        if topic in ("", "all"):
            return self.format_help()
        formatter = self._get_formatter()
        group = self._topics.get(topic)
        if group is not None:
            title, actions = str(group.title), group._group_actions
        else:
            title, actions = f"flags about {topic!r}", [action for action in self._actions if _is_about(action, topic)]
        if not actions:
            topics = ", ".join(self._topics)
            hint = nearest(topic, self._topics)
            raise UsageError(f"no help about {topic!r}{hint}. Topics: {topics}; or any word in a flag")
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help().strip("\n") + "\n"


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, mark, value = word.partition("=")
    return name.replace("_", "-") + mark + value


def _metavar(action: argparse.Action) -> str:
    for ending, word in (("_bytes", "BYTES"), ("_s", "SECONDS"), ("_dir", "DIR"), ("_share", "X")):
        if action.dest.endswith(ending):
            return word
    return {parse_count: "N", float: "X"}.get(action.type, "TEXT")


def _is_about(action: argparse.Action, keyword: str) -> bool:
    text = " ".join([*action.option_strings, action.help or "", action.dest]).lower()
    return keyword.lower() in text
