"""Scaling: what a model costs, in FLOPs and parameters, before anything runs."""
