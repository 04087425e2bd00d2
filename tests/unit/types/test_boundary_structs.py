"""Small arithmetic of the boundary types, and what every one of them promises."""

import importlib
import pkgutil

import msgspec
import pytest

import headrace.types
from headrace.base.ids import NULL_BLOCK, RequestId, StepId
from headrace.types.cache_specs import FullAttentionSpec, GroupLayout, KvLayout
from headrace.types.outputs import FinishReason
from headrace.types.plans import PlanRow, StepPlan

MODULES = [
    importlib.import_module(info.name) for info in pkgutil.iter_modules(headrace.types.__path__, "headrace.types.")
]
STRUCTS = sorted(
    {
        item
        for module in MODULES
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, msgspec.Struct) and item.__module__ == module.__name__
    },
    key=lambda item: item.__name__,
)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_struct_is_frozen_positional_and_documented(struct):
    config = struct.__struct_config__
    assert config.frozen
    assert config.array_like
    assert not config.forbid_unknown_fields, "an old reader must skip new trailing fields"
    assert struct.__doc__


def test_bytes_of_a_block_are_all_layers_of_its_group():
    spec = FullAttentionSpec(kv_heads=3, key_dim=64, value_dim=64, dtype_bytes=2)
    assert spec.token_bytes() == 3 * 128 * 2
    group = GroupLayout(group=0, spec=spec, layer_indices=[0, 1, 2], block_tokens=16, num_blocks=10)
    assert group.block_bytes() == 16 * 768 * 3
    assert KvLayout([group], group.block_bytes(), 9, 1).total_bytes() == 10 * group.block_bytes()
    assert KvLayout([], 256, 0, 0).total_bytes() == 0


def test_total_tokens_of_a_plan():
    rows = [PlanRow(slot, RequestId(str(slot)), 0, tokens, True) for slot, tokens in enumerate((1, 5, 2))]
    assert StepPlan(StepId(1), [], [], [], rows).total_tokens == 8
    assert StepPlan(StepId(2), [], [], [], []).total_tokens == 0


def test_names_and_numbers_of_finish_reasons_are_fixed():
    assert {reason.text: int(reason) for reason in FinishReason} == {"stop": 0, "length": 1, "abort": 2, "error": 3}


def test_the_null_block_is_zero():
    assert NULL_BLOCK == 0
