"""Imports that all programs of transformers share; the programs are forks (tests/harness/warm.py)."""

import transformers

LOADED = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.ContinuousBatchingConfig)
"""Names that import most of the package."""
