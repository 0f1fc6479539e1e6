#!/bin/bash
axolotl train gpt-oss.yaml
