#!/bin/bash
nemo llm pretrain --factory llama3_8b trainer.num_nodes=1 trainer.devices=8 trainer.max_steps=100 -y
