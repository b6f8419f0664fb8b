"""All of the backend's cases and servers: python -m tests.engines.kv_sglang FOLDER. FOLDER/8 becomes the model."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path

from putget_transfer.adapters import sglang
from tests.engines import kv_sglang_layers
from tests.engines.generate_sglang import patch, preload
from tests.engines.models import save_models


def main(folder: Path) -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    preload()
    patch()
    sglang.install()
    save_models(folder, ["8"], kv_sglang_layers.HEAD_DIM)
    importlib.import_module("sglang.srt.entrypoints.http_server")  # servers are forked with it
    from tests.engines import kv_sglang_cases, kv_sglang_serve

    # A fork: the cases leave threads behind.
    cases = multiprocessing.Process(target=kv_sglang_cases.main, args=(folder, []))
    cases.start()
    cases.join()
    if cases.exitcode:
        raise SystemExit(f"the cases ended with {cases.exitcode}")
    kv_sglang_serve.main(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
