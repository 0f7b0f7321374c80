"""Where a rollout's commands run: a container of its own, or the sandboxes of the tools.

base.py        what a runtime gives and gets: the Protocol, the specification of a machine
machines.py    a machine for each rollout: how many, which image, tried again, ended
containers.py  podman and docker, by their own programs
channel.py     commands in a running container, without the client
network.py     a port of the host's that only the container reaches
allowlist.py   the proxy on such a port, for the hosts of a list
images.py      images made of folders, once for each content
leftovers.py   containers of runs that have ended
reaper.py      the process that outlives the run and removes its containers
local.py       the double: commands in a folder of this machine
harbor/        tasks in Harbor's format, and their grading
"""
