"""Plug-ins that put putget under the engines people run. docs/guides/engines/index.md shows each switch.

Importing a module of this package imports no engine; an engine is imported when its plug-in is used. The modules hold
no algorithm: they turn an engine's arguments into those of ``putget.AllToAll``, and its results into what the engine
expects.

A family of engines is a folder, and never imports another:

- ``tensorrt_llm``: the four-payload form of TensorRT-LLM, and a place in its communication factory.
- ``flashinfer``: ``MoeAlltoAll`` with FlashInfer's signatures, its functions ``moe_a2a_*``, and a ``flashinfer.moe_ep``
  communication.
- ``sglang``: a plug-in and a dispatcher.
- ``vllm``: a plug-in and a modular prepare-and-finalize.
- ``transformers``: ``ep_implementation="putget"``.
- ``deep_ep``: ``Buffer`` and ``ElasticBuffer`` with DeepEP's signatures.

All families stand on ``shared``, ``rounds``, ``engines``, ``placement`` and ``proof``.
"""
