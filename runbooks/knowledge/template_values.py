"""The values of a template's flags, each computed from the plan of the server it is for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.plan import plan
from runbooks.flags import EMBEDDED, why_value_absent
from runbooks.knowledge import template_extras, template_kv, template_steps
from runbooks.knowledge.engine_flags import declared_default, engine_title, flag_for_setting, newest, source_of
from runbooks.knowledge.template_load import own_tokens, requests_at_once, shared_tokens
from runbooks.knowledge.template_parts import FlagChoice, LeftOut, Template, TemplateAdvice
from runbooks.knowledge.text import Text, data, gib, phrases

_MOST_SEQS = 1024  # the largest batch vLLM itself takes as a default; beyond it graphs and samplers are not tuned
_ORDER = tuple(data("engine_flags"))  # of the flags of a command


class Draft:
    """One template applied to one deployment, change by change; `plan` is always that of `deployment`."""

    def __init__(self, template: Template, deployment: Deployment) -> None:
        self.template = template
        version = deployment.version or newest(deployment.engine)
        longest = deployment.shape.max_position_embeddings
        self.deployment = replace(
            deployment,
            version=version,
            max_model_len=min(template.max_model_len, longest or template.max_model_len),
            tokens_per_request=min(template.tokens_per_request, longest or template.tokens_per_request),
            max_num_seqs=None,
            max_num_batched_tokens=None,
            kv_cache_dtype="auto",
            gpu_memory_utilization=None,
            enforce_eager=False,
            kv_offloading_bytes=0,
        )
        self.plan: CapacityPlan = plan(self.deployment)
        self.defaults = self.plan
        self.flags: list[FlagChoice] = []
        self.left_out: list[LeftOut] = []
        self.steps: list[Text] = []

    @property
    def engine(self) -> str:
        """The engine's name as the catalog has it."""
        return self.deployment.engine

    @property
    def own_tokens(self) -> int:
        """Tokens of a request that no other shares."""
        return own_tokens(self.template, self.plan)

    @property
    def shared_tokens(self) -> int:
        """Tokens that all requests share."""
        return shared_tokens(self.template, self.plan)

    def tried(self, **changes: Any) -> CapacityPlan | None:
        """The plan with changes; None where they cannot be planned."""
        try:
            return plan(replace(self.deployment, **changes))
        except ConfigError:
            return None

    def adopt(self, **changes: Any) -> None:
        """Makes changes for good."""
        self.deployment = replace(self.deployment, **changes)
        self.plan = plan(self.deployment)

    def held(self, found: CapacityPlan | None = None) -> int:
        """Requests of the template's length that a pool holds at once."""
        return requests_at_once(self.template, found or self.plan)

    def has(self, setting: str) -> bool:
        """Whether this version has a flag for the setting."""
        return flag_for_setting(self.engine, self.deployment.version, setting)[0] is not None

    def choose(self, setting: str, value: Any, reason: Text, *, in_force: Any = None, sure: bool = False) -> bool:
        """Adds a flag unless there is none, it takes no such value, or it is the default; tells whether it was added.

        in_force: what holds without it, where the plan knows; sure: it has to be written whatever the default is.
        """
        version = self.deployment.version
        flag, problem = flag_for_setting(self.engine, version, setting)
        if flag is None:
            words = phrases("template_reasons")["absent" if problem else "no_flag"]
            self.leave_out(setting, value, words.filled(why=problem or "", engine=engine_title(self.engine)))
            return False
        refused = why_value_absent(self.engine, version, flag, value)
        if refused is not None:
            self.leave_out(setting, value, phrases("template_reasons")["absent"].filled(why=refused))
            return False
        default = declared_default(self.engine, version, flag) if in_force is None else in_force
        if not sure and default is not None and default == value:
            self.leave_out(setting, value, self.phrase("is_default", value=value))
            return False
        self.flags.append(FlagChoice(setting, flag, value, reason, source_of(self.engine, version)))
        return True

    def leave_out(self, setting: str, value: Any, reason: Text) -> None:
        """Notes what is not set, and why."""
        self.left_out.append(LeftOut(setting, value, reason))

    def phrase(self, key: str, **figures: Any) -> Text:
        """A sentence of `template_reasons.yaml` with figures in it."""
        return phrases("template_reasons")[key].filled(
            **{"engine": engine_title(self.engine), "version": self.deployment.version or "(this build)", **figures}
        )

    def advice(self) -> TemplateAdvice:
        """Everything, in the order in which one change rests on another."""
        self._utilization()
        template_kv.choose_format(self)
        if not self.plan.fits:
            self._make_it_fit()
        template_steps.choose_step(self)
        template_steps.fit_prompts(self)
        seqs = self._sequences()
        self._write_layout()
        self._write_lengths()
        if seqs is not None:
            self.choose("max_num_seqs", *seqs, in_force=self.defaults.max_num_seqs)
        template_extras.choose_extras(self)
        if not self.plan.fits:
            self.steps.append(
                self.phrase(
                    "does_not_fit",
                    reason=" ".join(self.plan.reasons[:2]),
                    pool=gib(self.plan.kv_cache_bytes),
                    needed=gib(self.plan.needed_bytes),
                )
            )
        return TemplateAdvice(
            self.template,
            self.deployment,
            self.plan,
            tuple(sorted(self.flags, key=lambda choice: _ORDER.index(choice.setting))),
            tuple(self.left_out),
            tuple(self.steps),
            self.held(),
        )

    def _write_layout(self) -> None:
        found = self.plan
        figures = {"weights": gib(found.part("weights")), "per_token": found.kv_bytes_per_token or 0}
        for setting in ("tp", "pp", "dp"):
            count = getattr(self.deployment, setting)
            if count > 1:
                self.choose(setting, count, self.phrase(setting, **{setting: count}, **figures), in_force=1)

    def _write_lengths(self) -> None:
        length = self.plan.max_model_len
        model = self.deployment.shape.max_position_embeddings
        wanted = min(self.template.max_model_len, model or self.template.max_model_len)
        if length < wanted:
            reason = self.phrase(
                "max_model_len_cut",
                template=wanted,
                value=length,
                needed=gib(self.defaults.needed_bytes),
                pool=gib(self.plan.kv_cache_bytes),
            )
        else:
            shown = f"{model:,}" if model else "?"
            needed = gib(self.plan.needed_bytes)
            reason = self.phrase("max_model_len", template=length, needed=needed, model=shown)
        self.choose("max_model_len", length, reason, in_force=model)
        if self.has("max_input_tokens"):
            longest = template_steps.longest_prompt(self)
            figures = {"total": length, "output": length - longest, "value": longest}
            self.choose("max_input_tokens", longest, self.phrase("max_input_tokens", **figures))

    def _utilization(self) -> None:
        """Room for other processes on the card: the largest share that leaves them what they hold."""
        others, gpu = self.deployment.other_processes_bytes, self.deployment.gpu
        if not others or gpu is None:
            return
        value = math.floor(100 * (1 - others / gpu.memory_bytes)) / 100
        default = self.plan.gpu_memory_utilization
        if default is not None and value >= default:
            return
        if self.tried(gpu_memory_utilization=value) is None:
            return
        self.adopt(gpu_memory_utilization=value)
        key = "utilization_fraction" if self.engine == "tensorrt-llm" else "utilization_shared"
        figures = {"others": gib(others), "device": gib(gpu.memory_bytes), "value": value}
        self.choose("gpu_memory_utilization", value, self.phrase(key, **figures), in_force=default)

    def _make_it_fit(self) -> None:
        """Smaller steps, then no graphs, then shorter requests, until one request fits."""
        default = self.plan.max_num_batched_tokens
        for size in (template_steps.SMALL_STEP, 1024):
            found = self.tried(max_num_batched_tokens=size) if size < default and self.engine != "tgi" else None
            if not self.plan.fits and found is not None and found.kv_cache_bytes > self.plan.kv_cache_bytes:
                self.adopt(max_num_batched_tokens=size)
        without = self.tried(enforce_eager=True) if not self.plan.fits and self.has("enforce_eager") else None
        if without is not None and without.kv_cache_bytes > self.plan.kv_cache_bytes:
            graphs = gib(self.plan.part("CUDA graphs"))
            self.adopt(enforce_eager=True)
            self.choose(
                "enforce_eager", True, self.phrase("enforce_eager", graphs=graphs, pool=gib(without.kv_cache_bytes))
            )
        if not self.plan.fits:
            length = self.plan.largest_model_len // template_steps.PAGE * template_steps.PAGE
            found = self.tried(max_model_len=length) if length >= 2 * template_steps.PAGE else None
            if found is not None and found.fits:
                self.adopt(max_model_len=length)

    def _sequences(self) -> tuple[int, Text] | None:
        """How many run at once: what the pool holds, or what an answer's pauses allow; None: the default is right."""
        default = self.plan.max_num_seqs
        if self.held() < 1:
            return None
        bounded = self._by_bandwidth()
        wanted = min(_MOST_SEQS, self.held(), bounded or _MOST_SEQS)
        raises = self.template.objective in ("concurrency", "throughput")
        if wanted == default or (wanted > default and not raises):
            return None
        wanted = self._that_hold_themselves(wanted, min(_MOST_SEQS, bounded or _MOST_SEQS))
        if wanted < 1 or wanted == default or (wanted > default and not raises):
            return None
        held = self.held()
        self.adopt(max_num_seqs=wanted)
        return wanted, self._why_sequences(
            wanted, default, held, limited_by_time=bounded is not None and bounded < held
        )

    def _that_hold_themselves(self, guess: int, most: int) -> int:
        """The most sequences whose own plan holds them: more need larger graphs and samplers, which take from it."""
        low, high = 0, 0
        while guess > low:
            held = self._held_with(guess)
            if held >= guess:
                low, guess = guess, min(most, held)
            else:
                high, guess = guess, held
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._held_with(middle) >= middle else (low, middle)
        return low

    def _held_with(self, seqs: int) -> int:
        found = self.tried(max_num_seqs=seqs)
        return self.held(found) if found is not None and found.fits else 0

    def _why_sequences(self, value: int, default: int, held: int, *, limited_by_time: bool) -> Text:
        shared = self.phrase("shared_part", shared=self.shared_tokens) if self.shared_tokens else Text("", "")
        figures: dict[str, Any] = {
            "pool": self.plan.kv_tokens,
            "own": self.own_tokens,
            "value": value,
            "shared": shared,
        }
        if not limited_by_time:
            key = "max_num_seqs_raise" if value > default else "max_num_seqs_pool"
            return self.phrase(key, default=default, **figures)
        gpu, itl = self.deployment.gpu, self.template.itl_ms
        assert gpu is not None
        assert gpu.memory_bandwidth is not None
        return self.phrase(
            "max_num_seqs_latency",
            weights=gib(self.plan.part("weights")),
            bandwidth=gpu.memory_bandwidth / 1e12,
            itl=1000 * self._step_seconds(value),
            target=itl,
            held=held,
            **figures,
        )

    def _step_seconds(self, running: int) -> float:
        """A decode step at the full bandwidth of memory: a lower bound of the pause between tokens."""
        gpu = self.deployment.gpu
        bandwidth = gpu.memory_bandwidth if gpu is not None else None
        kv = running * self.own_tokens * (self.plan.kv_bytes_per_token or 0)
        return (self.plan.part("weights") + kv) / (bandwidth or math.inf)

    def _by_bandwidth(self) -> int | None:
        """Requests whose KV is read in half of the pause that is allowed; None where nothing limits it so."""
        gpu, itl = self.deployment.gpu, self.template.itl_ms
        per_token = self.plan.kv_bytes_per_token
        if itl is None or gpu is None or not gpu.memory_bandwidth or not per_token or self.engine == EMBEDDED:
            return None
        room = gpu.memory_bandwidth * itl / 2000 - self.plan.part("weights")
        count = int(room // (self.own_tokens * per_token))
        return count if count >= 1 else None  # the weights alone take that long: fewer sequences would not help
