"""Measurements behind the README's tables: ``python -m benchmarks``."""
