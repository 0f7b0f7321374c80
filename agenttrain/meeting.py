"""Where the launchers of all nodes meet before they start anything."""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from agenttrain.config.distributed import DistributedConfig
from agenttrain.types import AgenttrainError

HERE = "127.0.0.1"
TRY = timedelta(seconds=5)
"""One attempt to reach the first node; between two, signals are heard."""
POLL_S = 0.2
TELL_S = 30.0
"""Between two lines about who is missing."""


class NotMet(AgenttrainError):
    """Not every node came; the message names those that are missing."""


def meet(section: DistributedConfig, node: int) -> RendezvousHandler:
    """What elastic's agent needs to start this node's workers, once all nodes are there.

    On one node alone the port is any that is free. Raises NotMet after `timeout_s`.
    """
    if section.rendezvous is None:
        host, store = HERE, TCPStore(HERE, 0, 1, True, multi_tenant=True)
        port = store.port
    else:
        host, _, text = section.rendezvous.rpartition(":")
        port = int(text)
        _wait_for_all(_reach(host, port, section, node), section, node)
    handler = StaticTCPRendezvous(host, port, node, section.nodes, "agenttrain", int(TIMEOUT_S))
    # Now, while the port is ours: the first node's handler shares the store that holds it.
    handler.next_rendezvous()
    return handler


TIMEOUT_S = 600.0
"""Of what the agents exchange, which is there at once."""


def _reach(host: str, port: int, section: DistributedConfig, node: int) -> TCPStore:
    deadline = time.monotonic() + section.timeout_s
    while True:
        try:
            return TCPStore(
                *(host, port, section.nodes, node == 0, TRY),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (DistNetworkError, DistStoreError) as error:
            where = f"distributed.rendezvous={host}:{port}"
            if node == 0:
                raise NotMet(
                    f"{where}: cannot be opened on {socket.gethostname()}: {error}"
                ) from error
            if time.monotonic() > deadline:
                raise NotMet(f"{where}: node {node} cannot reach it: {error}") from error


def _wait_for_all(store: TCPStore, section: DistributedConfig, node: int) -> None:
    store.set(f"node/{node}", socket.gethostname())
    deadline = time.monotonic() + section.timeout_s
    tell = time.monotonic() + TELL_S
    while missing := [n for n in range(section.nodes) if not store.check([f"node/{n}"])]:
        who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if time.monotonic() > deadline:
            raise NotMet(
                f"distributed.nodes={section.nodes}: {who} did not come to {section.rendezvous} "
                f"within {section.timeout_s:g} s (distributed.timeout_s)"
            )
        if time.monotonic() > tell:
            tell += TELL_S
            print(f"node {node} waits for {who} at {section.rendezvous}", file=sys.stderr)
        time.sleep(POLL_S)
