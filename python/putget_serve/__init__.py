"""Expert-parallel transformers models behind an OpenAI interface: ``putget serve PATH --ep_size N``.

Each rank is a process with requests of its own: transformers' app, its continuous batching, and putget's rounds. All
ranks listen on one port, so there is no proxy.
"""
