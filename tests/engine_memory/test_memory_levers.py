"""What a lever buys, whether a version or a GPU has it, and host tiers by rank or in all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.memory.deployment import Deployment, Gpu
from engine.memory.levers import Lever, levers
from engine.memory.offload import HostTier, host_tier, plan_offload
from engine.memory.plan import plan
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.sharing import plan_shared
from engine.memory.two_logs import LogLine, cost_from_logs

GIB = 1 << 30
LLAMA = ModelShape(
    "Llama-3.1-8B",
    (LayerGroup(32, "full", 8, 128),),
    hidden_size=4096,
    intermediate_size=14336,
    num_q_heads=32,
    vocab_size=128256,
    max_position_embeddings=131072,
    weights_bytes=round(14.99 * GIB),
)
SERVER = Deployment(LLAMA, version="0.33.0", gpu=Gpu("H100-80GB", round(79.1 * GIB), (9, 0)), max_model_len=32768)


def _by_key(server: Deployment) -> dict[str, Lever]:
    return {lever.key: lever for lever in levers(server)}


def test_each_lever_is_a_plan_of_its_own() -> None:
    base, found = plan(SERVER), _by_key(SERVER)
    assert set(found) == {
        "kv_fp8",
        "kv_int8",
        "kv_int4",
        "tp_x2",
        "half_length",
        "half_seqs",
        "smaller_batch",
        "eager",
        "utilization",
        "offload",
    }
    for lever in found.values():
        assert lever.possible, lever.why_not
        assert lever.cost
        assert lever.changes
        if lever.key != "offload":
            assert lever.gained_tokens == lever.plan.kv_tokens - base.kv_tokens
    assert found["kv_fp8"].plan.kv_tokens == pytest.approx(2 * base.kv_tokens, rel=0.001)
    assert found["kv_fp8"].changes == {"--kv-cache-dtype": "fp8_e4m3"}
    assert found["half_length"].gained_tokens == 0
    assert found["half_length"].plan.max_concurrency == pytest.approx(2 * base.max_concurrency, rel=0.001)
    assert found["tp_x2"].plan.kv_tokens > 2 * base.kv_tokens, "a second GPU also takes half of the weights"


def test_the_largest_gain_comes_first_and_the_impossible_last() -> None:
    found = levers(replace(SERVER, version="0.19.1"))
    possible = [lever.possible for lever in found]
    assert possible == sorted(possible, reverse=True)
    gains = [lever.gained_tokens for lever in found if lever.possible]
    assert gains == sorted(gains, reverse=True)


def test_versions_and_hardware_decide_what_is_possible() -> None:
    old = _by_key(replace(SERVER, version="0.19.1"))
    assert "from 0.20 on" in old["kv_int8"].why_not
    assert "from 0.25 on" in old["kv_int4"].why_not
    assert "outside the budget" in old["eager"].why_not
    assert "0.11.1" in _by_key(replace(SERVER, version="0.10.0"))["offload"].why_not
    ampere = replace(SERVER, gpu=Gpu("A100-80GB", round(79.15 * GIB), (8, 0)))
    assert _by_key(ampere)["kv_fp8"].changes == {"--kv-cache-dtype": "fp8_e5m2"}
    checkpoint = replace(ampere, shape=replace(LLAMA, quantization="fp8"))
    assert "sm_80" in _by_key(checkpoint)["kv_fp8"].why_not
    latent = replace(LLAMA, layers=(LayerGroup(32, "latent", latent_width=576),))
    assert "latent" in _by_key(replace(SERVER, shape=latent))["kv_int8"].why_not
    assert "there are 2" in _by_key(replace(SERVER, tp=2, num_gpus=2))["tp_x2"].why_not
    assert "does not divide" in _by_key(replace(SERVER, tp=32, num_gpus=64))["tp_x2"].why_not


def test_a_stated_pool_knows_nothing_of_the_budget() -> None:
    found = _by_key(replace(SERVER, gpu=None, kv_cache_bytes=20 * GIB))
    assert found["kv_fp8"].possible
    assert not found["half_seqs"].possible
    assert "stated" in found["half_seqs"].why_not


def test_flags_are_those_of_the_engine() -> None:
    found = _by_key(replace(SERVER, engine="sglang", version="0.5.23"))
    assert "--context-length" in found["half_length"].changes
    assert "--tp-size" in found["tp_x2"].changes
    assert "--hicache-size" in found["offload"].changes
    assert "--mem-fraction-static" in found["utilization"].changes


def test_a_size_is_a_total_or_each_ranks() -> None:
    vllm = replace(SERVER, tp=4, num_gpus=4, kv_offloading_bytes=100 * GIB)
    assert host_tier(SERVER) is None
    total, each = host_tier(vllm), host_tier(replace(vllm, kv_offloading_per_rank=True))
    assert total is not None
    assert each is not None
    assert (total.per_rank, each.per_rank) == (False, True)
    assert plan_offload([total], 4, 256 * GIB).total_bytes == 100 * GIB
    assert plan_offload([each], 4, 256 * GIB).total_bytes == 400 * GIB
    sglang = host_tier(replace(vllm, engine="sglang"))
    assert sglang is not None
    assert sglang.per_rank


@pytest.mark.parametrize(
    ("size", "verdict", "error"),
    [(79, "fits", False), (85, "at_risk", False), (95, "at_risk", True), (101, "does_not_fit", True)],
)
def test_more_than_ninety_percent_of_a_host_is_an_error(size: int, verdict: str, error: bool) -> None:
    offloaded = plan_offload([HostTier("t", size * GIB, False, "--size")], 2, 100 * GIB)
    assert (offloaded.verdict, offloaded.error) == (verdict, error)
    assert (verdict == "fits") == (len(offloaded.reasons) == 2)


def test_hosts_that_cannot_be() -> None:
    tier = HostTier("t", GIB, True, "--size")
    assert plan_offload([tier], 2, None).verdict == "unknown"
    for ranks, host in ((0, GIB), (1, 0)):
        with pytest.raises(ConfigError):
            plan_offload([tier], ranks, host)
    with pytest.raises(ConfigError, match="not be negative"):
        plan_offload([replace(tier, stated_bytes=-1)], 1, GIB)


def test_servers_of_one_gpu_must_name_it() -> None:
    with pytest.raises(ConfigError, match="must all name the same"):
        plan_shared([SERVER, replace(SERVER, gpu=None, kv_cache_bytes=GIB)])


def test_two_logs_of_one_length_tell_nothing() -> None:
    line = LogLine(GIB, 1000, 5000)
    with pytest.raises(ConfigError, match="different"):
        cost_from_logs(line, line)
    with pytest.raises(ConfigError, match="not of the same model"):
        cost_from_logs(LogLine(GIB, 1000, 1000), LogLine(GIB, 2000, 4000))
