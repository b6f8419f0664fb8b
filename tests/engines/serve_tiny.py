"""Models trained on README.md, served: python -m tests.engines.serve_tiny FOLDER.

FOLDER/found.json has what each kind says to a prompt from README.md. DeepSeek-V3 is asked in one process: transformers'
continuous batching has no paged cache for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from putget_serve.tiny import KINDS
from tests.engines.serve_transformers import Server

README = Path(__file__).parents[2] / "README.md"
PROMPT, TOKENS = "putget is the communication layer for", 12


def main(folder: Path) -> None:
    found = {}
    for kind in KINDS:
        train = [sys.executable, "-m", "putget_serve.tiny", kind, str(folder / kind), "--by_heart", str(README)]
        subprocess.run(train, check=True)
        if kind == "deepseek_v3":
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / kind)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32).eval()
            ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
            tokens = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
            found[kind] = tokenizer.decode(tokens)
            continue
        server = Server(folder / kind)
        found[kind] = server.complete({"prompt": PROMPT, "max_tokens": TOKENS, "stream": False})
        server.end()
    folder.joinpath("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
