"""Models: what a reference names, loading it, fingerprints, and whether two of them are a pair."""
