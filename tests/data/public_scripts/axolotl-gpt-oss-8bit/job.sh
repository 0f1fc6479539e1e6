#!/bin/bash
axolotl train moe.yaml
