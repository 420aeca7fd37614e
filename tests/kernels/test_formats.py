from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels.formats import KV_FORMATS, resolve_kv_format


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_bytes_agree_with_torch(name: str) -> None:
    kv_format = resolve_kv_format(name, "float32")
    vector = torch.zeros(80, dtype=getattr(torch, kv_format.storage_dtype))
    assert kv_format.bytes_per_token_head(80) == vector.nbytes


def test_auto_is_the_dtype_of_the_model() -> None:
    assert resolve_kv_format("auto", "bfloat16") is KV_FORMATS["bfloat16"]
    assert resolve_kv_format("float16", "bfloat16") is KV_FORMATS["float16"]


@pytest.mark.parametrize(("kv", "model"), [("int3", "float32"), ("auto", "complex64")])
def test_unknown_format_is_named_with_the_known_ones(kv: str, model: str) -> None:
    with pytest.raises(ValueError, match=f"{kv}.*use one of: auto, float32"):
        resolve_kv_format(kv, model)


def test_head_dim_must_be_positive() -> None:
    with pytest.raises(ValueError, match="head_dim must be positive"):
        KV_FORMATS["float16"].bytes_per_token_head(0)


def test_formats_import_without_torch() -> None:
    code = "import sys, kernels.formats; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
