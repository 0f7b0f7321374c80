"""Objectives: the loss of each sampled token, one file each. `config.py` is their registry."""
