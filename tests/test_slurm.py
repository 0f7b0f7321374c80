import os, time, pathlib


def test_x():
    p = pathlib.Path("/tmp/slurmdev")
    p.write_text(os.environ["SLURM_CONF"])
    while p.exists():
        time.sleep(1)
