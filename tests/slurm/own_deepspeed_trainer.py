"""A person's own DeepSpeed trainer, of which llmlaunch knows nothing: a small Llama on random tokens, on a CPU."""

from __future__ import annotations

import argparse

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_length", type=int)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    options = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, and is not used
    deepspeed.init_distributed("gloo")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model_name_or_path))
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    for step in range(1, options.max_steps + 1):
        tokens = torch.randint(0, 200, (engine.train_micro_batch_size_per_gpu(), options.max_length))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step: {step} loss: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
