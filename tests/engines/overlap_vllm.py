"""Whether vLLM's own configuration takes dual-batch overlap with its default backend: prints it, or why not."""

from vllm.config import ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

load_general_plugins()
# On a CPU vLLM switches the overlap off before it asks who can overlap.
type(current_platform).check_and_update_config = classmethod(lambda *_: None)
parallel = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, enable_dbo=True)
try:
    print("takes", VllmConfig(parallel_config=parallel).parallel_config.all2all_backend)
except ValueError as error:
    print("refuses", error)
