"""Tasks in Harbor's format: a folder with a container, an instruction, tests and a solution.

keys.py     every key of task.toml: used here, without a meaning here, or refused
task.py     the folder, read and checked
grading.py  the tests, run as Harbor runs them
"""
