"""Profiles on disk: Arrow schemas, writer, reader, index. No torch, and no numpy in what a runtime reads."""
