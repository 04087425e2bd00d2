"""Sections of the engine's configuration. Names follow vLLM's flags where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.option import option

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, from where and in which precision."""

    model: str = option(
        "", "Model: directory, .gguf file, hub name ORG/NAME, or 'default' (SmolLM2-135M-Instruct).", hidden=True
    )
    served_model_name: str | None = option(None, "Name in the API (default: the MODEL argument as given).")
    tokenizer: str | None = option(None, "Directory or hub name of the tokenizer, if it does not lie with the model.")
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    hf_token: str | None = option(
        None, "Access token for the hub (default: HF_TOKEN or the stored login).", secret=True
    )
    download_dir: str | None = option(None, "Directory for files from the hub (default: the hub's cache).")
    load_format: str = option(
        "auto",
        "Format of the weights; dummy makes random weights for measuring.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations. auto: bfloat16 on a GPU; on a CPU bfloat16 "
        "for bfloat16 and float16 checkpoints, else float32.",
        choices=DTYPES,
    )
    quantization: str = option(
        "auto",
        "int8: dynamic int8 linears on a CPU. auto: int8 for a quantised GGUF on a CPU "
        "unless --dtype is given, else none.",
        choices=("auto", "none", "int8"),
    )
    max_model_len: int | None = option(
        None, "Longest prompt + output in tokens (default: the model's, or what the KV cache holds).", low=1
    )
    trust_remote_code: bool = option(False, "Refused today: Headrace never runs code from a model repository.")
    chat_template: str | None = option(None, "File with a Jinja chat template in place of the model's own.")
    generation_config: str = option(
        "auto",
        "auto: sampling defaults come from the model's generation_config.json; none: neutral defaults.",
        choices=("auto", "none"),
    )
    seed: int = option(0, "Seed of dummy weights.")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(16, "Tokens in a KV block.", low=1, high=256)
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes for the KV cache; accepts 512M, 4G (default: a share of free memory).", low=1
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of device memory for weights, activations and KV cache together (GPU).", low=0.05, high=1.0
    )
    cpu_memory_share: float = option(
        0.3,
        "Share of available memory for the KV cache on a CPU, 8 GiB at most, when no size is given.",
        low=0.01,
        high=0.95,
    )
    num_blocks_override: int | None = option(None, "Exact number of usable KV blocks, for tests.", low=1)
    enable_prefix_caching: bool = option(True, "Reuse the KV of common prompt beginnings.")
    prefix_hash_seed: str = option(
        "", "Start of all prefix hashes: engines with the same seed have the same hashes; nobody else can compute them."
    )
    prefix_hash_tokens: int | None = option(
        None, "Tokens under one prefix hash; must divide all blocks (default: the greatest that does).", low=1
    )
    checkpoint_interval_tokens: int = option(
        4096,
        "Distance between regular checkpoints of recurrent states, beside those at the prompt's end and at shared "
        "beginnings; 0: none.",
        low=0,
    )
    eviction: str = option(
        "lru",
        "Which unused content goes first: lru, the longest unused; cost, the least worth by reuse and by tokens "
        "recomputed a byte.",
        choices=("lru", "cost"),
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Batching."""

    max_num_seqs: int = option(64, "Most requests that run at once.", low=1, high=65536)
    max_num_batched_tokens: int = option(2048, "Most tokens computed in one step.", low=1)
    max_queue: int = option(4096, "Most waiting requests; above it new ones get 503.", low=1)
    policy: str = option(
        "fcfs",
        "Order of waiting requests: fcfs, or priority (smaller first, then by arrival).",
        choices=("fcfs", "priority"),
    )
    priority_ageing_s: float = option(
        60.0, "Seconds of waiting that are worth one level of priority, so that nobody waits for ever.", low=0.001
    )
    tenant_quota: float = option(
        1.0, "Share of the KV cache that the running requests of one tenant may hold; 1: no quota.", low=0.0, high=1.0
    )
    long_prefill_token_threshold: int = option(
        0, "Most tokens of one prompt in one step; 0: no limit but the budget and the shares of others.", low=0
    )
    watermark: float = option(
        0.01, "Share of blocks kept free when a request is admitted beside running ones.", low=0.0, high=0.5
    )
    speculative_tokens: int = option(0, "Most drafts of a decode; 0: no speculation.", low=0, high=64, hidden=True)
    steps_in_flight: int = option(
        1, "Plans made before the first result is applied: 1, or 2 to overlap scheduling.", low=1, high=2, hidden=True
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks and devices."""

    device: str = option("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    tensor_parallel_size: int = option(1, "Ranks that share each layer.", low=1, high=64, short="tp")
    cpu_threads: int | None = option(None, "Threads of one rank on a CPU (default: cores / ranks).", low=1)
    attention_backend: str = option("auto", "Attention implementation; auto asks the selector.")


@dataclass(frozen=True)
class KvEventsConfig:
    """Events of the prefix cache for routers and indexes."""

    kv_events: str | None = option(
        None, "ZeroMQ endpoint on which changes of the prefix cache are published, e.g. tcp://127.0.0.1:5557."
    )
    kv_events_sync: str = option(
        "tcp://127.0.0.1:0", "ZeroMQ endpoint where consumers of KV events ask for a replay or a snapshot."
    )
    kv_events_kept_batches: int = option(10_000, "Batches of KV events kept for a replay.", low=0)
    kv_events_keys: str | None = option(
        None,
        "Directory with server.key_secret and clients/*.key (ZeroMQ CURVE); needed beyond loopback.",
    )


@dataclass(frozen=True)
class EngineConfig:
    """All sections that the engine core and its workers need."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    events: KvEventsConfig = KvEventsConfig()
