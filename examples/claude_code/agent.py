"""One rollout of Claude Code: a small repository in its own folder, its tests as the reward."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

task = json.loads(sys.stdin.readline())
folder = Path(tempfile.mkdtemp())
for file, text in task["columns"]["files"].items():
    (folder / file).write_text(text, encoding="utf-8")
prompt = task["messages"][-1]["content"]
settings = {
    # No telemetry, no updates, no title of the session.
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CONFIG_DIR": tempfile.mkdtemp(),
    # The sandbox is the run's (agent.sandbox), so that the agent need not ask before it acts.
    "IS_SANDBOX": "1",
}
command = [os.environ.get("CLAUDE", "claude"), "--print", "--permission-mode", "bypassPermissions"]
subprocess.run(
    [*command, *sys.argv[1:], prompt],
    cwd=folder,
    env={**os.environ, **settings},
    stdin=subprocess.DEVNULL,
)  # its exit code may be that of a limit of the run, which is no failure

tests = subprocess.run(["sh", "-c", task["columns"]["check"]], cwd=folder, capture_output=True)
print(json.dumps({"reward": float(tests.returncode == 0)}))
