"""The laboratory: what settles the paper."""
