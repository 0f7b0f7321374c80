"""An MCP server over stdio: the catalogue of a small library."""

from __future__ import annotations

from mcp.server import MCPServer

SHELVES = {
    "The Salt Road": "B4",
    "A Year of Clocks": "A1",
    "Maps of Nowhere": "C2",
    "The Tin Violin": "B1",
}
AUTHORS = {
    "Ida Moss": ["The Salt Road", "The Tin Violin"],
    "Noel Kern": ["A Year of Clocks"],
    "Uma Reyes": ["Maps of Nowhere"],
}

server = MCPServer("library")


@server.tool()
def shelf_of(title: str) -> str:
    """Return the shelf on which a book stands."""
    return SHELVES.get(title, f"no book is called {title!r}")


@server.tool()
def books_by(author: str) -> str:
    """Return the titles of an author's books."""
    return "; ".join(AUTHORS.get(author, [])) or f"no book is by {author!r}"


if __name__ == "__main__":
    server.run()
