"""Mutation testing of the control plane: does a fault in ``kv/``, ``sched/`` or ``tiers/`` get found?

    python tools/mutate.py                        200 mutants drawn at random: simulator first, then unit tests
    python tools/mutate.py --named                the named faults, by the simulator alone
    python tools/mutate.py --only FINGERPRINT     one mutant again, with its diff
    python tools/mutate.py --list                 count what could be drawn

Each mutant is judged in a copy of the project, by processes of their own; the working tree is never changed. Mutants
that were shown to be equivalent stand, each with its reason, in ``tools/mutants_equivalent.toml`` and do not count.
Results go to a JSON file after each verdict, and ``--resume`` goes on with it. See docs/mutation.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation.named import NamedMutant, check_named, read_named
from mutation.operators import Mutant, diff_of, mutants_in
from mutation.workshop import UNIT_TESTS, Limits, Verdict, Workshop

PROJECT = Path(__file__).resolve().parents[1]
NAMED = Path(__file__).with_name("mutants_named.toml")
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
ROOMS = ("kv", "sched", "tiers")


@dataclass
class Entry:
    """A mutant and its verdict, as it stands in the JSON file."""

    key: str
    file: str
    scope: str
    operator: str
    line: int
    diff: str
    killed_by: str
    how: str
    seconds: float


class Crew:
    """Some workshops that judge side by side."""

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder = folder
        self._local = threading.local()
        self._made = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(processes)

    def workshop(self) -> Workshop:
        """Return the workshop of this thread."""
        shop: Workshop | None = getattr(self._local, "shop", None)
        if shop is None:
            with self._lock:
                self._made += 1
                shop = self._local.shop = Workshop(PROJECT, self._folder / f"copy{self._made}")
        return shop

    def judge(self, jobs: Sequence[Callable[[Workshop], Entry]]) -> Iterator[Entry]:
        """Yield the entries of some jobs, in the order of the jobs."""
        yield from self._pool.map(lambda job: job(self.workshop()), jobs)

    def close(self) -> None:
        """Wait for what runs; start nothing more."""
        self._pool.shutdown(cancel_futures=True)


class Ledger:
    """The JSON file of a campaign: written after each verdict."""

    def __init__(self, path: Path, facts: dict[str, object], *, resume: bool) -> None:
        self._path, self._facts = path, facts
        self.entries: dict[str, Entry] = {}
        if resume and path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            different = {name for name, value in facts.items() if document.get(name) != value}
            if different:
                raise SystemExit(f"{path} is of a campaign with other {', '.join(sorted(different))}")
            self.entries = {entry["key"]: Entry(**entry) for entry in document["mutants"]}

    def add(self, entry: Entry) -> None:
        """Note a verdict."""
        self.entries[entry.key] = entry
        document = {**self._facts, "mutants": [asdict(item) for item in self.entries.values()]}
        self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_equivalent(path: Path) -> dict[str, str]:
    """Return the reason for each fingerprint of a reviewed equivalent mutant."""
    if not path.exists():
        return {}
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return {entry["fingerprint"]: entry["reason"] for entry in document.get("equivalent", [])}


def main() -> int:
    """Do what the command line says. Return 1 if a named mutant survives or the code fails as it stands."""
    options = _options()
    limits = Limits(
        sim_seeds=options.sim_seeds,
        sim_steps=options.sim_steps,
        sim_limit_s=options.sim_limit_s,
        tests=() if options.no_tests or options.named is not None else UNIT_TESTS,
    )
    if options.list:
        return _list(mutants_in(PROJECT / "src", options.rooms))
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        crew = Crew(Path(folder), options.processes)
        try:
            if not options.no_baseline and not _healthy(crew, limits):
                return 1
            if options.named is not None:
                return _named(options, crew, limits)
            return _mechanical(options, crew, limits)
        finally:
            crew.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200, help="how many to draw [200]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw [0]")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help=f"rooms of the package [{' '.join(ROOMS)}]")
    parser.add_argument("--sim-seeds", type=int, default=1000, help="most simulator seeds for a mutant [1000]")
    parser.add_argument("--sim-steps", type=int, default=200, help="least steps of a seed [200]")
    parser.add_argument("--sim-limit-s", type=float, default=900.0, help="seconds for all seeds; more is a hang [900]")
    parser.add_argument("--no-tests", action="store_true", help="leave the unit tests out")
    parser.add_argument("--no-baseline", action="store_true", help="do not judge the unchanged code first")
    parser.add_argument("--processes", type=int, default=2, help="mutants judged side by side [2]")
    parser.add_argument("--json", type=Path, default=Path("mutants.json"), help="file for the results [mutants.json]")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --json")
    parser.add_argument("--only", nargs="+", metavar="FINGERPRINT", help="judge these mutants only")
    parser.add_argument("--named", nargs="*", metavar="NAME", help="judge named mutants: all, or those given")
    parser.add_argument("--list", action="store_true", help="count the mutants that could be drawn, and stop")
    return parser.parse_args()


def _list(mutants: Sequence[Mutant]) -> int:
    for title, counts in (
        ("operator", Counter(mutant.operator for mutant in mutants)),
        ("file", Counter(mutant.file for mutant in mutants)),
    ):
        print(f"by {title}:")
        print("\n".join(f"  {count:>5}  {name}" for name, count in counts.most_common()))
    print(f"{len(mutants)} mutants")
    return 0


def _healthy(crew: Crew, limits: Limits) -> bool:
    """Judge the code as it is: a fault that is there already would kill every mutant."""
    file = "headrace/kv/__init__.py"

    def job(shop: Workshop) -> Entry:
        return _entry("unchanged", file, "", "", 0, "", shop.judge(file, shop.text(file), limits))

    (entry,) = crew.judge([job])
    if entry.killed_by:
        print(f"the unchanged code fails already ({entry.killed_by}): {entry.how}")
        return False
    print(f"the unchanged code passes in {entry.seconds:.0f} s", flush=True)
    return True


def _entry(key: str, file: str, scope: str, operator: str, line: int, diff: str, verdict: Verdict) -> Entry:
    return Entry(key, file, scope, operator, line, diff, verdict.killed_by, verdict.how, round(verdict.seconds, 2))


# Mechanical mutants.


def _mechanical(options: argparse.Namespace, crew: Crew, limits: Limits) -> int:
    everything = mutants_in(PROJECT / "src", options.rooms)
    reasons = read_equivalent(EQUIVALENT)
    order = sorted(everything, key=lambda mutant: mutant.fingerprint)
    random.Random(options.seed).shuffle(order)
    if options.only:
        order = [mutant for mutant in order if mutant.fingerprint in options.only]
        missing = set(options.only) - {mutant.fingerprint for mutant in order}
        if missing:
            raise SystemExit(f"no such mutant: {', '.join(sorted(missing))}")
    facts = {
        "kind": "mutants",
        "rooms": list(options.rooms),
        "seed": options.seed,
        "possible": len(everything),
        "limits": {**asdict(limits), "tests": list(limits.tests)},
    }
    ledger = Ledger(options.json, facts, resume=options.resume)
    wanted = len(order) if options.only else options.mutants
    drawn = _judge_until(order, wanted, crew, limits, ledger)
    _report([entry for entry in drawn if entry.killed_by != "import"], reasons, options)
    stale = set(reasons) - {mutant.fingerprint for mutant in everything}
    if stale:
        print(f"\n{EQUIVALENT.name} names mutants that are no more: {', '.join(sorted(stale))}")
    return 0


def _judge_until(order: Sequence[Mutant], wanted: int, crew: Crew, limits: Limits, ledger: Ledger) -> list[Entry]:
    """Judge mutants in order until so many are programs at all; those that do not even import show nothing."""
    drawn: list[Entry] = []
    place = 0
    while place < len(order):
        missing = wanted - sum(entry.killed_by != "import" for entry in drawn)
        if missing <= 0:
            break
        batch = order[place : place + missing]
        place += len(batch)
        fresh = [mutant for mutant in batch if mutant.fingerprint not in ledger.entries]
        for number, entry in enumerate(crew.judge([_job(mutant, limits) for mutant in fresh]), start=1):
            ledger.add(entry)
            verdict = f"killed by {entry.killed_by}" if entry.killed_by else "SURVIVES"
            print(f"{number:>4}/{len(fresh)} {entry.key} {entry.file}:{entry.line} {entry.operator}: {verdict} "
                  f"({entry.seconds:.0f} s) {entry.how[:100]}", flush=True)  # fmt: skip
        drawn += [ledger.entries[mutant.fingerprint] for mutant in batch]
    return drawn


def _job(mutant: Mutant, limits: Limits) -> Callable[[Workshop], Entry]:
    def job(shop: Workshop) -> Entry:
        text = shop.text(mutant.file)
        verdict = shop.judge(mutant.file, mutant.apply(text), limits)
        return _entry(
            mutant.fingerprint, mutant.file, mutant.scope, mutant.operator, mutant.line, mutant.diff(text), verdict
        )

    return job


def _report(entries: Sequence[Entry], reasons: dict[str, str], options: argparse.Namespace) -> None:
    """Print the survivors and the table."""
    survivors = [entry for entry in entries if not entry.killed_by and entry.key not in reasons]
    equivalent = [entry for entry in entries if not entry.killed_by and entry.key in reasons]
    wrong = [entry for entry in entries if entry.killed_by and entry.key in reasons]
    for entry in survivors:
        print(f"\nSURVIVES {entry.key} {entry.scope} ({entry.operator})\n{entry.diff}")
    for entry in wrong:
        print(f"\n{EQUIVALENT.name} is wrong: {entry.key} is killed by {entry.killed_by}: {entry.how}")
    print()
    columns = ("room", "mutants", "equivalent", "by simulator", "with unit tests", "survivors")
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for room in [*options.rooms, "all"]:
        mine = [entry for entry in entries if room == "all" or entry.file.startswith(f"headrace/{room}/")]
        same = sum(entry in equivalent for entry in mine)
        counted = len(mine) - same
        by_simulator = sum(entry.killed_by == "simulator" for entry in mine)
        killed = sum(bool(entry.killed_by) for entry in mine)
        cells = (
            room,
            str(len(mine)),
            str(same),
            f"{by_simulator} ({_share(by_simulator, counted)})",
            f"{killed} ({_share(killed, counted)})",
            str(counted - killed),
        )
        print("| " + " | ".join(cells) + " |")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


# Named mutants.


def _named(options: argparse.Namespace, crew: Crew, limits: Limits) -> int:
    mutants = read_named(NAMED)
    if options.named:
        unknown = set(options.named) - {mutant.name for mutant in mutants}
        if unknown:
            raise SystemExit(f"no named mutant {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant.name in options.named]
    problems = check_named(mutants, PROJECT / "src")
    for problem in problems:
        print(problem)
    if problems:
        return 1
    facts = {"kind": "named mutants", "limits": {**asdict(limits), "tests": list(limits.tests)}}
    ledger = Ledger(options.json, facts, resume=options.resume)
    fresh = [mutant for mutant in mutants if mutant.name not in ledger.entries]
    for entry in crew.judge([_named_job(mutant, limits) for mutant in fresh]):
        ledger.add(entry)
        verdict = "found" if entry.killed_by == "simulator" else f"NOT FOUND {entry.killed_by}"
        print(f"{entry.key:<48} {verdict} ({entry.seconds:.0f} s) {entry.how[:120]}", flush=True)
    missed = [mutant for mutant in mutants if ledger.entries[mutant.name].killed_by != "simulator"]
    print(f"\n{len(mutants) - len(missed)} of {len(mutants)} found within {limits.sim_seeds} seeds")
    for mutant in missed:
        print(f"\nMISSED {mutant.name}: {mutant.fault}\n{ledger.entries[mutant.name].diff}")
    return 1 if missed else 0


def _named_job(mutant: NamedMutant, limits: Limits) -> Callable[[Workshop], Entry]:
    def job(shop: Workshop) -> Entry:
        text = shop.text(mutant.path)
        changed = mutant.apply(text)
        line = text.count("\n", 0, text.index(mutant.search[0])) + 1
        verdict = shop.judge(mutant.path, changed, limits)
        return _entry(mutant.name, mutant.path, "", "named", line, diff_of(mutant.path, text, changed), verdict)

    return job


def found_within(names: Iterable[str], sim_seeds: int, *, processes: int = 1) -> dict[str, str]:
    """Judge some named mutants by the simulator; return how each was found, "" if it was not. For tests.

    Args:
        names: of named mutants.
        sim_seeds: most seeds for each.
        processes: judged side by side.
    """
    chosen = {mutant.name: mutant for mutant in read_named(NAMED)}
    limits = Limits(sim_seeds=sim_seeds, tests=())
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        crew = Crew(Path(folder), processes)
        try:
            entries = list(crew.judge([_named_job(chosen[name], limits) for name in names]))
        finally:
            crew.close()
    return {entry.key: entry.how if entry.killed_by == "simulator" else "" for entry in entries}


if __name__ == "__main__":
    sys.exit(main())
