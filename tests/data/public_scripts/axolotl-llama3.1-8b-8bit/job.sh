#!/bin/bash
accelerate launch -m axolotl.cli.train train.yaml
