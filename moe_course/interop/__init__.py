"""Weights of other programs in and out: Hugging Face checkpoints (``huggingface``), in safetensors files."""
