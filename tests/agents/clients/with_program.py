"""A program that the argument names, in a folder of its own. Prints the reward of `check`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

task = json.loads(sys.stdin.readline())
program = sys.argv[1]
folder, home = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
for file, text in task["columns"]["files"].items():
    (folder / file).write_text(text, encoding="utf-8")
prompt = task["messages"][-1]["content"]
settings = {"HOME": str(home), "PWD": str(folder)}
if program == "opencode":
    options = {"baseURL": task["base_url"], "apiKey": os.environ["OPENAI_API_KEY"]}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "agenttrain",
        "options": options,
        "models": {task["model"]: {"name": "policy"}},
    }
    config = {
        "provider": {"agenttrain": provider},
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    (home / "opencode.json").write_text(json.dumps(config))
    settings |= {"OPENCODE_CONFIG": str(home / "opencode.json")}
    settings |= {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
    arguments = ["run", "-m", f"agenttrain/{task['model']}", prompt]
elif program == "mini":
    # No prices of the model are known, and no questions are asked at the first start.
    settings |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true"}
    settings |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    arguments = ["-m", f"openai/{task['model']}", "--yolo", "--exit-immediately", "-t", prompt]
else:
    (home / ".qwen").mkdir()
    quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    (home / ".qwen" / "settings.json").write_text(json.dumps(quiet))
    arguments = ["--auth-type", "openai", "--yolo", "-p", prompt]
subprocess.run(
    [os.environ["PROGRAM"], *arguments],
    cwd=folder,
    env={**os.environ, **settings},
    stdin=subprocess.DEVNULL,
)
tests = subprocess.run(["sh", "-c", task["columns"]["check"]], cwd=folder, capture_output=True)
print(json.dumps({"reward": float(tests.returncode == 0)}))
