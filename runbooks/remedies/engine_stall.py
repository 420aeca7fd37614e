"""Engine stall: requests are held and no token is made. A restart ends it; what is seen before tells why.

One stall is a matter of flags: a head of the queue that can never be admitted.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.remedies.admission import context_that_fits
from runbooks.remedies.elsewhere import steps_elsewhere
from runbooks.remedies.pool import UTILIZATION

ID = "engine-stall"


def advise(facts: TargetFacts) -> Recommendation:
    """A shorter context where a request can be too long for the pool; else steps."""
    draft = Draft(ID, facts)
    draft.step("Take the replica out of routing, so that clients go elsewhere")
    draft.step(
        "Before a restart: keep the last log lines, and the stacks of the engine's process (`py-spy dump --pid PID`)"
    )
    draft.step(
        "Look for device errors (XID in the kernel log, device_xid_errors_total) and for ranks that differ: one rank "
        "that waits for another stalls all"
    )
    draft.step("Restart; requests in flight are lost. After a device error restart on another device")
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    if facts.traffic.peak_running:
        draft.refuse(
            "--max-model-len", "lower", "will not help: requests ran, so the head of the queue had been admitted"
        )
        shorter = False
    else:
        shorter = context_that_fits(draft)
    draft.refuse(UTILIZATION, None, "will not help: an engine that stands still has no use for more or less memory")
    draft.refuse("--max-num-seqs", None, "will not help: the step that hangs does so with one request as with many")
    if shorter:
        return draft.done("A request longer than the pool blocks the queue for ever: refuse it at admission")
    return draft.done("No flag ends a stall: take evidence, then restart")
