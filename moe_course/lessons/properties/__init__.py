"""Properties of the exercises, one module a chapter: random cases and float64 NumPy oracles."""
