#!/bin/bash
nemo llm pretrain -y --factory llama3_8b trainer.max_steps=100 trainer.devices=8 trainer.num_nodes=1
