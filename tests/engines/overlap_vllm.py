"""Whether vLLM's own configuration takes dual-batch overlap with its default backend, without and with putget."""


def answer() -> str:
    from vllm.config import ParallelConfig, VllmConfig

    parallel = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, enable_dbo=True)
    try:
        return f"takes {VllmConfig(parallel_config=parallel).parallel_config.all2all_backend}"
    except ValueError as error:
        return f"refuses: {error}"


def main() -> None:
    """Says both, in a process that has not loaded vLLM's plug-ins yet."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    # On a CPU vLLM switches the overlap off before it asks who can overlap.
    type(current_platform).check_and_update_config = classmethod(lambda *_: None)
    print("without putget it", answer(), flush=True)
    load_general_plugins()
    print("with putget it", answer(), flush=True)
