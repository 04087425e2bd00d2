"""One sample of each message kind, and the golden file that pins their bytes.

`wire_golden.json` holds, for each sample, every encoding it ever had (oldest first), and the fields of each struct in
order. After a new trailing field or a new sample run ``python tests/contract/wire_samples.py``: it appends, and refuses
anything that would make an old message decode as something else.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import msgspec

import headrace.types
from headrace.base.ids import BlockId, RequestId, Slot, StepId
from headrace.kv.budget import fixed_layout
from headrace.types.cache_specs import (
    ChunkedLocalSpec,
    CompressedSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    GroupLayout,
    IndexKeysSpec,
    KvLayout,
    LatentSpec,
    LayerCache,
    NoCacheSpec,
    RecurrentSpec,
    SharedSpec,
    SlidingWindowSpec,
    StatePart,
)
from headrace.types.events import AbortRequest, AddRequest, GrammarReady, JobDone, LookupDone, ResetPrefixCache
from headrace.types.outputs import ErrorRecord, FinishReason, RequestDelta, SchedulerStats, StepNews
from headrace.types.plans import BlockAppend, BlockCopy, EncodeItem, LoadJob, PlanRow, SlotStart, StepPlan
from headrace.types.requests import EmbedsSpan, EngineRequest, MediaSpan
from headrace.types.results import RowResult, StepResult, TokenLogprobs
from headrace.types.sampling import SamplingParams
from headrace.types.wire import (
    WIRE_VERSION,
    CoreFailed,
    CoreReady,
    PhaseSeconds,
    Shutdown,
    StepOutputs,
    UtilityCall,
    UtilityReply,
    encode,
)

GOLDEN = Path(__file__).with_name("wire_golden.json")

SAMPLING = SamplingParams(
    n=2,
    temperature=0.5,
    top_k=40,
    top_p=0.75,
    min_p=0.125,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={7: -2.0},
    allowed_token_ids=[1, 2],
    bad_words=["词"],
    max_tokens=99,
    min_tokens=3,
    stop=["\n"],
    stop_token_ids=[5],
    ignore_eos=True,
    seed=-8,
    logprobs=4,
    prompt_logprobs=0,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    include_stop_str_in_output=True,
    detokenize=True,
)
REQUEST = EngineRequest(
    request_id=RequestId("r-1"),
    prompt_token_ids=[1, 300, 70000],
    sampling=SAMPLING,
    eos_token_ids=[2],
    arrival_s=1.5,
    priority=-3,
    cache_salt="tenant",
    block_hashes=[bytes(range(32))],
    bad_words_token_ids=[[9, 8]],
    produced_token_ids=[4],
)
MEDIA = MediaSpan("image-1", 3, 4, 16)
FULL_REQUEST = msgspec.structs.replace(
    REQUEST,
    deadline_s=9.5,
    tenant="team",
    adapter=b"adapter",
    media=[MEDIA],
    embeds=[EmbedsSpan(b"digest", 1, 2)],
    encoder_tokens=7,
    grammar="json",
    leader_id=RequestId("r-0"),
)
ERROR = ErrorRecord("kv_cache_too_small", "invalid_request_error", "要 9 blocks", 400, False, "max_tokens")
LOGPROBS = TokenLogprobs(5, -0.25, 1, [5, 6], [-0.25, -2.0])
SPEC = FullAttentionSpec(3, 64, 64, 2)
LAYOUT = fixed_layout([LayerCache(0, SPEC), LayerCache(1, SPEC)], block_tokens=16, usable_blocks=99)
SPECS = [
    SPEC,
    SlidingWindowSpec(3, 64, 0, 2, 512),
    ChunkedLocalSpec(3, 64, 64, 2, 8192),
    LatentSpec(1152),
    CompressedSpec(640, 4),
    IndexKeysSpec(132, 4),
    RecurrentSpec((StatePart("conv", (3, 128), 2), StatePart("state", (8, 64, 64), 4))),
    SharedSpec(5),
    CrossAttentionSpec(3, 64, 64, 2),
    NoCacheSpec(),
]
MIXED_LAYOUT = KvLayout(
    [GroupLayout(index, spec, [index], 16, 100, index + 1, ["part"]) for index, spec in enumerate(SPECS)],
    granule_bytes=65536,
    extent_granules=128,
    num_extents=10,
    shared_layers=[(7, 5)],
)
STATS = SchedulerStats(
    step=1,
    running=2,
    waiting=3,
    blocks_total=4,
    blocks_free=5,
    blocks_cached=6,
    prefix_query_tokens=7,
    prefix_hit_tokens=8,
    preemptions=9,
    prompt_tokens=10,
    generation_tokens=11,
    step_tokens=12,
    step_s=0.5,
)
DELTA = RequestDelta(
    request_id=RequestId("r-1"),
    new_token_ids=[5],
    finish_reason=FinishReason.ERROR,
    stop_token_id=5,
    logprobs=[LOGPROBS],
    prompt_logprobs=[LOGPROBS],
    cached_tokens=16,
    error=ERROR,
    first_scheduled_s=2.5,
    preemptions=1,
)

TO_CORE = {
    "add": AddRequest(REQUEST),
    "add-minimal": AddRequest(
        EngineRequest(request_id=RequestId("r"), prompt_token_ids=[1], sampling=SamplingParams())
    ),
    "add-everything": AddRequest(FULL_REQUEST),
    "abort": AbortRequest(RequestId("r-1")),
    "reset-prefix-cache": ResetPrefixCache(),
    "call": UtilityCall(7, "stats", [1, "a", None, {"k": [True, 0.5]}]),
    "shutdown": Shutdown(),
}
FROM_CORE = {
    "ready": CoreReady(
        pid=4242,
        max_model_len=8192,
        vocab_tokens=49152,
        block_tokens=16,
        # As an older engine wrote it: without granules.
        layout=KvLayout(LAYOUT.groups),
        startup=[PhaseSeconds("load weights", 0.5)],
    ),
    "ready-mixed": CoreReady(pid=1, max_model_len=2, vocab_tokens=3, block_tokens=4, layout=MIXED_LAYOUT),
    "ready-sized": CoreReady(
        pid=1,
        max_model_len=2,
        vocab_tokens=3,
        block_tokens=32,
        layout=MIXED_LAYOUT,
        hash_tokens=16,
        capacity_tokens=70000,
    ),
    "ready-with-events": CoreReady(
        pid=1,
        max_model_len=2,
        vocab_tokens=3,
        block_tokens=16,
        layout=MIXED_LAYOUT,
        kv_events=["ipc://live", "ipc://sync"],
    ),
    "outputs": StepOutputs([DELTA], STATS),
    "outputs-minimal": StepOutputs([RequestDelta(request_id=RequestId("r"))]),
    "outputs-columns": StepOutputs([DELTA], STATS, [RequestId("r-2"), RequestId("r-3")], [70000, 0]),
    "reply": UtilityReply(7, {"blocks": [1, 2]}, None),
    "reply-error": UtilityReply(8, None, ERROR),
    "failed": CoreFailed(ERROR, "Traceback ..."),
}
PLAN = StepPlan(
    StepId(3),
    [Slot(1)],
    [SlotStart(Slot(0), RequestId("r-1"), [1, 2, 3], 2, 1, [[BlockId(4), BlockId(5)]], SAMPLING, [2], [[9]])],
    [BlockAppend(Slot(2), [[BlockId(6)]])],
    [PlanRow(Slot(0), RequestId("r-1"), 1, 2, True)],
)
FULL_PLAN = StepPlan(
    StepId(4),
    [Slot(1)],
    [msgspec.structs.replace(PLAN.starts[0], media=[MEDIA], encoder_tokens=7)],
    PLAN.appends,
    [PlanRow(Slot(0), RequestId("r-1"), 1, 3, True, 1, True)],
    decodes=[Slot(2), Slot(300)],
    copies=[BlockCopy(0, BlockId(1), BlockId(2))],
    saves=[BlockCopy(1, BlockId(3), BlockId(4))],
    encodes=[EncodeItem(Slot(0), RequestId("r-1"), 0, "image-1")],
    encoder_frees=["image-0"],
    loads=[LoadJob(8, RequestId("r-1"), 16, 32, [[BlockId(7)], [BlockId(0)]], [b"hash"])],
)
RESULT = StepResult(StepId(3), [RowResult([5], [LOGPROBS], [LOGPROBS], None), RowResult([], error="nan")])
FULL_RESULT = StepResult(StepId(4), [RowResult([5, 6])], [7, 0], [(1, "nan")])
TO_WORKER = {"plan": PLAN, "plan-everything": FULL_PLAN, "layer-cache": LayerCache(4, SPEC)}
FROM_WORKER = {"result": RESULT, "result-columns": FULL_RESULT}
# Plain data inside the core process; pinned like the rest, since a trace or another core may send it one day.
INSIDE = {
    "news": StepNews([RequestId("r-2")], [5], [DELTA]),
    "grammar": GrammarReady(RequestId("r-1"), ERROR),
    "lookup": LookupDone(RequestId("r-1")),
    "job": JobDone(8, 32),
}
WIRE = TO_CORE | FROM_CORE
ALL = WIRE | TO_WORKER | FROM_WORKER | INSIDE


def sample_bytes(name: str) -> bytes:
    """Return the encoding of a sample: with the version byte for what crosses the socket."""
    return encode(WIRE[name]) if name in WIRE else msgspec.msgpack.encode(ALL[name])


def all_structs() -> dict[str, type[msgspec.Struct]]:
    """Return every struct defined in `headrace.types`, by name."""
    found = {}
    for info in pkgutil.iter_modules(headrace.types.__path__, "headrace.types."):
        module = importlib.import_module(info.name)
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, msgspec.Struct) and item.__module__ == module.__name__:
                found[item.__name__] = item
    return dict(sorted(found.items()))


def main() -> int:
    """Append what is new to the golden file; refuse a change of what is there."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if golden.get("version") != WIRE_VERSION:
        golden = {"version": WIRE_VERSION, "fields": {}, "bytes": {}}
    for name, struct in all_structs().items():
        locked, fields = golden["fields"].get(name, []), list(struct.__struct_fields__)
        if fields[: len(locked)] != locked:
            print(f"{name}: locked order {locked}, now {fields}: new fields go to the tail", file=sys.stderr)
            return 1
        golden["fields"][name] = fields
    for name in ALL:
        history = golden["bytes"].setdefault(name, [])
        if not history or history[-1] != sample_bytes(name).hex():
            history.append(sample_bytes(name).hex())
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"{GOLDEN.name}: {len(golden['fields'])} structs, {len(golden['bytes'])} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
