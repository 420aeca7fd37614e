"""What would look the same as a finding, and which figure of the window tells them apart.

One function a rule. A look-alike that no measured figure excludes lowers the confidence; one that is shown to be the
case takes the finding's place (`CAUSES`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from probe.doctor.figures import Figures
from probe.doctor.finding import LookAlike
from runbooks.facts import TargetFacts

FULL, ROOMY = 0.9, 0.5  # kv-saturated's threshold; half of the pool free
LONGEST_PROMPT_S = 180.0  # engine-stall's own window: more than what serves a prompt takes for it
THROWN_OUT_TIMES = 3.0


@dataclass(frozen=True)
class Scene:
    """What a differential looks at."""

    figures: Figures
    facts: TargetFacts

    @property
    def window(self) -> str:
        """The window, for sentences."""
        return f"{self.figures.window_s:.0f} s"


def old_event(scene: Scene, metric: str, what: str) -> LookAlike:
    """A counter that grew before the window and stands still since."""
    grown = scene.figures.grown(metric) or 0.0
    return LookAlike(
        "an old event: the counter stands still", grown > 0, f"{what} rose by {grown:,.0f} in {scene.window}"
    )


def compute_bound(scene: Scene) -> LookAlike:
    """A queue for want of compute while the pool has room."""
    name, usage = "a compute-bound queue: the pool has room, requests wait for steps", scene.figures.usage
    if usage is None:
        return LookAlike(name, None, "KV usage is not read: it would tell")
    return LookAlike(name, usage[2] >= FULL, f"KV usage reached {usage[2]:.1%} (mean {usage[1]:.1%}) in {scene.window}")


def hot_replica(scene: Scene) -> LookAlike:
    """One replica full, others idle: a matter of routing."""
    name, means = "one hot replica: routing, not size", scene.figures.usage_by_engine
    if len(means) < 2:
        return LookAlike(name, True, "there is one engine")
    hot, cold = max(means, key=lambda e: means[e]), min(means, key=lambda e: means[e])
    alone = means[hot] >= FULL and means[cold] < ROOMY
    return LookAlike(name, not alone, f"engine {hot} {means[hot]:.1%} full, engine {cold} {means[cold]:.1%}")


def seats_taken(scene: Scene) -> LookAlike:
    """All places of --max-num-seqs taken."""
    name, seats = "all places of --max-num-seqs taken", scene.facts.max_num_seqs
    running = scene.figures.most("requests_running")
    if seats is None or running is None:
        return LookAlike(name, None, "--max-num-seqs is not known: give it with --flags")
    return LookAlike(
        name, running < seats * scene.figures.replicas, f"{running:,.0f} ran at most, --max-num-seqs is {seats}"
    )


def long_answers(scene: Scene) -> LookAlike:
    """Nothing finished because answers are longer than the window."""
    name = f"answers that take longer than {scene.window}: nothing could finish"
    preempted = scene.figures.grown("preemptions_total") or 0.0
    held = (scene.figures.most("requests_running") or 0.0) + (scene.figures.most("requests_waiting") or 0.0)
    each = preempted / held if held else 0.0
    said = f"{preempted:,.0f} preemptions for {held:,.0f} requests held, {each:.1f} each"
    return LookAlike(name, True if each >= THROWN_OUT_TIMES or scene.figures.window_s >= 300 else None, said)


def one_long_prompt(scene: Scene) -> LookAlike:
    """A prompt that is computed for longer than the window: its tokens are counted at its end."""
    name, running = "one long prompt being computed", scene.figures.most("requests_running")
    if running == 0:
        return LookAlike(name, True, f"nothing ran in {scene.window}")
    if scene.figures.window_s >= LONGEST_PROMPT_S:
        return LookAlike(name, True, f"no prompt takes {scene.window}")
    return LookAlike(name, None, f"{running or 0:,.0f} run, and {scene.window} are short for that: look for 3 minutes")


def target_gone(scene: Scene) -> LookAlike:
    """The engine does not answer at all."""
    seen = scene.figures.observed
    return LookAlike("the server is gone", seen.answers == seen.attempts, f"{seen.answers} of {seen.attempts} answered")


def brief_requests(scene: Scene) -> LookAlike:
    """Requests between two scrapes."""
    finished = scene.figures.grown("requests_finished_total")
    name = "short requests between two scrapes"
    if finished is None:
        return LookAlike(name, None, "ended requests are not counted")
    return LookAlike(name, finished == 0, f"{finished:,.0f} requests ended in {scene.window}")


def workload(_: Scene) -> LookAlike:
    """Prompts that share nothing, by their nature."""
    return LookAlike("prompts that share nothing by nature", True, "it is judged against its own baseline")


def lru_life(scene: Scene) -> LookAlike:
    """A full cache that drops what nobody asks for."""
    again = scene.figures.grown("kv_evicted_before_reuse_total") or 0.0
    dropped = scene.figures.grown("kv_block_evictions_total") or 0.0
    said = f"{again:,.0f} of {dropped:,.0f} dropped blocks were asked for again"
    return LookAlike("normal life of an LRU cache: nobody misses what is dropped", again > 0, said)


def queue_or_prefill(scene: Scene) -> LookAlike:
    """Where first tokens lose their time."""
    queue, prefill = scene.figures.mean("queue_seconds"), scene.figures.mean("prefill_seconds")
    name = "slow prefill, no queue"
    if queue is None or prefill is None:
        return LookAlike(name, None, "queue and prefill times are not exposed, or no request ended")
    return LookAlike(name, queue >= prefill, f"{queue:.2f} s in the queue, {prefill:.2f} s in prefill on average")


def recomputed(scene: Scene) -> LookAlike:
    """Gaps in answers that preemption makes: one in each answer that stops, and one in each that runs beside."""
    figures, name = scene.figures, "gaps made by preemption"
    preempted, slow = figures.grown("preemptions_total"), figures.slow("itl_seconds")
    if preempted is None:
        return LookAlike(name, None, "preemptions are not counted")
    if not preempted or slow is None:
        return LookAlike(name, None if preempted else True, f"{preempted:,.0f} preemptions in {scene.window}")
    most = preempted * max(figures.most("requests_running") or 1.0, 1.0)
    said = f"{preempted:,.0f} preemptions make at most {most:,.0f} of {slow[0]:,.0f} gaps above {slow[2]:g} s"
    return LookAlike(name, most < slow[0] / 2, said)


def preempted_first(scene: Scene) -> LookAlike:
    """First tokens that wait behind what is computed again."""
    preempted = scene.figures.grown("preemptions_total")
    name = "requests that wait behind what is computed again"
    if preempted is None:
        return LookAlike(name, None, "preemptions are not counted")
    return LookAlike(name, preempted == 0, f"{preempted:,.0f} preemptions in {scene.window}")


def speculation(scene: Scene) -> LookAlike:
    """Draft tokens that are computed in vain."""
    config = scene.facts.flags.get("--speculative-config", "")
    name = "draft tokens computed in vain (speculative decoding)"
    if config == "" and not scene.facts.flags.get("--max-num-seqs"):
        return LookAlike(name, None, "give the flags with --flags, or read vllm:spec_decode_num_accepted_tokens_total")
    return LookAlike(name, not config, "it is off" if not config else "it is on: compare accepted with drafted tokens")


def _preempted(scene: Scene) -> LookAlike:
    return old_event(scene, "preemptions_total", "preemptions")


DIFFERENTIALS: dict[str, tuple[Callable[[Scene], LookAlike], ...]] = {
    "eviction-storm": (_preempted, compute_bound, hot_replica),
    "preemption-livelock": (_preempted, long_answers),
    "kv-saturated": (compute_bound, hot_replica),
    "head-of-line-block": (seats_taken, target_gone),
    "engine-stall": (one_long_prompt, target_gone),
    "kv-block-leak": (brief_requests,),
    "cache-thrash": (lru_life,),
    "prefix-hit-collapse": (workload,),
    "ttft-slo-burn": (queue_or_prefill, preempted_first),
    "itl-slo-burn": (recomputed, speculation),
}
