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
TRY_S = 5.0
"""One attempt to reach the first node."""
AGREE_S = 600
"""For the agents to number their workers, once they are all there."""
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
    handler = StaticTCPRendezvous(host, port, node, section.nodes, "agenttrain", AGREE_S)
    # Now, while the port is ours: the first node's handler shares the store that holds it.
    handler.next_rendezvous()
    return handler


def _reach(host: str, port: int, section: DistributedConfig, node: int) -> TCPStore:
    """The store of the first node."""
    if node > 0:
        _wait_for_door(host, port, section, node)
    try:
        return TCPStore(
            *(host, port, section.nodes, node == 0, timedelta(seconds=section.timeout_s)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistNetworkError, DistStoreError) as error:
        problem = str(error).partition("\n")[0]
        raise NotMet(
            f"distributed.rendezvous={host}:{port}: does not work on {socket.gethostname()}: "
            f"{problem}; is it the first node's name, and is the port free there?"
        ) from error


def _wait_for_door(host: str, port: int, section: DistributedConfig, node: int) -> None:
    """Until somebody listens there: torch's own wait hears no signals, and is loud."""
    deadline = time.monotonic() + section.timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=TRY_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotMet(
                    f"distributed.rendezvous={host}:{port}: node {node} cannot reach it: {error}"
                ) from error
            time.sleep(POLL_S)


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
