"""The planes of state: their widths, the master, and the arrays of a checkpoint."""

from __future__ import annotations

import pytest
import torch

from megatier.optim.masters import plane_dtype
from megatier.state import ADAMW, ADAMW_BF16, ADAMW_FP32, ARRAYS, LION, MASTERS, MUON, StateSchema
from megatier.tier import STATE_KINDS, Kind

ALL = {
    **{"-".join(of): schema for of, schema in ADAMW.items()},
    **{f"muon-{of}": MUON[of] for of in MUON},
    "lion": LION["bf16"],
}
SCHEMAS = pytest.mark.parametrize("schema", ALL.values(), ids=ALL)


@pytest.mark.parametrize(("moments", "num_bytes"), [("fp32", 12), ("bf16", 8), ("fp8", 6)])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_state_of_adamw_has_as_many_bytes_as_its_moments_ask_for(compute: str, moments: str, num_bytes: int) -> None:
    schema = ADAMW[compute, moments]
    assert schema.bytes_per_parameter == sum(schema.width(kind) for kind in schema.kinds) == num_bytes


def test_state_of_muon_is_eight_bytes_a_parameter_and_has_an_array_of_its_own() -> None:
    assert {schema.bytes_per_parameter for schema in MUON.values()} == {8}
    assert all(list(schema.arrays) == ["params", "momentum"] and schema.by_matrix for schema in MUON.values())
    assert not any(schema.by_matrix for schema in (*ADAMW.values(), *LION.values()))
    assert ARRAYS == ("params", "exp_avg", "exp_avg_sq", "momentum")


@SCHEMAS
def test_plane_width_is_that_of_its_dtype(schema: StateSchema) -> None:
    assert [plane_dtype(schema, kind).itemsize for kind in schema.kinds] == [plane.width for plane in schema.planes]
    assert set(schema.kinds) <= set(STATE_KINDS)


@SCHEMAS
def test_weight_comes_first_and_alone_passes_through_the_slots_of_all_units(schema: StateSchema) -> None:
    assert (Kind.WEIGHT, *schema.passing_kinds) == schema.kinds
    assert schema.grad_width == schema.width(Kind.WEIGHT)


@SCHEMAS
def test_every_plane_belongs_to_one_array_and_the_master_has_four_bytes(schema: StateSchema) -> None:
    assert [kind for kinds in schema.arrays.values() for kind in kinds] == list(schema.kinds)
    assert sum(schema.width(kind) for kind in schema.arrays[MASTERS]) == 4
    assert schema.arrays[MASTERS] == schema.master_kinds


def test_checkpoints_of_all_dtypes_have_the_same_arrays() -> None:
    assert all(list(schema.arrays) == ["params", "exp_avg", "exp_avg_sq"] for schema in ADAMW.values())
    assert ADAMW_BF16.master_kinds == (Kind.WEIGHT, Kind.REMAINDER)
    assert ADAMW_FP32.master_kinds == (Kind.WEIGHT,)
    assert plane_dtype(ADAMW_BF16, Kind.WEIGHT) is torch.bfloat16
