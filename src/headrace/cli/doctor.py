"""``headrace doctor``: look at this machine and this installation, and say what to do about each problem."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.cli.parser import CommandParser
from headrace.cli.present import EXIT_FAILED, EXIT_OK
from headrace.config.flags import section_from
from headrace.config.option import option

if TYPE_CHECKING:
    from headrace.cli.doctor_checks import Finding


@dataclass(frozen=True)
class DoctorOptions:
    """What to show."""

    json: bool = option(False, "Print one JSON document in place of the table.")


def build_parser() -> CommandParser:
    """Return the parser of this command."""
    parser = CommandParser("doctor", "Check this machine and this installation. Exit code 1 if something is broken.")
    parser.add_topic("output", DoctorOptions)
    return parser


def run(argv: list[str]) -> int:
    """Print the findings; return 1 if one of them is "broken", else 0."""
    options = section_from(build_parser().parse(argv), DoctorOptions)
    from headrace.cli.doctor_checks import BROKEN, run_checks

    findings = run_checks()
    if options.json:
        import json

        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        print(table(findings))
    return EXIT_FAILED if any(finding.status == BROKEN for finding in findings) else EXIT_OK


def table(findings: list[Finding]) -> str:
    """Return the findings as text for people."""
    from headrace.cli.doctor_checks import BROKEN, OK

    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<7} {finding.name:<16} {finding.detail}")
        if finding.cure:
            lines.append(f"{'':<24} -> {finding.cure}")
    broken = sum(finding.status == BROKEN for finding in findings)
    notes = sum(finding.status not in (OK, BROKEN) for finding in findings)
    lines.append(f"\n{len(findings)} checks, {broken} broken, {notes} to know")
    return "\n".join(lines)
