"""Megatron-LM as a backend: `backend.MegatronLM` is what others take from this room."""
