#!/bin/bash
# In a fresh container with the agent's /app. The visible test is the repository's own, unchanged.
mkdir -p /logs/verifier
run() { python3 -m unittest discover -s /tests -p "$1" > /dev/null 2>&1 && echo 1 || echo 0; }
visible=$(PYTHONPATH=/app run test_visible.py)
hidden=$(PYTHONPATH=/app run test_hidden.py)
echo "{\"reward\": $((visible * hidden)), \"visible\": $visible, \"hidden\": $hidden}" > /logs/verifier/reward.json
