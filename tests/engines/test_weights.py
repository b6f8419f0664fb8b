"""Weight updates with transformers' models: the example, as a reader would run it."""

from __future__ import annotations

from tests.engines.run import needs_transfer, only_with_engines, run

pytestmark = [*only_with_engines, needs_transfer]


def test_a_rollout_follows_its_trainers() -> None:
    told = run("transformers", "examples/weights.py", 2)
    for model in ("Qwen3-MoE", "DeepSeek-V3"):
        for version in (1, 2):
            assert f"{model}, version {version}: loss" in told
    assert told.count("logits equal") == 4
    assert told.count("2 trainer ranks to 1 replicas of 2") == 2
