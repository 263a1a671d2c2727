"""kvprofile: which layers must a receiver recompute to reuse a sender's KV cache? Importing this costs no torch."""

__version__ = "0.1.0"
