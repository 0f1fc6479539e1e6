#!/bin/bash
accelerate launch -m axolotl.cli.train dense.yaml
