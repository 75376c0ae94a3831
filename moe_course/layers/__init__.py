"""Flax NNX modules. Weights are float32 masters; ``compute_dtype`` is what the matmuls see.

Activations inside the trunk are token-major, [tokens, d_model], in batch-then-position order.
"""
