#!/bin/bash
# a node of eight, as the recipe's README starts it
ACCELERATE_LOG_LEVEL=info accelerate launch --config_file sharded.yaml scripts/sft.py --config small.yaml
