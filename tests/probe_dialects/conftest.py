"""Pages as engines of other versions serve them: written from the facts, as far as a test reads them."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

VLLM_V0 = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 1
# TYPE vllm:num_requests_swapped gauge
vllm:num_requests_swapped{model_name="m"} 0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="m"} 7
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="stop",model_name="m"} 40
# TYPE vllm:time_per_output_token_seconds histogram
vllm:time_per_output_token_seconds_bucket{le="0.1",model_name="m"} 9
vllm:time_per_output_token_seconds_bucket{le="+Inf",model_name="m"} 10
vllm:time_per_output_token_seconds_count{model_name="m"} 10
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.8
"""

# Prefix counters of V1 before 0.9.2: blocks up to 0.8.5.post1, tokens after.
VLLM_V1_OLD = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 40
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 100
# TYPE vllm:gpu_prefix_cache_hits_total counter
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 25
"""
CACHE_CONFIG = """
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0
"""

SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 3
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",moe_ep_rank="1",pp_rank="0",tp_rank="1"} 3
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="2",pp_rank="0",tp_rank="2"} 5
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 6
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="1",tp_rank="0"} 4
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="2",tp_rank="0"} 2
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.93
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="m"} 30
sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="m"} 10
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 900
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="m"} 300
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 500
"""
SGLANG_NEW = """
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8
# TYPE sglang:num_retracted_output_tokens_total counter
sglang:num_retracted_output_tokens_total{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 64
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="m",pp_rank="0",tp_rank="0"} 550
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",model_name="m",pp_rank="0",tp_rank="0"} 600
# TYPE sglang:page_size gauge
sglang:page_size{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 64
"""

TRTLLM_FIRST = """
# TYPE request_success_total counter
request_success_total{engine_type="undefined",finished_reason="stop",model_name="undefined"} 12
# TYPE e2e_request_latency_seconds histogram
e2e_request_latency_seconds_bucket{engine_type="undefined",le="+Inf",model_name="undefined"} 12
e2e_request_latency_seconds_count{engine_type="undefined",model_name="undefined"} 12
e2e_request_latency_seconds_sum{engine_type="undefined",model_name="undefined"} 30
# TYPE time_to_first_token_seconds histogram
time_to_first_token_seconds_bucket{engine_type="undefined",le="2.5",model_name="undefined"} 11
time_to_first_token_seconds_bucket{engine_type="undefined",le="+Inf",model_name="undefined"} 12
time_to_first_token_seconds_count{engine_type="undefined",model_name="undefined"} 12
time_to_first_token_seconds_sum{engine_type="undefined",model_name="undefined"} 9
"""
TRTLLM_SECOND = """
# TYPE trtllm_request_success_total counter
trtllm_request_success_total{engine_type="trtllm",finished_reason="stop",model_name="m"} 12
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
# TYPE trtllm_kv_cache_hit_rate gauge
trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="m"} 0.38
"""
TRTLLM_THIRD = (
    TRTLLM_SECOND
    + """
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 4
# TYPE trtllm_num_requests_waiting gauge
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 2
# TYPE trtllm_prompt_tokens_total counter
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 800
# TYPE trtllm_prompt_cached_tokens_total counter
trtllm_prompt_cached_tokens_total{engine_type="trtllm",model_name="m"} 200
# TYPE trtllm_kv_cache_used_blocks gauge
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m"} 62
# TYPE trtllm_kv_cache_max_blocks gauge
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 100
# TYPE trtllm_kv_cache_tokens_per_block gauge
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32
"""
)

TGI = """
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4
# TYPE tgi_queue_size gauge
tgi_queue_size 2
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 3000
# TYPE tgi_batch_max_total_tokens gauge
tgi_batch_max_total_tokens 12000
# TYPE tgi_request_success counter
tgi_request_success 50
# TYPE tgi_request_failure counter
tgi_request_failure{err="overloaded"} 3
tgi_request_failure{err="validation"} 9
# TYPE tgi_request_input_length histogram
tgi_request_input_length_bucket{le="+Inf"} 60
tgi_request_input_length_sum 6000
tgi_request_input_length_count 60
"""

TRITON = """
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 20
nv_inference_request_success{model="preprocessing",version="1"} 20
nv_inference_request_success{model="tensorrt_llm",version="1"} 20
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 6
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 30
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 90
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 120
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
# TYPE nv_inference_first_response_histogram_ms histogram
nv_inference_first_response_histogram_ms_bucket{le="100",model="tensorrt_llm",version="1"} 15
nv_inference_first_response_histogram_ms_bucket{le="2000",model="tensorrt_llm",version="1"} 19
nv_inference_first_response_histogram_ms_bucket{le="+Inf",model="tensorrt_llm",version="1"} 20
nv_inference_first_response_histogram_ms_sum{model="tensorrt_llm",version="1"} 4500
nv_inference_first_response_histogram_ms_count{model="tensorrt_llm",version="1"} 20
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 70000000000
"""

PAGES = {
    "vllm-v0": VLLM_V0,
    "vllm-v1-old": VLLM_V1_OLD + CACHE_CONFIG,
    "vllm-v1-old-without-config": VLLM_V1_OLD,
    "sglang-old": SGLANG,
    "sglang-new": SGLANG + SGLANG_NEW,
    "sglang-underscore": (SGLANG + SGLANG_NEW).replace("sglang:", "sglang_"),
    "trtllm-first": TRTLLM_FIRST,
    "trtllm-second": TRTLLM_SECOND,
    "trtllm-third": TRTLLM_THIRD,
    "tgi": TGI,
    "triton": TRITON,
    "triton-newer": TRITON.replace('request_type="scheduled"', 'request_type="waiting"'),
}


@pytest.fixture(scope="session")
def page() -> Callable[[str], dict[str, Metric]]:
    """Families by name of a page above, or of a stored scrape of a real server."""

    def read(name: str) -> dict[str, Metric]:
        path = Path(__file__).parent / "data" / f"{name}.prom.xz"
        text = PAGES[name] if name in PAGES else lzma.decompress(path.read_bytes()).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    return read
