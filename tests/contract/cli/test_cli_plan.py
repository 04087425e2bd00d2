"""``headrace plan`` from each kind of source, as a table and as JSON."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_a_bare_config_and_its_directory_give_the_same_plan(headrace, model_dir):
    by_file = json.loads(headrace("plan", str(model_dir / "config.json"), "--device", "h200", "--json").out)
    by_dir = json.loads(headrace("plan", str(model_dir), "--device", "h200", "--json").out)
    assert by_file.pop("model") != by_dir.pop("model")
    assert by_file == by_dir
    assert by_file["parameters"] == 8_030_261_248
    assert by_file["fits"] is True


def test_what_does_not_fit_ends_with_1_and_names_the_flag(headrace, model_dir):
    ran = headrace("plan", str(model_dir), "--device", "l4", "--max-model-len", "64k")
    assert ran.code == 1
    assert "DOES NOT FIT" in ran.out
    assert "change: --max-model-len" in ran.out
    assert "change: --tensor-parallel-size 2" in ran.out


@pytest.mark.parametrize("flag", ["--max-model-len", "--tensor-parallel-size"])
def test_the_advised_flag_makes_it_fit(headrace, model_dir, flag):
    arguments = ["plan", str(model_dir), "--device", "l4", "--max-model-len", "64000"]
    plan = json.loads(headrace(*arguments, "--json").out)
    [advised] = [row["flag"] for row in plan["advice"] if row["flag"].startswith(flag)]
    assert headrace(*arguments, *advised.split()).code == 0


def test_the_example_in_the_docs_is_what_the_command_prints(headrace, model_dir, monkeypatch):
    folder = model_dir / "llama-3.1-8b"
    folder.mkdir()
    (model_dir / "config.json").rename(folder / "config.json")
    monkeypatch.chdir(model_dir)
    [example] = re.findall(r"```text\n\$ headrace plan (.*?)```", DOCS.read_text(), re.DOTALL)
    arguments, _, output = example.partition("\n")
    assert headrace("plan", *arguments.split()).out == output


def test_memory_of_the_device_can_be_given(headrace, model_dir):
    ran = headrace("plan", str(model_dir), "--device", "l4", "--device-memory", "12G")
    assert ran.code == 1
    assert "GiB are missing" in ran.out
    assert headrace("plan", str(model_dir), "--device=l4", "--device-memory=48G").code == 0


def test_int8_on_a_gpu_is_refused_as_the_engine_would(headrace, model_dir):
    ran = headrace("plan", str(model_dir), "--device", "h200", "--quantization", "int8")
    assert ran.code == 2
    assert "--quantization int8 is a CPU path" in ran.err


def test_the_default_model_is_planned_from_its_gguf(headrace):
    plan = json.loads(headrace("plan", "default", "--device", "cpu", "--device-memory", "8G", "--json").out)
    assert plan["parameters"] == 134_515_008
    assert (plan["weight_format"], plan["model_max_len"]) == ("int8", 8192)
    assert plan["fits"] is True
    assert (plan["dtype"], plan["cache_dtype"]) == ("float32", "bfloat16")
    printed = headrace("plan", "default", "--device", "cpu", "--device-memory", "8G").out
    assert "weights int8, KV cache bfloat16" in printed


def test_each_group_of_layers_names_its_attention_backend_and_why(headrace, tmp_path):
    gemma = {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 32768, "torch_dtype": "float32",
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    arguments = ["plan", str(tmp_path), "--device", "cpu", "--device-memory", "16G"]
    choices = json.loads(headrace(*arguments, "--json").out)["attention"]
    found = [(choice["kind"], choice["layers"], choice["head_dim"], choice["backend"]) for choice in choices]
    assert sorted(found) == [("full", 3, 256, "torch_exact"), ("sliding", 15, 256, "torch_exact")]
    assert all(choice["refused"] == {"torch_sdpa": "not batch-invariant"} for choice in choices)
    text = headrace(*arguments).out
    assert "torch_exact, because it fits, with the highest priority (10); not torch_sdpa: not batch-invariant" in text
    refused = headrace(*arguments, "--attention-backend", "torch_sdpa")
    assert refused.code == 2
    assert "torch_sdpa cannot be used: not batch-invariant" in refused.err
