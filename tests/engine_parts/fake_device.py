"""A fake device: its next token is a hash of the prefix, so that batching, restarts and order cannot matter.

Text of its tokens is valid UTF-8 with characters of one to four bytes. Factories at the end are named in tests as
``fake_device:NAME``; the core process imports this module through PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.base.errors import WeightLoadError
from headrace.base.ids import RequestId, Slot
from headrace.config import CacheConfig, EngineConfig, KvEventsConfig, ModelConfig, SchedulerConfig
from headrace.text.token_bytes import byte_alphabet
from headrace.types.cache_specs import FullAttentionSpec, KvLayout, LayerCache
from headrace.types.plans import PlanRow, StepPlan
from headrace.types.results import RowResult, StepResult, TokenLogprobs
from headrace.types.wire import PhaseSeconds
from headrace.types.worker_facts import WorkerFacts

EOS = 256
BOS = 257
VOCAB = 258
POISON = 7
"""A prompt token (a control byte that is never sampled) on which `make_poisoned` dies."""
NAN = 6
"""A prompt token whose row fails by itself."""
_LETTERS = b"abcdefghij \n"
_LONG_STARTS = (b"\xc3\xa9", "你".encode(), "🙂".encode(), "界".encode())


def next_token(prefix: Sequence[int]) -> int:
    """The token that follows a prefix; never EOS."""
    tail = bytes(token for token in prefix[-3:] if token < 256)
    for character in _LONG_STARTS:
        for size in range(len(character) - 1, 0, -1):
            if tail.endswith(character[:size]) and character[0] >= 0x80:
                return character[size]
    digest = hashlib.blake2b(b",".join(str(token).encode() for token in prefix), digest_size=8).digest()
    if digest[0] < 40:
        return _LONG_STARTS[digest[1] % len(_LONG_STARTS)][0]
    return _LETTERS[digest[1] % len(_LETTERS)]


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model answers to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def expected_text(prompt: Sequence[int], count: int) -> str:
    return bytes(expected_tokens(prompt, count)).decode(errors="replace")


def logprob_of(prefix: Sequence[int], token: int) -> float:
    return -((sum(prefix) * 31 + token) % 997) / 100.0


class FakeExecutor:
    """Keeps what a real worker keeps: the tokens of each slot."""

    def __init__(self, *, step_s: float = 0.0, poisoned: bool = False, cache_bytes: int = 1 << 20) -> None:
        self._step_s = step_s
        self._poisoned = poisoned
        self._cache_bytes = cache_bytes
        self._slots: dict[int, list[int]] = {}
        self._facts: dict[int, tuple[int, int | None, int | None]] = {}
        self._plans: deque[StepPlan] = deque()
        self.submitted: list[StepPlan] = []
        self.closed = False

    def start(self) -> WorkerFacts:
        return WorkerFacts(
            layer_caches=[LayerCache(layer, FullAttentionSpec(1, 8, 8, 4)) for layer in range(2)],
            cache_bytes=self._cache_bytes,
            vocab_tokens=VOCAB,
            max_position=2048,
            parameter_bytes=0,
            dtype="float32",
            device="fake",
            attention_backend="fake",
            phases=[PhaseSeconds("fake weights", 0.0)],
        )

    def allocate(self, layout: KvLayout) -> None:
        self.layout = layout

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.submitted.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        for slot in plan.releases:
            del self._slots[slot]
        for start in plan.starts:
            assert start.slot not in self._slots, "a slot was given twice"
            self._slots[start.slot] = list(start.token_ids)
            sampling = start.sampling
            self._facts[start.slot] = (start.prompt_tokens, sampling.logprobs, sampling.prompt_logprobs)
        touched = [*plan.decodes, *(row.slot for row in plan.rows)]
        if self._poisoned and any(POISON in self._slots[slot] for slot in touched):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._step_s:
            time.sleep(self._step_s)  # the device's own time, not a way to synchronise
        decodes = [self._row(self._decode(slot)) for slot in plan.decodes]
        errors = [(index, answer.error) for index, answer in enumerate(decodes) if answer.error is not None]
        tokens = [answer.token_ids[0] if answer.token_ids else 0 for answer in decodes]
        return StepResult(plan.step, [self._row(row) for row in plan.rows], tokens, errors)

    def close(self) -> None:
        self.closed = True

    def _decode(self, slot: int) -> PlanRow:
        _, logprobs, prompt_logprobs = self._facts[slot]
        assert logprobs is prompt_logprobs is None, "a decode in the columns asks for nothing but a token"
        return PlanRow(Slot(slot), RequestId(""), len(self._slots[slot]) - 1, 1, True)

    def _row(self, row: PlanRow) -> RowResult:
        tokens = self._slots[row.slot]
        prompt_tokens, logprobs, prompt_logprobs = self._facts[row.slot]
        assert row.start + row.tokens <= len(tokens)
        assert row.sample == (row.start + row.tokens == len(tokens))
        if NAN in tokens:
            return RowResult([], error="NaN in the logits")
        entries = None
        if prompt_logprobs is not None:
            last = min(row.start + row.tokens, prompt_tokens - 1)
            entries = [_entry(tokens[:at], tokens[at]) for at in range(row.start + 1, last + 1)]
        if not row.sample:
            return RowResult([], prompt_logprobs=entries)
        token = next_token(tokens)
        chosen = [_entry(tokens, token)] if logprobs is not None else None
        tokens.append(token)
        return RowResult([token], logprobs=chosen, prompt_logprobs=entries)


def _entry(prefix: Sequence[int], token: int) -> TokenLogprobs:
    value = logprob_of(prefix, token)
    return TokenLogprobs(token, value, 1, [token], [value])


def write_model(folder: Path) -> Path:
    """Write a directory that `resolve_model` takes for a dummy model with a byte tokenizer and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "eos_token_id": EOS, "bos_token_id": BOS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", special=True), AddedToken("<|bos|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>", "chat_template": template}))
    return folder


def engine_config(
    model: Path | str,
    *,
    blocks: int | None = 256,
    block_tokens: int = 8,
    events: KvEventsConfig = KvEventsConfig(),
    **scheduler: int,
) -> EngineConfig:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **scheduler}
    return EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy"),
        cache=CacheConfig(block_size=block_tokens, num_blocks_override=blocks),
        scheduler=SchedulerConfig(**limits),
        events=events,
    )


def make(config: EngineConfig, runtime_dir: Path) -> FakeExecutor:
    return FakeExecutor()


def make_slow(config: EngineConfig, runtime_dir: Path) -> FakeExecutor:
    return FakeExecutor(step_s=0.003)


def make_poisoned(config: EngineConfig, runtime_dir: Path) -> FakeExecutor:
    return FakeExecutor(step_s=0.002, poisoned=True)


def make_broken(config: EngineConfig, runtime_dir: Path) -> FakeExecutor:
    raise WeightLoadError("tensor model.norm.weight is missing in the checkpoint")


def make_dying(config: EngineConfig, runtime_dir: Path) -> FakeExecutor:
    os._exit(3)


def make_once(config: EngineConfig, runtime_dir: Path) -> FakeExecutor:
    """Starts once; a second life dies while it starts."""
    mark = runtime_dir / "started-once"
    if mark.exists():
        os._exit(3)
    mark.touch()
    return FakeExecutor(step_s=0.003)
