"""SGLang's own Qwen3-MoE."""

from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = Qwen3MoeForCausalLM
