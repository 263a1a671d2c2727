"""How a server asks kvprofile what to do with a request. It needs `kvprofile.runtime` only: no torch.

kvprofile check SENDER RECEIVER --json > check.json
python examples/server.py outputs check.json
"""

import sys
import threading
from pathlib import Path

from kvprofile.runtime import Decision, Link, Policy, ProfileStore, Watch, cache_key, exact_cache_key, fingerprints

POLICY = Policy("5%", rule="bound", latency_target_ms=500, task="qa")
LINK = Link(bytes_per_ms=12_500_000, latency_ms=0.2)  # 100 Gbit/s


def keep_current(watch: Watch, seconds: float, stop: threading.Event) -> None:
    """Looks now and then whether a newer version was published or this one rejected; requests go on meanwhile."""
    while not stop.wait(seconds):
        watch.refresh()


def serve(watch: Watch, context: list[int], waiting: int, tenant: str) -> tuple[Decision | None, str]:
    """Returns what to do with a request, None where nothing is known, and the key under which to keep the K/V that it makes."""
    profile, receiver = watch.found.profile, watch.question["receiver"]
    decision = POLICY.decide(profile, len(context), waiting, LINK) if profile else None
    if decision is None or decision.plan is None:
        return decision, exact_cache_key(receiver, "bfloat16", context, tenant)
    return decision, cache_key(decision.plan, context, tenant, dtype="bfloat16")


if __name__ == "__main__":
    sender, receiver = fingerprints(Path(sys.argv[2]).read_text("utf-8"))
    watch = ProfileStore(sys.argv[1]).watch(sender=sender, receiver=receiver, task="qa")
    stop = threading.Event()
    threading.Thread(target=keep_current, args=(watch, 5.0, stop), daemon=True).start()
    print(watch.found.why or f"serving by {watch.found.profile}")
    for waiting in (0, 3):
        decision, key = serve(watch, list(range(1000)), waiting, "tenant-a")
        print(decision.why if decision else "full prefill: no profile of these models", key, sep="\n")
    stop.set()
