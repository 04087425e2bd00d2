"""Mutants with a name: faults that were made in public, each as a small change of today's text.

They stand in ``tools/mutants_named.toml``. A mutant whose text is gone, or stands there twice, is an error and never
passed over: the code has moved on and the mutant must follow. Must not run anything.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NamedMutant:
    """One fault.

    Attributes:
        name: of the mutant.
        fault: what went wrong in public, and where it is described.
        file: path below ``src/headrace``, with slashes.
        search: texts that stand there exactly once each.
        replace: what a wrong engine has in their places.
        needs: kind of setting without which it does no harm; for people.
    """

    name: str
    fault: str
    file: str
    search: tuple[str, ...]
    replace: tuple[str, ...]
    needs: str = ""

    @property
    def path(self) -> str:
        """Path below ``src``."""
        return f"headrace/{self.file}"

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: the text to change is not there exactly once, or the change changes nothing.
        """
        for search, replace in zip(self.search, self.replace, strict=True):
            times = text.count(search)
            if times != 1:
                raise ValueError(f"named mutant {self.name!r}: its text stands {times} times in {self.file}, not once")
            if search == replace:
                raise ValueError(f"named mutant {self.name!r} changes nothing")
            text = text.replace(search, replace)
        return text


def read_named(path: Path) -> list[NamedMutant]:
    """Return the named mutants of a file.

    Raises:
        ValueError: a name twice, or an unknown or missing field.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants = []
    for entry in document.get("mutant", []):
        try:
            mutants.append(
                NamedMutant(**{**entry, "search": _texts(entry["search"]), "replace": _texts(entry["replace"])})
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path.name}: {entry.get('name', 'a mutant without a name')}: {error}") from error
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name}: named twice: {', '.join(twice)}")
    return mutants


def check_named(mutants: list[NamedMutant], source: Path) -> list[str]:
    """Return what is wrong with named mutants as the code stands, a line each; nothing if all can be made.

    Args:
        mutants: to check.
        source: the ``src`` directory.
    """
    problems = []
    for mutant in mutants:
        path = source / mutant.path
        if not path.exists():
            problems.append(f"named mutant {mutant.name!r}: there is no {mutant.file}")
            continue
        try:
            compile(mutant.apply(path.read_text(encoding="utf-8")), mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            problems.append(f"{mutant.name}: {error}")
    return problems


def _texts(value: str | list[str]) -> tuple[str, ...]:
    """Return one text or several. The literals of the file end on a line of their own, which is not meant."""
    return tuple(text.rstrip("\n") for text in ([value] if isinstance(value, str) else value))
