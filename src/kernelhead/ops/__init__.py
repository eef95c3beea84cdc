"""Fused implementations: what the heads and losses compute, with memory and speed in mind."""
