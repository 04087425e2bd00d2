"""``headrace plan MODEL --device NAME``: what fits, and which flag to change. Needs neither torch nor the device."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError
from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.parser import CommandParser
from headrace.cli.present import EXIT_FAILED, EXIT_OK
from headrace.config.flags import section_from
from headrace.config.option import option

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.plan import MemoryPlan
    from headrace.engine.plan_attention import AttentionChoice

GIB = 1 << 30


@dataclass(frozen=True)
class PlanOptions:
    """The device to plan for."""

    device_memory: int | None = option(
        None, "Memory of one device, like 80G (default: the table's; for a CPU this machine's).", low=1
    )
    json: bool = option(False, "Print one JSON document in place of the table.")


def build_parser() -> CommandParser:
    """Return the parser of this command."""
    parser = CommandParser(
        "plan",
        "Size a model on a device: weights, KV cache, concurrency. Exit code 1: no.",
        usage="[MODEL] --device NAME [flags]",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="default",
        help="directory, .gguf file, config.json, hub name ORG/NAME, or 'default' [default]",
    )
    parser.add_topic("plan", PlanOptions)
    add_engine_flags(parser)
    return parser


def device_names() -> list[str]:
    """Return the names that ``--device`` takes here."""
    from headrace.platforms.devices import DEVICES

    return list(DEVICES)


def split_device(argv: list[str]) -> tuple[str, list[str]]:
    """Take ``--device NAME`` out of the arguments: here it names a row of the device table, not a choice of the engine.

    Returns:
        The name ("cpu" if not given), and the other arguments.

    Raises:
        ConfigError: the flag without a value.
    """
    name, rest, words = "cpu", [], iter(argv)
    for word in words:
        if word == "--device":
            value = next(words, None)
            if value is None or value.startswith("-"):
                raise ConfigError(f"--device needs a name: {', '.join(device_names())}", param="device")
            name = value
        elif word.startswith("--device="):
            name = word.removeprefix("--device=")
        else:
            rest.append(word)
    return name, rest


def run(argv: list[str]) -> int:
    """Print the plan; return 0 if the model fits and 1 if not."""
    parser = build_parser()
    device_name, rest = split_device(argv)
    flags = parser.parse(rest)
    plan = plan_for(flags, device_name)
    if flags_json(flags):
        import msgspec

        print(msgspec.json.encode(plan).decode())
    else:
        print(table(plan))
    return EXIT_OK if plan.fits else EXIT_FAILED


def flags_json(flags: argparse.Namespace) -> bool:
    """Return True if ``--json`` is given."""
    return section_from(flags, PlanOptions).json


def plan_for(flags: argparse.Namespace, device_name: str) -> MemoryPlan:
    """Make the plan that the flags ask for.

    Raises:
        ConfigError: unknown device, model not found, options that do not go together.
    """
    from headrace.config.decoder import parse_decoder
    from headrace.engine.plan import make_plan, plan_files
    from headrace.platforms.devices import device_record

    options = section_from(flags, PlanOptions)
    record = device_record(device_name)
    config = _on(engine_config(flags, flags.model), record.kind)
    files = plan_files(config.model)
    memory_bytes = options.device_memory or record.memory_bytes or _memory_of_this_machine()
    return make_plan(flags.model, parse_decoder(files.config), record, memory_bytes, config, quantized=files.quantized)


def _on(config: EngineConfig, kind: str) -> EngineConfig:
    """Return the configuration with the engine's device set, checked against the rules for that device."""
    from headrace.config import check_rules

    device = "cpu" if kind == "cpu" else "cuda"
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, device=device))
    check_rules(config)
    return config


def _memory_of_this_machine() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def table(plan: MemoryPlan) -> str:
    """Return the plan as text for people."""

    def row(name: str, size: int, note: str = "") -> str:
        return f"  {name:<26}{size / GIB:>10.3f} GiB  {note}".rstrip()

    ranks = plan.tensor_parallel_size
    each = " on each rank" if ranks > 1 else ""
    lines = [
        f"{plan.model}: {plan.architecture}, {plan.parameters / 1e9:.3f} B parameters",
        f"on {ranks} x {plan.device} ({plan.memory_bytes / GIB:.1f} GiB)",
        f"weights {plan.weight_format}, KV cache {plan.cache_dtype}",
        "",
        f"memory{each}",
        row(
            "weights",
            plan.weights.total,
            f"embedding {plan.weights.embedding / GIB:.3f}, head {plan.weights.head / GIB:.3f}",
        ),
        row("activations", plan.activation_bytes, "largest step, estimate"),
        row("logits and sampling", plan.logits_bytes, f"{plan.max_num_seqs} rows"),
        row("driver and libraries", plan.reserved_bytes),
        row("KV cache", plan.kv_bytes, f"{plan.kv_tokens} tokens, {plan.kv_token_bytes} bytes for each further one"),
        row("free", plan.free_bytes, "" if plan.free_bytes >= 0 else "missing"),
        "",
        *split(plan),
        "",
        "attention",
        *map(attention_row, plan.attention),
        "",
        f"requests at once (KV cache; --max-num-seqs is {plan.max_num_seqs})",
        *(f"  {entry.context_tokens:>9} tokens {entry.requests:>8}" for entry in plan.concurrency),
        "",
        "limits of the hardware, from its data sheet",
        f"  decode step, one request   {plan.decode_ms_floor:>10.2f} ms at least",
        f"  prompt tokens a second     {plan.prefill_tokens_per_s_ceiling:>10.0f} at most",
        "",
        verdict(plan),
    ]
    lines += [f"  {'consider' if plan.fits else 'change'}: {advice.flag}  ({advice.why})" for advice in plan.advice]
    return "\n".join(lines)


def split(plan: MemoryPlan) -> list[str]:
    """Return the lines that say how the KV cache is divided between groups of layers."""
    lines = [f"KV cache of a request of {plan.max_model_len} tokens, by group of layers"]
    if len(plan.groups) > 1:
        lines[0] += f"; granules of {plan.granule_bytes} bytes, lent in extents of {plan.extent_bytes}"
    for group, alike in Counter(plan.groups).items():
        block = f"{group.block_tokens} tokens" if group.block_tokens else "a state"
        layers = f"{group.layers} layers" if alike == 1 else f"{alike} x {group.layers} layers"
        lines.append(
            f"  {group.kind:<11}{layers:<16}{group.request_blocks:>7} blocks of {block:<11}"
            f"{group.block_bytes:>12} bytes{group.padding:>7.1%} padding{alike * group.share:>7.1%} of it"
        )
    return lines


def attention_row(choice: AttentionChoice) -> str:
    """Return the line that says which backend a group of layers gets, and why not another."""
    refused = "".join(f"; not {name}: {why}" for name, why in choice.refused.items())
    layers = f"{choice.layers} layer{'s' if choice.layers > 1 else ''}, heads of {choice.head_dim}"
    return f"  {choice.kind:<10}{layers:<26}{choice.backend}, because it {choice.reason}{refused}"


def verdict(plan: MemoryPlan) -> str:
    """Return the line that says whether it fits."""
    if plan.free_bytes < 0:
        return f"DOES NOT FIT: {-plan.free_bytes / GIB:.3f} GiB are missing"
    if not plan.fits and plan.kv_tokens == 0:
        return "DOES NOT FIT: there is no room for a KV cache"
    if not plan.fits:
        return f"DOES NOT FIT: a request of {plan.max_model_len} tokens; the KV cache holds {plan.kv_tokens}"
    shorter = f"; the model could take {plan.model_max_len}" if plan.max_model_len < plan.model_max_len else ""
    return f"fits: requests of up to {plan.max_model_len} tokens{shorter}"
