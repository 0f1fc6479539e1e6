"""Megatron-Bridge: the same Megatron core as megatron-lm, configured by a file in place of arguments."""
