#!/bin/bash
USE_MCA=1 llamafactory-cli train experts.yaml
