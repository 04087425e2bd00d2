"""Print what a virtual environment lacks of pyproject.toml; nothing if it is complete.

Usage: ``python scripts/missing.py EXTRA``. Run by scripts/setup with the interpreter of .venv. Uses only pip's own
parser of requirements, so that it works in a virtual environment with nothing in it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def requirements(extra: str) -> Iterator[Requirement]:
    """Return the requirements of the package and of one extra; extras of our own are followed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    waiting, seen = [extra], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in project["optional-dependencies"][name]:
            requirement = Requirement(line)
            if requirement.name == project["name"]:
                waiting.extend(requirement.extras)
            else:
                lines.append(line)
    return (Requirement(line) for line in lines)


def lacks(requirement: Requirement) -> bool:
    """Return True if a requirement that applies here is not installed, or in another version."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return False
    try:
        return not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return True


def main() -> None:
    """Print one line for each requirement that is missing, and one if this checkout itself is not installed."""
    found = [str(requirement) for requirement in requirements(sys.argv[1]) if lacks(requirement)]
    spec = util.find_spec("headrace")
    if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "src"):
        found.append("headrace")
    sys.stdout.writelines(line + "\n" for line in found)


if __name__ == "__main__":
    main()
