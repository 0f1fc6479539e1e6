#!/bin/bash
llamafactory-cli train cfg.yaml
