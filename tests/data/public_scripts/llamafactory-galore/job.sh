#!/bin/bash
llamafactory-cli train projected.yaml
