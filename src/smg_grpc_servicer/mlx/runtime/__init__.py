"""The MLX generation runtime: one thread that owns all mlx state, and what it decodes with.

Importing any module in here imports mlx: call `mlx.backend.prepare` first.
"""
