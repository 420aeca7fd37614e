"""What is printed to be applied: parsed again it gives the flags that were advised, and nothing else has changed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml

from runbooks.changes import FlagChange, Recommendation
from runbooks.command_edit import CommandError, edited
from runbooks.facts import TargetFacts
from runbooks.outputs import FORMS, render
from runbooks.recommend import from_facts, recommend

COMMAND = (
    "VLLM_LOGGING_LEVEL='WARN ING' vllm serve './my model' --max_num_seqs=64 --gpu-memory-utilization 0.8 \\\n"
    """  --kv-transfer-config '{"kv_connector": "X $A"}' --no-enable-prefix-caching -tp 2 --swap-space 4 --port 8000"""
)
FACTS = TargetFacts("vllm", "0.33.0", flags={"--max-num-seqs": 64, "--gpu-memory-utilization": 0.8, "--swap-space": 4})


def advice(**to: Any) -> Recommendation:
    """A recommendation of these changes, `max_num_seqs=8` for `--max-num-seqs 8`."""
    made = [
        FlagChange(
            f"--{name.replace('_', '-')}", FACTS.flags.get(f"--{name.replace('_', '-')}"), value, "w", "e", "c", "v"
        )
        for name, value in to.items()
    ]
    return Recommendation("eviction-storm", tuple(made), (), (), "Do it: 'this' # and that")


ADVICE = advice(
    max_num_seqs=8, gpu_memory_utilization=0.92, enable_prefix_caching=True, swap_space=None, tensor_parallel_size=4,
    kv_cache_dtype="fp8", enforce_eager=False, kv_cache_dtype_skip_layers="0 1",
)  # fmt: skip
WANTED = {
    "--max-num-seqs": "8", "--gpu-memory-utilization": "0.92", "--enable-prefix-caching": True,
    "--tensor-parallel-size": "4", "--kv-cache-dtype": "fp8", "--no-enforce-eager": True,
    "--kv-cache-dtype-skip-layers": ["0", "1"], "--kv-transfer-config": '{"kv_connector": "X $A"}', "--port": "8000",
}  # fmt: skip


def parsed(words: list[str]) -> dict[str, Any]:
    """Flags of a command as it stands, each with its words."""
    found: dict[str, Any] = {}
    flag = None
    for word in words:
        if word.startswith("--"):
            flag, glue, value = word.partition("=")
            assert flag not in found, f"{flag} twice"
            found[flag] = value if glue else True
        elif flag is not None:
            found[flag] = (
                word
                if found[flag] is True
                else [*([found[flag]] if isinstance(found[flag], str) else found[flag]), word]
            )
    return found


def changed_lines(diff: str) -> tuple[str, str]:
    """The command before and after a unified diff without hunks left out."""
    body = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before = "\n".join(line[1:] for line in body if not line.startswith("+"))
    return before, "\n".join(line[1:] for line in body if not line.startswith("-"))


def shell(command: str) -> list[str]:
    """The words a shell would read."""
    return shlex.split(command.replace("\\\n", " "))


def words_of(form: str, text: str) -> tuple[list[str], dict[str, str]]:
    """The words of the command in a rendered form, and its environment."""
    if form == "launch":
        words = shell(changed_lines(text)[1])
        env = dict(word.split("=", 1) for word in words[:1])
        return words[1:], env
    if form == "json":
        words = shlex.split(json.loads(text)["command"]["after"])
        return words[1:], dict([words[0].split("=", 1)])
    data = yaml.safe_load(text)
    if form == "helm":
        model = data["servingEngineSpec"]["modelSpec"][0]
        return model["vllmConfig"]["extraArgs"], {e["name"]: e["value"] for e in model["env"]}
    if form == "compose":
        service = data["services"]["vllm"]
        undollared = [word.replace("$$", "$") for word in service["command"]]
        return undollared, service["environment"]
    container = data["spec"]["template"]["spec"]["containers"][0]
    return container["command"] + container["args"], {e["name"]: e["value"] for e in container["env"]}


@pytest.mark.parametrize("form", ["launch", "helm", "compose", "kubernetes", "json"])
def test_what_is_rendered_gives_the_flags_that_were_advised(form: str) -> None:
    words, env = words_of(form, render(ADVICE, FACTS, form, COMMAND))
    assert env == {"VLLM_LOGGING_LEVEL": "WARN ING"}
    assert parsed(words) == WANTED
    if form in ("launch", "compose", "kubernetes", "json"):
        assert words[:3] == ["vllm", "serve", "./my model"]
    assert all(isinstance(word, str) for word in words)  # YAML must not make numbers of them


def test_a_diff_starts_from_the_command_as_it_was_given() -> None:
    before, after = changed_lines(render(ADVICE, FACTS, "launch", COMMAND))
    assert shell(before) == shell(COMMAND)
    assert "--swap-space" not in after
    assert "-tp" not in after.replace("--tensor-parallel-size", "")


def test_without_a_command_the_known_flags_are_the_list_and_it_says_so() -> None:
    text = render(advice(max_num_seqs=8), FACTS, "helm")
    assert "only the flags known" in text
    arguments = yaml.safe_load(text)["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"]
    assert parsed(arguments)["--max-num-seqs"] == "8"
    assert parsed(arguments)["--gpu-memory-utilization"] == "0.8"


@pytest.mark.parametrize(
    ("command", "changes", "version", "after"),
    [
        ("vllm serve M --enforce-eager", {"--enforce-eager": False}, "0.8.5", "vllm serve M"),  # a switch: no --no-
        ("vllm serve M --enforce-eager", {"--enforce-eager": False}, "0.9.0", "vllm serve M --no-enforce-eager"),
        (
            "vllm serve M --enable-chunked-prefill false --port 1",
            {"--enable-chunked-prefill": True},
            "0.6.6",
            "vllm serve M --enable-chunked-prefill true --port 1",
        ),
        (
            "vllm serve M --max-num-seqs 1 --max-num-seqs=2",
            {"--max-num-seqs": 3},
            "0.33.0",
            "vllm serve M --max-num-seqs 3",
        ),
        (
            "vllm serve M --device-memory-utilization 0.9",
            {"--gpu-memory-utilization": 0.8},
            "0.33.0",
            "vllm serve M --gpu-memory-utilization 0.8",
        ),
        ("vllm serve M --no-enable-prefix-caching", {"--enable-prefix-caching": None}, "0.33.0", "vllm serve M"),
        (
            "vllm serve M --kv-cache-dtype-skip-layers 0 1 --port 1",
            {"--kv-cache-dtype-skip-layers": None},
            "0.33.0",
            "vllm serve M --port 1",
        ),
        ("vllm serve --enforce-eager M", {"--enforce-eager": None}, "0.33.0", "vllm serve M"),  # M is no value of it
    ],
)
def test_a_command_is_edited_as_its_version_spells(
    command: str, changes: dict[str, Any], version: str, after: str
) -> None:
    assert edited(shlex.split(command), changes, "vllm", version) == shlex.split(after)


def test_what_tensorrt_llm_reads_from_yaml_is_rendered_as_that_yaml() -> None:
    change = FlagChange("kv_cache_config.free_gpu_memory_fraction", 0.5, 0.8, "w", "e", "c", "up == 1")
    batch = FlagChange("--max_batch_size", None, 16, "w", "e", "c", "up == 1")
    made = Recommendation("kv-saturated", (change, batch), (), (), "s")
    facts = TargetFacts("tensorrt-llm", "1.0.0")
    text = render(made, facts, "launch", "trtllm-serve M")
    diff, options = text.split("# in the file given to --extra_llm_api_options\n")
    assert yaml.safe_load(options) == {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}
    assert shell(changed_lines(diff)[1]) == ["trtllm-serve", "M", "--max_batch_size", "16"]
    values = yaml.safe_load(render(made, facts, "helm", "trtllm-serve M"))
    assert values["extraLlmApiOptions"] == {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}
    assert change.rollback.startswith("restart with kv_cache_config.free_gpu_memory_fraction: 0.5 in the YAML")


def test_other_engines_get_a_plain_list_of_arguments() -> None:
    made = Recommendation("itl-slo-burn", (FlagChange("--page-size", 1, 16, "w", "e", "c", "v"),), (), (), "s")
    text = render(
        made, TargetFacts("sglang", "0.5.23"), "helm", "python -m sglang.launch_server --page-size 1 --tp-size 2"
    )
    assert yaml.safe_load(text) == {"extraArgs": ["--page-size", "16", "--tp-size", "2"]}


def test_text_holds_all_that_is_known_and_every_form_bears_no_change() -> None:
    facts = from_facts({
        "engine": "vllm", "version": "0.32.0", "kv_cache_size_tokens": 1504, "block_size": 32, "num_gpu_blocks": 48,
        "flags": {"--max-num-seqs": 16}, "traffic": {"peak_running": 16, "tokens_per_request_peak": 300},
    })  # fmt: skip
    made = recommend("eviction-storm", facts)
    text = render(made, facts)
    for part in (made.changes[0].why, made.changes[0].risk, made.changes[0].rollback, *made.missing):
        assert part in text
    nothing = recommend("target-missing", facts)
    for form in FORMS:
        assert nothing.summary.split(":")[0] in render(nothing, facts, form)
    assert json.loads(render(made, facts, "json"))["changes"] == json.loads(json.dumps(made.to_dict()["changes"]))


def test_what_cannot_be_rendered_is_one_sentence() -> None:
    with pytest.raises(CommandError, match="no closing quotation"):
        render(ADVICE, FACTS, "launch", "vllm serve 'M")
    with pytest.raises(ValueError, match="there is no form 'xml'; there are: text"):
        render(ADVICE, replace(FACTS), "xml")
