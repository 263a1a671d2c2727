"""What a serving runtime takes from kvprofile: profiles of its own models, plans, keys for what they make. No torch.

Importing it loads the standard library only. Exports are read with that alone, Parquet with pyarrow.
"""

from __future__ import annotations

from kvprofile.cost.timeline import Link
from kvprofile.errors import BadInput
from kvprofile.limits import LossLimit
from kvprofile.runtime.cache_key import cache_key, exact_cache_key
from kvprofile.runtime.differences import Difference
from kvprofile.runtime.fingerprint import Fingerprint, Pair, fingerprints
from kvprofile.runtime.plan import ChosenPlan
from kvprofile.runtime.policy import Considered, Decider, Decision, Policy
from kvprofile.runtime.profile import RuntimeProfile, Times
from kvprofile.runtime.store import Found, Near, ProfileStore, load_profile
from kvprofile.runtime.watch import Watch

__all__ = [
    "BadInput",
    "ChosenPlan",
    "Considered",
    "Decider",
    "Decision",
    "Difference",
    "Fingerprint",
    "Found",
    "Link",
    "LossLimit",
    "Near",
    "Pair",
    "Policy",
    "ProfileStore",
    "RuntimeProfile",
    "Times",
    "Watch",
    "cache_key",
    "exact_cache_key",
    "fingerprints",
    "load_profile",
]
