"""Certified tools on disk: the next process need not certify them, and no change is missed."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import parts
import pytest
import tiny

from agenttrain.agents import certified
from agenttrain.agents.certified import CertifiedTools, cache_folder
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat

TOOLS = parts.toolbox().schemas()


def chat_of(template: str) -> Chat:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    return load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())


def test_a_result_is_read_by_the_next_and_made_anew_for_other_tools_or_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[int] = []
    certify = certified.certify
    monkeypatch.setattr(certified, "certify", lambda *a: made.append(1) or certify(*a))
    for _ in range(2):
        assert CertifiedTools(parts.chat()).problem(TOOLS) is None
    assert (len(made), len(list(cache_folder().iterdir()))) == (1, 1)
    CertifiedTools(parts.chat()).problem(TOOLS[:1])
    assert len(made) == 2
    # A template that drops what tools reply.
    bad = CertifiedTools(chat_of(tiny.TEMPLATE.replace("+ m.content +", "+", 9)))
    problem = bad.problem(TOOLS)
    assert problem is not None and problem.startswith("the chat template cannot show them: ")
    assert len(made) == 3
    assert CertifiedTools(bad.chat).problem(TOOLS) == problem
    assert len(made) == 3
    for path in cache_folder().iterdir():
        path.write_text("{", encoding="utf-8")  # of a machine that crashed
    assert CertifiedTools(parts.chat()).problem(TOOLS) is None
    assert len(made) == 4


def test_a_home_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert CertifiedTools(parts.chat()).problem(TOOLS) is None


def test_results_that_were_used_longest_ago_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(certified, "KEPT", 2)
    tools = CertifiedTools(parts.chat())
    paths = []
    for count, schemas in enumerate([TOOLS, TOOLS[:1]]):
        tools.problem(schemas)
        paths += set(cache_folder().iterdir()) - set(paths)
        os.utime(paths[-1], (count, count))
    tools.problem(TOOLS)
    tools.problem([])
    assert paths[0].exists() and not paths[1].exists()
    assert len(list(cache_folder().iterdir())) == 2
