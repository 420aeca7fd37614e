"""How model families differ where a config does not say it: biases, gates, norms. Used to count parameters."""

from __future__ import annotations

PLAIN_MLP = {  # two matrices, no gate
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "codegen",
    "opt",
    "bloom",
    "mpt",
    "phi",
    "falcon",
    "starcoder2",
    "nemotron",
    "nemotron_h",
    "arcee",
    "persimmon",
    "apertus",
}
BIAS_EVERYWHERE = {"gpt2", "gpt_bigcode", "opt", "bloom", "phi", "persimmon"}
QKV_BIAS = {"qwen", "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"}
QKV_BIAS_ONLY = {"glm", "glm4", "glm4_moe", "seed_oss"}  # attention_bias does not reach the output projection
NORM_BIAS = {"gpt_neox", "falcon", "starcoder2", "stablelm"} | BIAS_EVERYWHERE
FOUR_NORMS = {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4"}
ONE_NORM = {"phi", "gptj", "codegen", "cohere", "cohere2", "nemotron_h"}
LEARNED_POSITIONS = {"gpt2", "gpt_bigcode", "opt"}
FOUR_TIMES_HIDDEN = {"gpt2", "gpt_bigcode", "gptj", "codegen", "bloom", "falcon", "mpt"}  # an MLP of no stated size
TIED = {"gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "cohere", "cohere2"}
NOT_COUNTED = {"zamba", "zamba2", "jetmoe", "rwkv", "xlstm"}  # weights shared or shaped in ways no count here follows
