"""All of the connector's cases and servers: python -m tests.engines.kv_vllm FOLDER. FOLDER/8 becomes the model."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from tests.engines import kv_vllm_cases, kv_vllm_serve, kv_vllm_stages
from tests.engines.generate_vllm import preload
from tests.engines.models import save_models


def main(folder: Path) -> None:
    preload()
    save_models(folder, ["8"])
    # A fork: the cases leave threads behind, and servers are forked from this process.
    cases = multiprocessing.get_context("fork").Process(target=kv_vllm_cases.main, args=(folder, []))
    cases.start()
    cases.join()
    if cases.exitcode:
        raise SystemExit(f"the cases ended with {cases.exitcode}")
    kv_vllm_stages.install(folder)
    kv_vllm_serve.main(folder, list(kv_vllm_serve.CASES))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
