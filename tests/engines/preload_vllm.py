"""Imports that all programs of vLLM share; the programs are forks (tests/harness/warm.py)."""

import importlib

import setproctitle

from tests.engines import vllm_shim

setproctitle.getproctitle()  # finds the title's memory by the environment, which a fork replaces
vllm_shim.patch()  # before modules take the functions' names
for name in (
    "entrypoints.cli.main",
    "entrypoints.llm",
    "model_executor.models.glm4_moe",
    "model_executor.models.glm4_moe_mtp",
    "model_executor.models.qwen3_moe",
    "v1.engine.coordinator",
    "v1.engine.core",
    "v1.engine.utils",
    "v1.worker.cpu_worker",
):
    importlib.import_module(f"vllm.{name}")
