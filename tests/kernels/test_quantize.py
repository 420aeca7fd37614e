"""Packing, rounding and rotation: what every backend reproduces."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.formats import KV_FORMATS, Grouping, VectorFormat
from kernels.quantize import dequantize, pack_nibbles, quantize, rotate, rotation_matrix, unpack_nibbles, unrotate

PARTS = {part.name: part for kv_format in KV_FORMATS.values() for part in (kv_format.key, kv_format.value)}
GROUPED = [part for part in PARTS.values() if part.grouping is not Grouping.NONE]


def there_and_back(vectors: Tensor, part: VectorFormat, scale: float = 1.0) -> Tensor:
    codes, params = quantize(vectors, part, scale)
    return dequantize(codes, params, part, torch.float64, scale)


def steps(vectors: Tensor, part: VectorFormat) -> Tensor:
    """The scale of each element's group, as stored, broadcastable to vectors."""
    params = quantize(vectors, part)[1]
    assert params is not None
    return params.double().select(-2, 0).unsqueeze(-1 if part.grouping is Grouping.TOKEN else -2)


def vectors_of(kind: str, seed: int) -> Tensor:
    """[2 heads, 16 tokens, 24 channels]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((2, 16, 24), generator=generator)
    if kind == "positive":
        return noise.abs() + 10
    if kind == "outlier":
        noise[..., 3] *= 30
    return noise


@pytest.mark.parametrize("part", GROUPED, ids=lambda part: part.name)
@given(kind=st.sampled_from(["normal", "positive", "outlier"]), seed=st.integers(0, 1000))
def test_an_element_is_off_by_half_a_step_at_most(part: VectorFormat, kind: str, seed: int) -> None:
    vectors = vectors_of(kind, seed)
    error = (there_and_back(vectors, part) - vectors.double()).abs()
    rounding = vectors.abs().amax().double() * 2**-10 if part.param_dtype == "float16" else 1e-6  # of the minimum
    assert (error <= steps(vectors, part) * 0.51 + rounding).all()


@pytest.mark.parametrize("part", GROUPED, ids=lambda part: part.name)
def test_quantizing_again_changes_nothing(part: VectorFormat) -> None:
    once = there_and_back(vectors_of("normal", 0), part).float()
    torch.testing.assert_close(there_and_back(once, part), once.double(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("part", GROUPED, ids=lambda part: part.name)
@pytest.mark.parametrize("value", [0.0, 3.3, -40.0])
def test_constant_vectors(part: VectorFormat, value: float) -> None:
    vectors = torch.full((1, 16, 8), value)
    torch.testing.assert_close(there_and_back(vectors, part), vectors.double(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("part", GROUPED, ids=lambda part: part.name)
def test_one_sided_vectors_keep_their_minimum(part: VectorFormat) -> None:
    """A zero point clamped to the code range would lose them: all 4-bit codes would be 15."""
    vectors = vectors_of("positive", 1)
    if part.num_params == 2:
        assert (there_and_back(vectors, part) - vectors).norm() <= 0.01 * vectors.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", GROUPED, ids=lambda part: part.name)
def test_what_is_not_finite_does_not_come_back_finite(part: VectorFormat, bad: float) -> None:
    vectors = vectors_of("normal", 2)
    vectors[1, 5, 7] = bad
    back = there_and_back(vectors, part)
    assert not back[1, 5, 7].isfinite()
    assert back[0].isfinite().all()


@pytest.mark.parametrize(("name", "limit"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_saturates_and_scales(name: str, limit: float) -> None:
    vectors = torch.tensor([[1e9, -1e9, float("inf"), 3.0]])
    assert there_and_back(vectors, PARTS[name]).tolist() == [[limit, -limit, limit, 3.0]]
    assert there_and_back(vectors, PARTS[name], scale=0.5).tolist() == [[limit / 2, -limit / 2, limit / 2, 3.0]]


def test_nibbles_are_a_bijection_and_halves_stay_in_order() -> None:
    every = torch.tensor(list(itertools.product(range(16), range(16))), dtype=torch.uint8)
    packed = pack_nibbles(every)
    assert packed.unique().numel() == 256
    assert torch.equal(unpack_nibbles(packed), every)
    assert pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist() == [1 + 16 * 3, 2 + 16 * 4]


@pytest.mark.parametrize("head_dim", [1, 20, 64, 96, 192, 256])
def test_rotation_is_orthogonal_and_undone(head_dim: int) -> None:
    matrix = rotation_matrix(head_dim, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(head_dim, dtype=torch.float64))
    q, k = torch.randn((2, 5, head_dim), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(q) @ rotate(k).t(), q @ k.t())
    torch.testing.assert_close(unrotate(rotate(q)), q)


def test_rotation_is_the_same_in_every_process() -> None:
    """Stored codes mean nothing without it; these are the channels' signs for head_dim 16."""
    signs = rotation_matrix(16, torch.float64, torch.device("cpu"))[:, 0].sign().int().tolist()
    assert signs == [-1, 1, 1, -1, -1, -1, -1, 1, -1, 1, -1, 1, -1, 1, 1, -1]


def test_schemes_differ_where_keys_have_structure() -> None:
    """A constant key shift leaves softmax unchanged and is what breaks 4 bits per token (Qwen2's key bias)."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((1, 512, 64), generator=generator)
    queries = 0.3 * torch.randn((1, 32, 64), generator=generator)
    keys[..., 5] += 40.0
    blocks = keys.view(-1, 16, 64)

    def error(name: str) -> float:
        part = PARTS[name]
        shaped = blocks if part.grouping is Grouping.CHANNEL else keys
        stored = there_and_back(rotate(shaped) if part.rotated else shaped, part).float().view(1, 512, 64)
        stored = unrotate(stored) if part.rotated else stored
        values = torch.randn((1, 512, 64), generator=torch.Generator().manual_seed(9))
        exact, off = (torch.softmax(queries @ k.transpose(-1, -2), -1) @ values for k in (keys, stored))
        return float((off - exact).norm() / exact.norm())

    assert error("int8") < 0.3
    assert error("int4_channel") < 0.3
    assert error("int4_symmetric") > 3 * error("int4_channel")
