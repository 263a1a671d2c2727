"""How a server asks kvprofile what to do with a request. It needs `kvprofile.runtime` only: no torch.

kvprofile check SENDER RECEIVER --json > check.json
python examples/server.py outputs check.json
"""

import sys
import threading
from pathlib import Path

from kvprofile.runtime import BadInput, Link, Policy, ProfileStore, Watch, cache_key, exact_cache_key, fingerprints

POLICY = Policy("10%", rule="point", latency_target_ms=500, task="qa")  # in production: rule="bound"
LINK = Link(bytes_per_ms=12_500_000, latency_ms=0.2)  # 100 Gbit/s


def keep_current(watch: Watch, seconds: float, stop: threading.Event) -> None:
    """Looks now and then whether a newer version was published or this one rejected; requests go on meanwhile."""
    while not stop.wait(seconds):
        try:
            watch.refresh()
        except BadInput as error:  # the last answer stays, and the next look may go well
            print(error, file=sys.stderr)


def serve(watch: Watch, context: list[int], waiting: int, tenant: str) -> tuple[str, str]:
    """Returns what to do with a request, in words, and the key under which to keep the K/V that it makes."""
    plan, why, profile = None, "full prefill: no profile of these models", watch.found.profile
    try:
        if profile:
            plan, why, *_ = POLICY.decide(profile, len(context), waiting, LINK)
    except BadInput as error:  # such as: the profile has several data sets of the task, and the policy names none
        why = f"full prefill: {error}"
    if plan is None:
        return why, exact_cache_key(watch.question["receiver"], "bfloat16", context, tenant)
    return why, cache_key(plan, context, tenant, dtype="bfloat16")


if __name__ == "__main__":
    _, store, check = sys.argv if len(sys.argv) == 3 else sys.exit("usage: python examples/server.py STORE CHECK_JSON")
    sender, receiver = fingerprints(Path(check).read_text("utf-8"))
    watch, stop = ProfileStore(store).watch(sender=sender, receiver=receiver, task="qa"), threading.Event()
    threading.Thread(target=keep_current, args=(watch, 5.0, stop), daemon=True).start()
    answers = [said for waiting in (0, 3) for said in serve(watch, list(range(1000)), waiting, "tenant-a")]
    print(watch.found.why or f"serving by {watch.found.profile}", *answers, sep="\n")
