"""`math_verify`: equal or not, and never for long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from reward_cases import made, reward

from agenttrain.rewards.builtin.math_verify import MathVerify

pytest.importorskip("math_verify", reason="needs pip install 'agenttrain[math]'")


@pytest.fixture(scope="module")
def function() -> Iterator[MathVerify]:
    """One worker process for all of these tests: sympy takes seconds to import."""
    yield MathVerify(answer_s=2)
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.kill()


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so it is $\frac{2}{4}$", r"\frac{1}{2}", 1.0),
        ("The answer is 72.", "72", 1.0),
        ("The answer is 73.", 72, 0.0),
        (r"\boxed{(x+1)^2}", "$x^2+2x+1$", 1.0),
        (r"\boxed{7} because $3+5=8$", "7", 1.0),
        ("no idea", "72", 0.0),
        ("", "72", 0.0),
        ("7", "", None),
    ],
)
def test_math_verify(function, text, answer, expected):
    assert reward(function, made(text, answer=answer)) == expected


def test_an_answer_that_needs_years_is_wrong_and_the_next_one_is_read(function):
    assert reward(function, made(r"\boxed{9^{9^{9^{9}}}}", answer="7")) == 0.0
    assert reward(function, made(r"\boxed{7}", answer="7")) == 1.0


def test_a_worker_that_hangs_is_replaced():
    function = MathVerify(answer_s=0.2)
    assert reward(function, made("7", answer="7")) == 1.0
    worker = max(psutil.Process().children(), key=psutil.Process.create_time)
    worker.children()[0].suspend()  # below its keeper
    assert reward(function, made("7", answer="7")) == 0.0
    assert not worker.is_running()
    assert reward(function, made("7", answer="7")) == 1.0


@pytest.mark.slow
def test_the_worker_ends_with_its_process():
    script = (
        "from agenttrain.rewards.builtin.math_verify import MathVerify\n"
        "from reward_cases import made\n"
        "function = MathVerify()\n"
        "print(function(made('7', answer='7'), answer='7'), function._worker.child.pid)\n"
    )
    path = os.pathsep.join([os.getcwd(), str(Path(__file__).parents[1] / "kit")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    value, worker = done.stdout.split()
    assert value == "1.0"
    gone = subprocess.run(
        ["timeout", "20", "tail", f"--pid={worker}", "-f", "/dev/null"], check=False
    )
    assert gone.returncode == 0


def test_a_limit_that_is_none():
    with pytest.raises(ValueError, match=r"answer_s=0: must be more than 0"):
        MathVerify(answer_s=0)
