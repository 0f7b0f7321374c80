"""One rollout of Codex: a small repository in its own folder, its tests as the reward."""

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
home = Path(tempfile.mkdtemp())
(home / "config.toml").write_text(f"""
model = {json.dumps(task["model"])}
model_provider = "agenttrain"
check_for_update_on_startup = false

[model_providers.agenttrain]
name = "agenttrain"
base_url = {json.dumps(task["base_url"])}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
""")
# The sandbox is the run's (agent.sandbox), so that the agent needs none of its own.
command = [os.environ.get("CODEX", "codex"), "exec", "--skip-git-repo-check"]
command += ["--dangerously-bypass-approvals-and-sandbox"]
subprocess.run(
    [*command, *sys.argv[1:], prompt],
    cwd=folder,
    env={**os.environ, "CODEX_HOME": str(home)},
    stdin=subprocess.DEVNULL,
)  # its exit code may be that of a limit of the run, which is no failure

tests = subprocess.run(["sh", "-c", task["columns"]["check"]], cwd=folder, capture_output=True)
print(json.dumps({"reward": float(tests.returncode == 0)}))
