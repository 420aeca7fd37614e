"""Properties of every plan, whatever the model and the server."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.deployment import Deployment, Gpu
from engine.memory.plan import plan
from engine.memory.pools import stages_of
from engine.memory.semantics import resolve, semantics_of
from engine.memory.shape import LayerGroup, ModelShape

GIB = 1 << 30


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    layers = draw(st.integers(2, 64))
    heads, width = draw(st.sampled_from([1, 2, 4, 8, 32])), draw(st.sampled_from([64, 128, 256]))
    groups = [LayerGroup(layers, "full", heads, width)]
    kind = draw(st.sampled_from(["uniform", "latent", "sliding", "recurrent"]))
    if kind == "latent":
        groups = [LayerGroup(layers, "latent", latent_width=draw(st.sampled_from([320, 576])))]
    elif kind == "sliding":
        groups.append(LayerGroup(draw(st.integers(1, 60)), "sliding", heads, width, window=draw(st.integers(64, 4096))))
    elif kind == "recurrent":
        groups.append(LayerGroup(draw(st.integers(1, 60)), "recurrent", state_bytes=draw(st.integers(1024, 1 << 22))))
    return ModelShape(
        "any",
        tuple(groups),
        hidden_size=4096,
        intermediate_size=11008,
        num_q_heads=64,
        vocab_size=draw(st.sampled_from([32000, 151936])),
        max_position_embeddings=131072,
        weights_bytes=draw(st.integers(1, 40)) * GIB,
    )


@st.composite
def servers(draw: st.DrawFn) -> Deployment:
    engine = draw(st.sampled_from(["vllm", "sglang", "tensorrt-llm", "tgi", "kvoncall"]))
    versions = {"vllm": ["0.4.1", "0.6.6", "0.8.5", "0.12.0", "0.20.0", "0.33.0"], "sglang": ["0.4.6", "0.5.23"]}
    return Deployment(
        shape=draw(shapes()),
        engine=engine,
        version=draw(st.sampled_from([None, *versions.get(engine, [])])),
        gpu=Gpu("GPU", draw(st.integers(16, 200)) * GIB, (9, 0)),
        max_model_len=draw(st.integers(1, 131072)),
        max_num_seqs=draw(st.integers(1, 512)),
        max_num_batched_tokens=draw(st.integers(512, 16384)),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8"])),
        gpu_memory_utilization=draw(st.floats(0.3, 1.0)),
        enforce_eager=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(servers())
def test_parts_add_up_and_blocks_are_whole(server: Deployment) -> None:
    planned = plan(server)
    assert server.gpu is not None
    assert sum(part.bytes for part in planned.parts) == server.gpu.memory_bytes
    assert planned.kv_blocks * planned.kv_bytes_per_block <= max(0, planned.kv_cache_bytes) + (
        planned.kv_bytes_per_block if planned.deployment.engine == "tensorrt-llm" else 0
    )
    assert planned.fits == (planned.verdict != "does_not_fit")
    assert planned.reasons
    json.dumps(planned.to_dict())


@settings(max_examples=25, deadline=None)
@given(servers(), st.floats(0.0, 0.5))
def test_more_utilization_never_gives_fewer_tokens(server: Deployment, more: float) -> None:
    fraction = server.gpu_memory_utilization or 0.9
    higher = plan(replace(server, gpu_memory_utilization=min(1.0, fraction + more)))
    assert higher.kv_blocks >= plan(server).kv_blocks


@settings(max_examples=25, deadline=None)
@given(servers())
def test_more_tensor_parallelism_never_gives_fewer_tokens(server: Deployment) -> None:
    """Between sizes that communicate: a single rank pays nothing for communication."""
    fewer = replace(server, tp=2, num_gpus=2)
    more = replace(server, tp=4, num_gpus=4)
    if fewer.gpu_memory_utilization is not None and any(g.attention == "recurrent" for g in server.shape.layers):
        fewer, more = replace(fewer, block_size=4096), replace(more, block_size=4096)
    assert plan(more).kv_tokens >= plan(fewer).kv_tokens


@settings(max_examples=25, deadline=None)
@given(servers())
def test_the_largest_length_fits_and_the_next_block_does_not(server: Deployment) -> None:
    planned = plan(server)
    longest = planned.largest_model_len
    if not 0 < longest < 131072:
        return
    pinned = replace(
        server,
        num_gpu_blocks_override=max(1, planned.kv_blocks),
        gpu_memory_utilization=None,
        gpu=None,
    )
    assert plan(replace(pinned, max_model_len=longest)).fits
    assert not plan(replace(pinned, max_model_len=longest + planned.block_size)).fits


@settings(max_examples=25, deadline=None)
@given(servers())
def test_needed_utilization_is_enough_and_barely(server: Deployment) -> None:
    planned = plan(server)
    needed = planned.needed_utilization
    if needed is None or server.engine in ("tensorrt-llm", "tgi"):
        return
    assert plan(replace(server, gpu_memory_utilization=needed)).fits or planned.kv_bytes_per_token is None
    lower = needed - 0.01
    if lower > 0:
        below = plan(replace(server, gpu_memory_utilization=lower))
        slack = below.kv_bytes_per_block * 2 + (server.gpu.memory_bytes // 2000 if server.gpu else 0)
        assert not below.fits or below.margin_bytes < slack


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 8))
def test_stages_share_out_every_layer_of_every_kind(counts: list[int], pp: int) -> None:
    """No layer is lost or billed twice, and kinds mix in each stage as they do in the model."""
    total = sum(counts)
    if total < pp:
        return
    kinds = ("full", "sliding", "chunked")
    groups = tuple(
        LayerGroup(count, kind, 2, 64, window=128 if kind != "full" else None)  # type: ignore[arg-type]
        for count, kind in zip(counts, kinds, strict=False)
    )
    server = resolve(Deployment(ModelShape("any", groups), pp=pp, num_gpus=pp, max_model_len=128))
    stages = stages_of(server, semantics_of("vllm", None))
    assert [sum(kind.count for kind in stage.kinds) for stage in stages] == list(server.stage_layers or ())
    for group in groups:
        shared = [kind.count for stage in stages for kind in stage.kinds if kind.group.attention == group.attention]
        assert sum(shared) == group.count
