"""The models that SGLang loads in these tests (SGLANG_EXTERNAL_MODEL_PACKAGE); importing all of its own takes long."""
